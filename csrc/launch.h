// What goes to the CUDA kernels: their parameter blocks, and the plan of the launches that a batch of pieces needs.
// There is no CUDA in here, so that a machine without a GPU can make the plan and run the kernels' PTX with it.
#pragma once

#include <functional>
#include <type_traits>

#include "fill.h"
#include "narrow.h"

namespace shardinit {

inline constexpr uint32_t kWarpThreads = 32;
inline constexpr uint32_t kThreads = 256;     // of a thread block; the kernels take any multiple of a warp
inline constexpr uint32_t kMostInFlight = 4;  // Philox blocks that a thread does in a turn of its loop
inline constexpr uint32_t kPassBlocks = kWarpThreads * kMostInFlight;  // what a warp does at least
inline constexpr size_t kParameterBytes = 4096;                        // the most that every driver takes

struct BatchHeader {
  PhiloxKey key;
  uint32_t num_pieces;
  uint32_t passes;  // of a span, kPassBlocks each
  uint64_t total;   // spans of a RunBatch, units of a GridBatch
};

// x rounded to one of the types below fp32, or as an integer where it is a small one, in the low bits.
SHARDINIT_HD uint32_t narrow(Dtype dtype, float x) {
  switch (dtype) {
    case Dtype::kBFloat16:
      return round_to<BFloat16>(x);
    case Dtype::kFloat16:
      return round_to<Float16>(x);
    case Dtype::kFloat8E4M3:
      return round_to<Float8E4M3>(x);
    case Dtype::kFloat8E5M2:
      return round_to<Float8E5M2>(x);
    default:
      return static_cast<uint32_t>(static_cast<int32_t>(x));
  }
}

// ---- runs: elements side by side in memory with consecutive global indices, and no steps after the draw
// ---------------

template <class Fn>
inline constexpr int kPlanes = sizeof(typename Fn::Word) == 8 ? 2 : 1;

// Block 0 holds the first element. The blocks of a piece share the high word of their number.
template <class Fn>
struct RunPiece {
  uint64_t origin;      // address of lane 0 of block 0, which may lie before the memory that is filled
  uint64_t end;         // in elements from there
  uint32_t begin;       // in elements from there, less than a block
  uint32_t vector;      // 1 where whole blocks are aligned for vector stores
  uint32_t low;         // low word of block 0's number
  uint32_t first_span;  // spans of the pieces before; a span is what a warp does before it looks for its next piece
  Dtype dtype;
  PhiloxHoisted hoisted[kPlanes<Fn>];
  typename Fn::Params params;
};

// A constant's run has no Philox blocks but units of 16 bytes, begin and end in elements as above.
struct ConstantFn {
  using Word = uint32_t;
  struct Params {
    uint64_t pattern;  // of one element, repeated to fill 8 bytes
  };
};

template <class Fn>
struct RunBatch {
  using Piece = RunPiece<Fn>;
  static constexpr size_t kMaxPieces = (kParameterBytes - sizeof(BatchHeader)) / sizeof(Piece);
  BatchHeader header;
  Piece pieces[kMaxPieces];
};

// ---- grids: any strides and steps, and steps after the draw -------------------------------------

// A unit is one Philox block of one row: the axes before the last number the rows, and along the last one global
// indices are consecutive. Axes and steps of all pieces lie in two pools, since most pieces have few of either.
template <class Fn>
struct GridPiece {
  uint64_t data;
  uint64_t first;           // global index
  uint64_t first_unit;      // units of the pieces before
  uint64_t blocks_per_row;  // enough for every row, at whichever lane it begins
  uint64_t num_rows;
  uint32_t id_low, id_high;
  Dtype dtype;
  uint32_t first_axis, num_axes;
  uint32_t first_step, num_steps;
  typename Fn::Params params;
};

template <class Fn>
struct Step {
  using Operand = std::conditional_t<sizeof(typename Fn::Word) == 8, double, float>;
  UnaryOp op;
  Operand operand;
};

template <class Fn>
struct GridBatch {
  using Piece = GridPiece<Fn>;
  static constexpr size_t kMaxAxes = kMaxDims + 1;
  static constexpr size_t kPools = kMaxAxes * sizeof(Axis) + kMaxUnary * sizeof(Step<Fn>);
  static constexpr size_t kMaxPieces = (kParameterBytes - sizeof(BatchHeader) - kPools) / sizeof(Piece);
  BatchHeader header;
  Axis axes[kMaxAxes];
  Step<Fn> steps[kMaxUnary];
  Piece pieces[kMaxPieces];
};

// ---- which kernels there are --------------------------------------------------------------------

using Uniform32 = UniformFn<float>;
using UniformScaled32 = UniformFn<float, true>;
using Normal32 = NormalFn<float>;
using TruncNormal32 = TruncNormalWideFn<float, false>;
using TruncNormalCentral32 = TruncNormalWideFn<float, true>;
using TruncNormalNarrow32 = TruncNormalNarrowFn<float>;
using Uniform64 = UniformFn<double>;
using UniformScaled64 = UniformFn<double, true>;
using Normal64 = NormalFn<double>;
using TruncNormal64 = TruncNormalWideFn<double, false>;
using TruncNormalNarrow64 = TruncNormalNarrowFn<double>;
using Exponential32 = ExponentialFn<float>;
using Exponential64 = ExponentialFn<double>;
using Cauchy32 = CauchyFn<float>;
using Cauchy64 = CauchyFn<double>;
using Bernoulli32 = BernoulliFn<float>;
using Bernoulli64 = BernoulliFn<double>;
using Bits32 = BitsFn<uint32_t>;
using Bits64 = BitsFn<uint64_t>;

// What a kernel of runs writes: words as they are, bf16, one of the other types below fp32 (the piece says which).
struct Whole;
struct Brain;
struct Narrow;

// X(name, function, output)
#define SHARDINIT_RUN_KERNELS(X)                               \
  X(uniform_f32, UniformScaled32, Whole)                       \
  X(uniform_bf16, UniformScaled32, Brain)                      \
  X(uniform_narrow, UniformScaled32, Narrow)                   \
  X(normal_f32, Normal32, Whole)                               \
  X(normal_bf16, Normal32, Brain)                              \
  X(normal_narrow, Normal32, Narrow)                           \
  X(trunc_normal_f32, TruncNormal32, Whole)                    \
  X(trunc_normal_bf16, TruncNormal32, Brain)                   \
  X(trunc_normal_narrow, TruncNormal32, Narrow)                \
  X(trunc_normal_central_f32, TruncNormalCentral32, Whole)     \
  X(trunc_normal_central_bf16, TruncNormalCentral32, Brain)    \
  X(trunc_normal_central_narrow, TruncNormalCentral32, Narrow) \
  X(trunc_normal_series_f32, TruncNormalNarrow32, Whole)       \
  X(trunc_normal_series_bf16, TruncNormalNarrow32, Brain)      \
  X(trunc_normal_series_narrow, TruncNormalNarrow32, Narrow)   \
  X(uniform_f64, UniformScaled64, Whole)                       \
  X(normal_f64, Normal64, Whole)                               \
  X(trunc_normal_f64, TruncNormal64, Whole)                    \
  X(trunc_normal_series_f64, TruncNormalNarrow64, Whole)       \
  X(bits32, Bits32, Whole)                                     \
  X(bits64, Bits64, Whole)                                     \
  X(constant, ConstantFn, Whole)

// X(name, function); a kernel of grids rounds to whatever the piece says. What init code seldom draws has no others.
#define SHARDINIT_GRID_KERNELS(X)                \
  X(uniform_32, Uniform32)                       \
  X(normal_32, Normal32)                         \
  X(trunc_normal_32, TruncNormal32)              \
  X(trunc_normal_series_32, TruncNormalNarrow32) \
  X(uniform_64, Uniform64)                       \
  X(normal_64, Normal64)                         \
  X(trunc_normal_64, TruncNormal64)              \
  X(trunc_normal_series_64, TruncNormalNarrow64) \
  X(exponential_32, Exponential32)               \
  X(exponential_64, Exponential64)               \
  X(cauchy_32, Cauchy32)                         \
  X(cauchy_64, Cauchy64)                         \
  X(bernoulli_32, Bernoulli32)                   \
  X(bernoulli_64, Bernoulli64)                   \
  X(random, RandomFn)                            \
  X(bits32, Bits32)                              \
  X(bits64, Bits64)                              \
  X(constant, ConstantFn)

enum class Kernel : int {
#define SHARDINIT_X(name, ...) run_##name,
  SHARDINIT_RUN_KERNELS(SHARDINIT_X)
#undef SHARDINIT_X
#define SHARDINIT_X(name, ...) grid_##name,
      SHARDINIT_GRID_KERNELS(SHARDINIT_X)
#undef SHARDINIT_X
          kCount
};

// As it is called in PTX and in a profile.
const char* name_of(Kernel kernel);

struct Launch {
  Kernel kernel;
  uint32_t grid;  // thread blocks of kThreads
  const void* parameters;
  size_t num_bytes;
  uint32_t num_pieces;
  uint64_t num_elements;
};

// Calls emit for each launch that fills the pieces on a device with so many multiprocessors. Pieces must not overlap.
// To be called under the default floating-point environment.
void plan_launches(const Piece* pieces, size_t num_pieces, uint32_t num_multiprocessors,
                   const std::function<void(const Launch&)>& emit);

}  // namespace shardinit
