// From pieces to launches: which kernel does a piece, and how many pieces go into one launch.
#include "launch.h"

#include <algorithm>
#include <bitset>
#include <vector>

namespace shardinit {
namespace {

constexpr int kNumKernels = static_cast<int>(Kernel::kCount);
constexpr uint32_t kMaxPasses = 32;           // of a span: they share out the cost of finding its piece
constexpr uint32_t kWarpsPerProcessor = 128;  // twice what can be resident, so that the last ones come out even

template <class Fn, class Out>
struct RunKernel;
#define SHARDINIT_X(name, Fn, Out)                        \
  template <>                                             \
  struct RunKernel<Fn, Out> {                             \
    static constexpr Kernel kKernel = Kernel::run_##name; \
  };
SHARDINIT_RUN_KERNELS(SHARDINIT_X)
#undef SHARDINIT_X

template <class T>
const Draw<T>& draw_of(const Piece& piece) {
  if constexpr (sizeof(T) == 8) {
    return piece.draw64;
  } else {
    return piece.draw32;
  }
}
Distribution distribution_of(const Piece& piece) {
  return piece.is_double ? piece.draw64.distribution : piece.draw32.distribution;
}
const Stream& stream_of(const Piece& piece) { return piece.is_double ? piece.draw64.stream : piece.draw32.stream; }

// ---- parameters of a kernel's function ----------------------------------------------------------

template <class T, bool kScaled>
UniformParams<T> params_of(const Piece& piece, UniformFn<T, kScaled>*) {
  return draw_of<T>(piece).uniform;
}
template <class T>
NormalParams<T> params_of(const Piece& piece, NormalFn<T>*) {
  return draw_of<T>(piece).normal;
}
template <class T, bool kCentral>
TruncNormalWide<T> params_of(const Piece& piece, TruncNormalWideFn<T, kCentral>*) {
  return draw_of<T>(piece).trunc_normal;
}
template <class T>
TruncNormalNarrow<T> params_of(const Piece& piece, TruncNormalNarrowFn<T>*) {
  return draw_of<T>(piece).trunc_normal_narrow;
}
template <class T>
BernoulliParams params_of(const Piece& piece, BernoulliFn<T>*) {
  return draw_of<T>(piece).bernoulli;
}
RandomParams params_of(const Piece& piece, RandomFn*) {
  return piece.is_double ? piece.draw64.random : piece.draw32.random;
}
template <class T, class Transform>
typename PlainFn<T, Transform>::Params params_of(const Piece&, PlainFn<T, Transform>*) {
  return {};
}
template <class W>
typename BitsFn<W>::Params params_of(const Piece&, BitsFn<W>*) {
  return {};
}

// A constant takes its steps here, once.
template <class T>
T stepped_constant(const Piece& piece) {
  T x = draw_of<T>(piece).constant;
  for (int k = 0; k < piece.num_unary; ++k) {
    const T operand = static_cast<T>(piece.unary[k].operand);
    with_unary(piece.unary[k].op, [&](const auto& fn) { x = fn(x, operand); });
  }
  return piece.num_unary ? canonical_nan(x) : x;
}
ConstantFn::Params params_of(const Piece& piece, ConstantFn*) {
  uint64_t pattern;
  if (piece.is_double) {
    pattern = bits_of(stepped_constant<double>(piece));
  } else {
    const float x = stepped_constant<float>(piece);
    pattern = piece.dtype == Dtype::kFloat32 ? bits_of(x) : narrow(piece.dtype, x);
  }
  for (size_t bits = 8 * size_of(piece.dtype); bits < 64; bits *= 2) pattern |= pattern << bits;
  return {pattern};
}

// ---- which kernel -------------------------------------------------------------------------------

// Whether no word of a wide interval reaches the tails: W is greatest at one of the interval's ends, and far from
// kTailFrom against its own rounding error.
bool is_central(const TruncNormalWide<float>& params) {
  constexpr float kMargin = 0.01f;
  return params.scale == 0.0f && quantile_of<false>(uint32_t{0}, params).w < kTailFrom - kMargin &&
         quantile_of<false>(~uint32_t{0}, params).w < kTailFrom - kMargin;
}

template <class Fn>
Kernel run_kernel(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return RunKernel<Fn, Whole>::kKernel;
    case Dtype::kBFloat16:
      return RunKernel<Fn, Brain>::kKernel;
    default:
      return RunKernel<Fn, Narrow>::kKernel;
  }
}

Kernel grid_kernel_of(const Piece& piece) {
  switch (distribution_of(piece)) {
    case Distribution::kConstant:
      return Kernel::grid_constant;
    case Distribution::kBits:
      return piece.dtype == Dtype::kBits64 ? Kernel::grid_bits64 : Kernel::grid_bits32;
    case Distribution::kUniform:
      return piece.is_double ? Kernel::grid_uniform_64 : Kernel::grid_uniform_32;
    case Distribution::kNormal:
      return piece.is_double ? Kernel::grid_normal_64 : Kernel::grid_normal_32;
    case Distribution::kTruncNormal:
      return piece.is_double ? Kernel::grid_trunc_normal_64 : Kernel::grid_trunc_normal_32;
    case Distribution::kExponential:
      return piece.is_double ? Kernel::grid_exponential_64 : Kernel::grid_exponential_32;
    case Distribution::kCauchy:
      return piece.is_double ? Kernel::grid_cauchy_64 : Kernel::grid_cauchy_32;
    case Distribution::kBernoulli:
      return piece.is_double ? Kernel::grid_bernoulli_64 : Kernel::grid_bernoulli_32;
    case Distribution::kRandom:
      return Kernel::grid_random;
    default:
      return piece.is_double ? Kernel::grid_trunc_normal_series_64 : Kernel::grid_trunc_normal_series_32;
  }
}

Kernel run_kernel_of(const Piece& piece) {
  switch (distribution_of(piece)) {
    case Distribution::kConstant:
      return Kernel::run_constant;
    case Distribution::kBits:
      return piece.dtype == Dtype::kBits64 ? Kernel::run_bits64 : Kernel::run_bits32;
    case Distribution::kUniform:
      return piece.is_double ? Kernel::run_uniform_f64 : run_kernel<UniformScaled32>(piece.dtype);
    case Distribution::kNormal:
      return piece.is_double ? Kernel::run_normal_f64 : run_kernel<Normal32>(piece.dtype);
    case Distribution::kTruncNormal:
      if (piece.is_double) return Kernel::run_trunc_normal_f64;
      return is_central(piece.draw32.trunc_normal) ? run_kernel<TruncNormalCentral32>(piece.dtype)
                                                   : run_kernel<TruncNormal32>(piece.dtype);
    case Distribution::kTruncNormalNarrow:
      return piece.is_double ? Kernel::run_trunc_normal_series_f64 : run_kernel<TruncNormalNarrow32>(piece.dtype);
    default:
      return grid_kernel_of(piece);
  }
}

Kernel kernel_of(const Piece& piece) {
  const Axis& inner = piece.grid.axis[0];
  if (piece.grid.num_axes > 1 || (inner.size > 1 && (inner.stride != 1 || inner.step != 1))) {
    return grid_kernel_of(piece);
  }
  if (distribution_of(piece) == Distribution::kConstant) return Kernel::run_constant;
  if (piece.num_unary) return grid_kernel_of(piece);
  if (distribution_of(piece) == Distribution::kUniform &&
      (piece.is_double ? piece.draw64.uniform.scaled == 0 : piece.draw32.uniform.scaled == 0)) {
    return grid_kernel_of(piece);
  }
  return run_kernel_of(piece);
}

// ---- batches ------------------------------------------------------------------------------------

using Emit = std::function<void(const Launch&)>;

// The pieces of one kernel that still go into its next launch.
template <class Batch>
struct Open {
  Kernel kernel;
  uint64_t per_block;  // of the header's total, in a thread block
  const Emit& emit;
  Batch batch{};
  uint64_t num_elements = 0;

