// The inner loop of the CPU's digests, one for each instruction set that digest_kernels.cpp was compiled for.
#pragma once

#include <cstddef>

#include "digest.h"

namespace shardinit {

// Adds n elements of 1, 2 or 4 bytes, side by side. Their indices have the high half that `key` belongs to, and the
// low halves low, low + step, ..., all below 2^32.
using DigestRun = void (*)(const void* elements, uint32_t size, size_t n, uint32_t low, uint64_t step,
                           const DigestKey& key, uint32_t sum[4]);

void digest_run_baseline(const void*, uint32_t, size_t, uint32_t, uint64_t, const DigestKey&, uint32_t[4]);
#if defined(__x86_64__)
void digest_run_avx2(const void*, uint32_t, size_t, uint32_t, uint64_t, const DigestKey&, uint32_t[4]);
void digest_run_avx512(const void*, uint32_t, size_t, uint32_t, uint64_t, const DigestKey&, uint32_t[4]);
#endif

}  // namespace shardinit
