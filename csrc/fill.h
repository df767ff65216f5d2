// The seam between the bindings and the backends: raw pointers, sizes and numbers, no torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "draw.h"
#include "keep_going.h"
#include "region.h"
#include "unary.h"

namespace shardinit {

enum class Dtype : int {
  kFloat64,
  kFloat32,
  kBFloat16,
  kFloat16,
  kFloat8E4M3,
  kFloat8E5M2,
  kBits32,  // integers, whose signs do not matter
  kBits64,
  kBits8,
  kBits16
};

SHARDINIT_HD constexpr size_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
    case Dtype::kBits64:
      return 8;
    case Dtype::kFloat32:
    case Dtype::kBits32:
      return 4;
    case Dtype::kBFloat16:
    case Dtype::kFloat16:
    case Dtype::kBits16:
      return 2;
    default:
      return 1;
  }
}

SHARDINIT_HD constexpr bool is_integer(Dtype dtype) { return dtype >= Dtype::kBits32; }

// One grid of elements of one tensor, and what to put there.
struct Piece {
  void* data;  // of the grid's first element
  Dtype dtype;
  Grid grid;
  bool is_double;  // which draw counts
  Draw<float> draw32;
  Draw<double> draw64;
  int num_unary;
  Unary unary[kMaxUnary];
};

// Parameters as the caller gave them, checked in Python: a number in fp64, already rounded to fp32 where that is the
// working precision. p: constant (value); uniform (a, b); normal (std, mean); trunc_normal (std, mean, a, b); bernoulli
// (how many words of 2^32 give 1); random (low, high), exact as doubles. Bits, exponential and cauchy have none.
// Reads the piece's dtype and num_unary.
void set_draw(Piece* piece, Distribution distribution, const double p[4], uint64_t seed, uint64_t tensor_id);

// Fills all pieces on the CPU with up to num_threads threads; may change the order of their axes. False where
// keep_going stopped it. The floating-point environment of the caller neither matters nor changes.
bool fill_cpu(Piece* pieces, size_t num_pieces, int num_threads, const KeepGoing& keep_going);

}  // namespace shardinit
