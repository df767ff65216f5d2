// The default floating-point environment for a scope: nearest even, subnormals kept, exceptions masked. The caller's
// comes back.
#pragma once

#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace shardinit {

class DefaultFpEnvironment {
 public:
#if defined(__x86_64__)
  DefaultFpEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~DefaultFpEnvironment() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kDefault = 0x1f80;
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultFpEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~DefaultFpEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
#error "torch_shardinit: no floating-point environment control for this architecture"
#endif

 public:
  DefaultFpEnvironment(const DefaultFpEnvironment&) = delete;
  DefaultFpEnvironment& operator=(const DefaultFpEnvironment&) = delete;
};

}  // namespace shardinit