  // Where the next piece goes, whose stream has this key.
  typename Batch::Piece& next(const PhiloxKey& key) {
    if (batch.header.num_pieces == Batch::kMaxPieces ||
        (batch.header.num_pieces && memcmp(&batch.header.key, &key, sizeof(key)) != 0)) {
      flush();
    }
    batch.header.key = key;
    return batch.pieces[batch.header.num_pieces++];
  }

  void flush() {
    if (!batch.header.num_pieces) return;
    constexpr uint64_t kMaxGrid = 0x7fffffff;  // beyond it thread blocks take several turns
    const uint64_t grid = std::min(kMaxGrid, (batch.header.total + per_block - 1) / per_block);
    emit({kernel, static_cast<uint32_t>(grid), &batch, sizeof(batch), batch.header.num_pieces, num_elements});
    const uint32_t passes = batch.header.passes;
    batch = Batch{};
    batch.header.passes = passes;
    num_elements = 0;
  }
};

// How many elements a block of a run has: a constant's is 16 bytes.
template <class Fn>
uint64_t lanes_of(Dtype dtype) {
  return std::is_same_v<Fn, ConstantFn> ? 16 / size_of(dtype) : 4;
}

// The runs of the pieces that this kernel does, cut where the high word of the block number changes.
template <class Fn>
void plan_runs(Kernel kernel, const Piece* pieces, size_t num_pieces, const Kernel* kernels, uint32_t num_processors,
               const Emit& emit) {
  constexpr bool kConstant = std::is_same_v<Fn, ConstantFn>;
  uint64_t num_blocks = 0;
  for (size_t k = 0; k < num_pieces; ++k) {
    if (kernels[k] == kernel)
      num_blocks += static_cast<uint64_t>(pieces[k].grid.numel()) / lanes_of<Fn>(pieces[k].dtype);
  }
  const uint64_t passes = num_blocks / kPassBlocks / (uint64_t{kWarpsPerProcessor} * num_processors);
  Open<RunBatch<Fn>> open{kernel, kThreads / kWarpThreads, emit};
  open.batch.header.passes = static_cast<uint32_t>(std::clamp<uint64_t>(passes, 1, kMaxPasses));
  const uint64_t span = uint64_t{open.batch.header.passes} * kPassBlocks;

  for (size_t k = 0; k < num_pieces; ++k) {
    if (kernels[k] != kernel) continue;
    const Piece& piece = pieces[k];
    const Stream& stream = stream_of(piece);
    const uint64_t lanes = lanes_of<Fn>(piece.dtype);
    const uint64_t size = size_of(piece.dtype);
    auto address = reinterpret_cast<uint64_t>(piece.data);
    // A constant's blocks are those of memory, and its number of a block counts from wherever.
    uint64_t first = kConstant ? address % 16 / size : piece.grid.first;
    for (auto left = static_cast<uint64_t>(piece.grid.numel()); left;) {
      const uint64_t block = first / lanes;
      const uint64_t until = (block / kBlocksPerHighWord + 1) * kBlocksPerHighWord * lanes;
      const uint64_t count = std::min(left, until - first);
      RunPiece<Fn>& run = open.next(stream.key);
      run.begin = static_cast<uint32_t>(first % lanes);
      run.end = run.begin + count;
      run.origin = address - run.begin * size;
      run.vector = run.origin % std::min<uint64_t>(16, lanes * size) == 0;
      run.low = static_cast<uint32_t>(block);
      run.dtype = piece.dtype;
      run.params = params_of(piece, static_cast<Fn*>(nullptr));
      if constexpr (!kConstant) {
        for (int k = 0; k < kPlanes<Fn>; ++k) {
          run.hoisted[k] = hoist(stream, Fn::kPlane + static_cast<uint64_t>(k), block);
        }
      }
      run.first_span = static_cast<uint32_t>(open.batch.header.total);
      open.batch.header.total += ((run.end + lanes - 1) / lanes + span - 1) / span;
      open.num_elements += count;
      address += count * size;
      first += count;
      left -= count;
    }
  }
  open.flush();
}

// The axes of a piece with one of unit step at the end, along which rows run; the others by falling stride, so that
// neighbouring rows are near in memory.
int axes_with_rows(const Grid& grid, Axis* axes) {
  int num_axes = grid.num_axes;
  std::copy(grid.axis, grid.axis + num_axes, axes);
  const auto is_run = [](const Axis& axis) { return axis.step == 1; };
  Axis* const run = std::find_if(axes, axes + num_axes, is_run);
  if (run == axes + num_axes) {
    axes[num_axes++] = {1, 1, 1};  // each element is a row
  } else {
    std::rotate(run, run + 1, axes + num_axes);
  }
  std::stable_sort(axes, axes + num_axes - 1, [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
  return num_axes;
}

uint64_t blocks_per_row(const Axis* axes, int num_axes, uint64_t first) {
  const auto length = static_cast<uint64_t>(axes[num_axes - 1].size);
  const bool same_lane = std::all_of(axes, axes + num_axes - 1, [](const Axis& axis) { return axis.step % 4 == 0; });
  return same_lane ? (first % 4 + length + 3) / 4 : (length + 2) / 4 + 1;
}

template <class Fn>
void plan_grids(Kernel kernel, const Piece* pieces, size_t num_pieces, const Kernel* kernels, const Emit& emit) {
  Open<GridBatch<Fn>> open{kernel, kThreads, emit};
  uint32_t used_axes = 0;
  uint32_t used_steps = 0;
  for (size_t k = 0; k < num_pieces; ++k) {
    if (kernels[k] != kernel) continue;
    const Piece& piece = pieces[k];
    const Stream& stream = stream_of(piece);
    Axis axes[GridBatch<Fn>::kMaxAxes];
    const auto num_axes = static_cast<uint32_t>(axes_with_rows(piece.grid, axes));
    const auto num_steps = std::is_same_v<Fn, ConstantFn> ? 0 : static_cast<uint32_t>(piece.num_unary);
    if (used_axes + num_axes > GridBatch<Fn>::kMaxAxes || used_steps + num_steps > kMaxUnary) open.flush();
    GridPiece<Fn>& grid = open.next(stream.key);
    if (open.batch.header.num_pieces == 1) used_axes = used_steps = 0;
    grid.data = reinterpret_cast<uint64_t>(piece.data);
    grid.first = piece.grid.first;
    grid.first_unit = open.batch.header.total;
    grid.blocks_per_row = blocks_per_row(axes, static_cast<int>(num_axes), grid.first);
    grid.num_rows = static_cast<uint64_t>(piece.grid.numel() / axes[num_axes - 1].size);
    grid.id_low = stream.id_low;
    grid.id_high = stream.id_high;
    grid.dtype = piece.dtype;
    grid.first_axis = used_axes;
    grid.num_axes = num_axes;
    grid.first_step = used_steps;
    grid.num_steps = num_steps;
    grid.params = params_of(piece, static_cast<Fn*>(nullptr));
    std::copy(axes, axes + num_axes, open.batch.axes + used_axes);
    for (uint32_t step = 0; step < num_steps; ++step) {
      open.batch.steps[used_steps + step] = {piece.unary[step].op,
                                             static_cast<typename Step<Fn>::Operand>(piece.unary[step].operand)};
    }
    used_axes += num_axes;
    used_steps += num_steps;
    open.batch.header.total += grid.num_rows * grid.blocks_per_row;
    open.num_elements += static_cast<uint64_t>(piece.grid.numel());
  }
  open.flush();
}

}  // namespace

const char* name_of(Kernel kernel) {
  switch (kernel) {
#define SHARDINIT_X(name, ...) \
  case Kernel::run_##name:     \
    return "shardinit_run_" #name;
    SHARDINIT_RUN_KERNELS(SHARDINIT_X)
#undef SHARDINIT_X
#define SHARDINIT_X(name, ...) \
  case Kernel::grid_##name:    \
    return "shardinit_grid_" #name;
    SHARDINIT_GRID_KERNELS(SHARDINIT_X)
#undef SHARDINIT_X
    default:
      return "";
  }
}

void plan_launches(const Piece* pieces, size_t num_pieces, uint32_t num_processors, const Emit& emit) {
  std::vector<Kernel> kernels(num_pieces);
  std::bitset<kNumKernels> used;
  for (size_t k = 0; k < num_pieces; ++k) {
    kernels[k] = kernel_of(pieces[k]);
    used.set(static_cast<size_t>(kernels[k]));
  }
#define SHARDINIT_X(name, Fn, Out)                                                               \
  if (used.test(static_cast<size_t>(Kernel::run_##name))) {                                      \
    plan_runs<Fn>(Kernel::run_##name, pieces, num_pieces, kernels.data(), num_processors, emit); \
  }
  SHARDINIT_RUN_KERNELS(SHARDINIT_X)
#undef SHARDINIT_X
#define SHARDINIT_X(name, Fn)                                                      \
  if (used.test(static_cast<size_t>(Kernel::grid_##name))) {                       \
    plan_grids<Fn>(Kernel::grid_##name, pieces, num_pieces, kernels.data(), emit); \
  }
  SHARDINIT_GRID_KERNELS(SHARDINIT_X)
#undef SHARDINIT_X
}

}  // namespace shardinit
