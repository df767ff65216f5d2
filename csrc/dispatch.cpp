#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace shardinit {
namespace {

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> all{&kernels_baseline()};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    all.push_back(&kernels_avx2());
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl")) {
      all.push_back(&kernels_avx512());
    }
  }
#endif
  return all;
}

const Kernels* choose(const std::string& name) {
  const auto all = available();
  if (name.empty()) return all.back();
  std::string names;
  for (const Kernels* kernels : all) {
    if (name == kernels->name) return kernels;
    names += (names.empty() ? "" : ", ") + std::string(kernels->name);
  }
  throw std::invalid_argument("SHARDINIT_ISA must be one that this processor runs (" + names + "), got '" + name + "'");
}

std::string from_environment() {
  const char* name = std::getenv("SHARDINIT_ISA");
  return name ? name : "";
}

std::atomic<const Kernels*> active{nullptr};

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available()) names.emplace_back(kernels->name);
  return names;
}

const Kernels& active_kernels() {
  const Kernels* kernels = active.load();
  if (!kernels) {
    kernels = choose(from_environment());
    active.store(kernels);
  }
  return *kernels;
}

void force_isa(const std::string& name) { active.store(choose(name.empty() ? from_environment() : name)); }

}  // namespace shardinit
