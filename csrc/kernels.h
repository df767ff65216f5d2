// The inner loops of the CPU backend, one table for each instruction set that kernels.cpp was compiled for.
#pragma once

#include "fill.h"

namespace shardinit {

// Which elements: those with consecutive global indices from `first`, or, where there are lows, whole blocks, four
// elements each. lows holds the low words of their numbers; `first` is an element of a block with the high word of all.
struct Elements {
  uint64_t first;
  const uint32_t* lows = nullptr;
};

struct Kernels {
  const char* name;
  // n elements, in working precision or as raw words.
  void (*draw32)(const Draw<float>& draw, Elements which, size_t n, float* out);
  void (*draw64)(const Draw<double>& draw, Elements which, size_t n, double* out);
  void (*bits32)(const Stream& stream, Elements which, size_t n, uint32_t* out);
  void (*bits64)(const Stream& stream, Elements which, size_t n, uint64_t* out);
  void (*unary32)(const Unary* ops, int num_ops, float* x, size_t n);
  void (*unary64)(const Unary* ops, int num_ops, double* x, size_t n);
  // Integers of 64 bits, two's complement; what a piece of integers or reals makes of them.
  void (*integers)(const Stream& stream, const RandomParams& params, Elements which, size_t n, uint64_t* out);
  void (*to_reals32)(const uint64_t* from, size_t n, float* out);
  void (*to_reals64)(const uint64_t* from, size_t n, double* out);
  void (*truncate_small)(Dtype dtype, const float* from, size_t n, void* out);  // small integers as floats
  void (*truncate)(Dtype dtype, const uint64_t* from, size_t n, void* out);
  // Rounds to one of the types below fp32.
  void (*narrow)(Dtype dtype, const float* x, size_t n, void* out);
  // One element's draw from given words, for the tests of accuracy: 32- or 64-bit words widened to 64.
  void (*transform)(const Piece& piece, const uint64_t* p, const uint64_t* q, size_t n, double* even, double* odd);
};

const Kernels& kernels_baseline();
#if defined(__x86_64__)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
#endif

}  // namespace shardinit
