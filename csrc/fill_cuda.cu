// The CUDA kernels and their launches. What a value is stands in the headers that the CPU shares; what goes to a
// kernel, in launch.h.
#include <atomic>
#include <stdexcept>
#include <string>

#include "fill_cuda.h"
#include "launch.h"
#include "store.cuh"

namespace shardinit {
namespace {

// ---- a block's values ---------------------------------------------------------------------------

// The last piece that begins at or before `at`.
template <class Begin>
__device__ __forceinline__ uint32_t find_piece(uint32_t num_pieces, uint64_t at, const Begin& begin) {
  uint32_t low = 0;
  for (uint32_t high = num_pieces; high - low > 1;) {
    const uint32_t middle = (low + high) / 2;
    (begin(middle) <= at ? low : high) = middle;
  }
  return low;
}

template <class Fn, class T>
__device__ __forceinline__ void values_of(const Fn& fn, const Words4<uint32_t>& high, const Words4<uint32_t>& low,
                                          T x[4]) {
  using Word = typename Fn::Word;
  Word w[4];
  for (int k = 0; k < 4; ++k) {
    w[k] = sizeof(Word) == 8 ? static_cast<Word>((static_cast<uint64_t>(high.w[k]) << 32) | low.w[k])
                             : static_cast<Word>(high.w[k]);
  }
  for (int k = 0; k < 4; k += 2) {
    const auto pair = fn(w[k], w[k + 1]);
    x[k] = pair.even;
    x[k + 1] = pair.odd;
  }
}

template <class Fn>
using ValueOf = std::decay_t<decltype(std::declval<Fn>()(typename Fn::Word{}, typename Fn::Word{}).even)>;

// ---- how a kernel of runs is compiled: chosen by what SASS results (bench/count_sass.py) --------

template <class Fn, class... Others>
inline constexpr bool kOneOf = (std::is_same_v<Fn, Others> || ...);

// Blocks that a thread does in a turn of its loop: more share out the loop's own cost, but need more registers.
template <class Fn, class Out>
__host__ __device__ constexpr uint32_t in_flight() {
  if (sizeof(typename Fn::Word) == 8 || std::is_same_v<Out, Narrow>) return 1;
  return kOneOf<Fn, UniformScaled32, TruncNormalCentral32, Bits32, ConstantFn> ? kMostInFlight : 2;
}

// Thread blocks to keep on a multiprocessor at a time: 6 leave 40 registers to a thread, 4 leave 64, 2 leave 128.
template <class Fn, class Out>
__host__ __device__ constexpr uint32_t resident() {
  if (sizeof(typename Fn::Word) == 8) return 2;
#if __CUDA_ARCH__ >= 800
  if (!std::is_same_v<Out, Narrow> && kOneOf<Fn, UniformScaled32, Normal32, TruncNormalCentral32>) return 6;
#endif
  return 4;
}

// ---- runs ---------------------------------------------------------------------------------------

// Writes blocks of a piece of a run. Copies what every block needs, so that it stays in registers.
template <class Fn, class Out>
struct RunWriter {
  using T = ValueOf<Fn>;
  const PhiloxKey& key;
  PhiloxHoisted hoisted[kPlanes<Fn>];
  typename Fn::Params params;
  Dtype dtype;

  __device__ __forceinline__ RunWriter(const RunBatch<Fn>& batch, const RunPiece<Fn>& piece)
      : key(batch.header.key), params(piece.params), dtype(piece.dtype) {
    for (int plane = 0; plane < kPlanes<Fn>; ++plane) hoisted[plane] = piece.hoisted[plane];
  }
  __device__ __forceinline__ uint32_t lanes() const { return 4; }
  __device__ __forceinline__ uint32_t bytes() const { return 4 * Out::template size<T>(dtype); }
  __device__ __forceinline__ void values(uint32_t low, T x[4]) const {
    const auto words = philox4x32(low, hoisted[0], key);
    const auto more = kPlanes<Fn> == 2 ? philox4x32(low, hoisted[kPlanes<Fn> - 1], key) : words;
    values_of(Fn{params}, words, more, x);
  }
  __device__ __forceinline__ void block(uint32_t low, uint64_t address) const {
    T x[4];
    values(low, x);
    Out::block(dtype, address, x);
  }
  // Lanes [from, to).
  __device__ __forceinline__ void part(uint32_t low, uint64_t address, uint32_t from, uint32_t to) const {
    T x[4];
    values(low, x);
    for (uint32_t k = 0; k < 4; ++k) {
      if (from <= k && k < to) Out::element(dtype, address + k * Out::template size<T>(dtype), x[k]);
    }
  }
};

template <>
struct RunWriter<ConstantFn, Whole> {
  uint64_t pattern;
  uint32_t size;

  __device__ __forceinline__ RunWriter(const RunBatch<ConstantFn>&, const RunPiece<ConstantFn>& piece)
      : pattern(piece.params.pattern), size(static_cast<uint32_t>(size_of(piece.dtype))) {}
  __device__ __forceinline__ uint32_t lanes() const { return 16 / size; }
  __device__ __forceinline__ uint32_t bytes() const { return 16; }
  __device__ __forceinline__ void block(uint32_t, uint64_t address) const { store(address, pattern, pattern); }
  __device__ __forceinline__ void part(uint32_t, uint64_t address, uint32_t from, uint32_t to) const {
    for (uint32_t byte = from * size; byte < to * size; ++byte) {
      store8(address + byte, static_cast<uint32_t>(pattern >> (8 * (byte % 8))));
    }
  }
};

template <class Fn, class Out>
__device__ __forceinline__ void fill_runs(const RunBatch<Fn>& batch) {
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const uint64_t num_warps = uint64_t{gridDim.x} * (blockDim.x / kWarpThreads);
  const uint64_t span_blocks = uint64_t{batch.header.passes} * kPassBlocks;
  for (uint64_t span = uint64_t{blockIdx.x} * (blockDim.x / kWarpThreads) + threadIdx.x / kWarpThreads;
       span < batch.header.total; span += num_warps) {
    const auto& piece =
        batch.pieces[find_piece(batch.header.num_pieces, span, [&](uint32_t k) { return batch.pieces[k].first_span; })];
    const RunWriter<Fn, Out> writer(batch, piece);
    const uint32_t lanes = writer.lanes();
    const uint32_t bytes = writer.bytes();
    const uint64_t first = (span - piece.first_span) * span_blocks;
    const uint64_t whole_stop = min(piece.end / lanes, first + span_blocks);
    const uint64_t stop = min((piece.end + lanes - 1) / lanes, first + span_blocks);
    constexpr uint32_t kTurn = kWarpThreads * in_flight<Fn, Out>();
    uint32_t turns = 0;
    if (piece.vector && whole_stop > first && !(first == 0 && piece.begin)) {
      turns = static_cast<uint32_t>(whole_stop - first) / kTurn;
    }
    uint32_t low = piece.low + static_cast<uint32_t>(first) + lane;
    uint64_t address = piece.origin + (first + lane) * bytes;
    const uint64_t rest = first + uint64_t{turns} * kTurn;
#pragma unroll 1
    for (; turns; --turns) {
#pragma unroll
      for (uint32_t k = 0; k < kTurn; k += kWarpThreads) writer.block(low + k, address + k * bytes);
      low += kTurn;
      address += kTurn * bytes;
    }
    // Blocks at the edges of the piece, and all of one whose memory is not aligned to its blocks.
#pragma unroll 1
    for (uint64_t block = rest + lane; block < stop; block += kWarpThreads) {
      const uint32_t from = block == 0 ? piece.begin : 0;
      const uint32_t to = static_cast<uint32_t>(min(uint64_t{lanes}, piece.end - block * lanes));
      if (piece.vector && to - from == lanes) {
        writer.block(low, address);
      } else {
        writer.part(low, address, from, to);
      }
      low += kWarpThreads;
      address += kWarpThreads * bytes;
    }
  }
}

// ---- grids --------------------------------------------------------------------------------------

// The piece's steps, on four values of one type.
template <class Fn, class T>
__device__ __forceinline__ void take_steps(const GridBatch<Fn>& batch, const GridPiece<Fn>& piece, T x[4]) {
  for (uint32_t k = 0; k < piece.num_steps; ++k) {
    const auto& step = batch.steps[piece.first_step + k];
    const auto operand = static_cast<T>(step.operand);
    with_unary(step.op, [&](const auto& fn) {
      for (int j = 0; j < 4; ++j) x[j] = fn(x[j], operand);
    });
  }
  if (piece.num_steps) {
    for (int j = 0; j < 4; ++j) x[j] = canonical_nan(x[j]);
  }
}

template <class Fn>
struct GridWriter {
  using T = ValueOf<Fn>;
  const GridBatch<Fn>& batch;
  const GridPiece<Fn>& piece;

  // Lanes [from, to) of a block; element k goes to address + k * stride bytes.
  __device__ __forceinline__ void operator()(uint64_t block, uint64_t address, uint64_t stride, uint32_t from,
                                             uint32_t to) const {
    const auto words_of = [&](uint64_t plane) {
      const uint64_t number = (plane << kPlaneShift) + block;
      return philox4x32(low_half(number), high_half(number), piece.id_low, piece.id_high, batch.header.key);
    };
    const auto words = words_of(Fn::kPlane);
    T x[4];
    values_of(Fn{piece.params}, words, kPlanes<Fn> == 2 ? words_of(Fn::kPlane + 1) : words, x);
    if constexpr (std::is_same_v<Fn, RandomFn>) {
      if (!is_integer(piece.dtype)) {
        if (piece.dtype == Dtype::kFloat64) {
          reals<double>(address, stride, from, to, x);
        } else {
          reals<float>(address, stride, from, to, x);
        }
        return;
      }
    }
    if constexpr (std::is_floating_point_v<T>) take_steps(batch, piece, x);
    write(address, stride, from, to, x);
  }

  // Integers as reals, and what steps make of them.
  template <class Real>
  __device__ __forceinline__ void reals(uint64_t address, uint64_t stride, uint32_t from, uint32_t to,
                                        const uint64_t integers[4]) const {
    Real x[4];
    for (int j = 0; j < 4; ++j) x[j] = static_cast<Real>(static_cast<int64_t>(integers[j]));
    take_steps(batch, piece, x);
    write(address, stride, from, to, x);
  }

  template <class Value>
  __device__ __forceinline__ void write(uint64_t address, uint64_t stride, uint32_t from, uint32_t to,
                                        const Value x[4]) const {
    const Dtype dtype = piece.dtype;
    const auto size = static_cast<uint32_t>(size_of(dtype));
    const uint64_t alignment = min(16u, 4 * size);
    if (to - from == 4 && stride == size && address % alignment == 0) {
      AnyOutput::block(dtype, address, x);
    } else {
      for (uint32_t k = 0; k < 4; ++k) {
        if (from <= k && k < to) AnyOutput::element(dtype, address + k * stride, x[k]);
      }
    }
  }
};

template <>
struct GridWriter<ConstantFn> {
  const GridBatch<ConstantFn>& batch;
  const GridPiece<ConstantFn>& piece;

  __device__ __forceinline__ void operator()(uint64_t, uint64_t address, uint64_t stride, uint32_t from,
                                             uint32_t to) const {
    const uint64_t pattern = piece.params.pattern;
    const auto size = static_cast<uint32_t>(size_of(piece.dtype));
    for (uint32_t k = from; k < to; ++k) {
      const uint64_t element = address + k * stride;
      if (size == 8) {
        store64(element, pattern);
      } else if (size == 4) {
        store32(element, static_cast<uint32_t>(pattern));
      } else if (size == 2) {
        store16(element, static_cast<uint32_t>(pattern));
      } else {
        store8(element, static_cast<uint32_t>(pattern));
      }
    }
  }
};

template <class Fn>
__device__ __forceinline__ void fill_grids(const GridBatch<Fn>& batch) {
  const uint64_t num_threads = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t unit = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; unit < batch.header.total;
       unit += num_threads) {
    const auto& piece =
        batch.pieces[find_piece(batch.header.num_pieces, unit, [&](uint32_t k) { return batch.pieces[k].first_unit; })];
    const Axis* const axes = batch.axes + piece.first_axis;
    const int num_outer = static_cast<int>(piece.num_axes) - 1;
    const Axis& run = axes[num_outer];
    // Neighbouring threads write near each other: along the row where it is contiguous, else to neighbouring rows.
    uint64_t row = 0;
    uint64_t nth = unit - piece.first_unit;
    if (piece.num_rows > 1) {
      if (run.stride == 1) {
        row = nth / piece.blocks_per_row;
        nth = nth % piece.blocks_per_row;
      } else {
        row = nth % piece.num_rows;
        nth = nth / piece.num_rows;
      }
    }
    const Row start = row_of(axes, num_outer, piece.first, row);
    const uint64_t block = start.first / 4 + nth;
    const uint64_t end = start.first + static_cast<uint64_t>(run.size);
    if (4 * block >= end) continue;
    const uint32_t from = nth == 0 ? static_cast<uint32_t>(start.first % 4) : 0;
    const auto to = static_cast<uint32_t>(min(uint64_t{4}, end - 4 * block));
    const uint64_t size = size_of(piece.dtype);
    const int64_t lane0 = start.memory + static_cast<int64_t>(4 * block - start.first) * run.stride;
    GridWriter<Fn>{batch, piece}(block, piece.data + static_cast<uint64_t>(lane0) * size,
                                 static_cast<uint64_t>(run.stride) * size, from, to);
  }
}

}  // namespace

// ---- the kernels --------------------------------------------------------------------------------

#define SHARDINIT_X(name, Fn, Out)                                            \
  extern "C" __global__ void __launch_bounds__(kThreads, resident<Fn, Out>()) \
      shardinit_run_##name(const __grid_constant__ RunBatch<Fn> batch) {      \
    fill_runs<Fn, Out>(batch);                                                \
  }
SHARDINIT_RUN_KERNELS(SHARDINIT_X)
#undef SHARDINIT_X

#define SHARDINIT_X(name, Fn)                                              \
  extern "C" __global__ void __launch_bounds__(kThreads)                   \
      shardinit_grid_##name(const __grid_constant__ GridBatch<Fn> batch) { \
    fill_grids<Fn>(batch);                                                 \
  }
SHARDINIT_GRID_KERNELS(SHARDINIT_X)
#undef SHARDINIT_X

// ---- launches -----------------------------------------------------------------------------------

namespace {

const void* function_of(Kernel kernel) {
  switch (kernel) {
#define SHARDINIT_X(name, ...) \
  case Kernel::run_##name:     \
    return reinterpret_cast<const void*>(&shardinit_run_##name);
    SHARDINIT_RUN_KERNELS(SHARDINIT_X)
#undef SHARDINIT_X
#define SHARDINIT_X(name, ...) \
  case Kernel::grid_##name:    \
    return reinterpret_cast<const void*>(&shardinit_grid_##name);
    SHARDINIT_GRID_KERNELS(SHARDINIT_X)
#undef SHARDINIT_X
    default:
      return nullptr;
  }
}

void check(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // so that it is not found again by whoever calls CUDA next
  throw std::runtime_error(what + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")");
}

std::string on_device(int device) { return " on cuda:" + std::to_string(device); }

// The calling thread's device for as long as it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    const cudaError_t status = cudaGetDevice(&before_);
    if (status == cudaErrorInsufficientDriver) {
      int driver = 0;
      int runtime = 0;
      cudaDriverGetVersion(&driver);
      cudaRuntimeGetVersion(&runtime);
      check(status, "filling" + on_device(device) + ": the driver (CUDA " + std::to_string(driver) +
                        ", 0 if there is none) must take what torch_shardinit was built with, CUDA " +
                        std::to_string(runtime) + "; update it, or build with an older nvcc");
    }
    check(status, "asking for the current device, to fill" + on_device(device));
    if (before_ != device) check(cudaSetDevice(device), "changing to cuda:" + std::to_string(device));
    changed_ = before_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// CUDA loads a kernel when it is first needed, which a stream that is being captured need not allow: so load it before,
// in the mode that does.
void load(Kernel kernel, int device) {
  constexpr int kMaxDevices = 64;
  static std::atomic<uint64_t> loaded[kMaxDevices];
  static_assert(static_cast<int>(Kernel::kCount) <= 64, "a bit for each kernel");
  const uint64_t bit = uint64_t{1} << static_cast<int>(kernel);
  if (device < kMaxDevices && loaded[device].load() & bit) return;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "loading a kernel");
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, function_of(kernel));
  cudaThreadExchangeStreamCaptureMode(&mode);
  check(status, std::string("loading ") + name_of(kernel) + on_device(device) +
                    " (build_info()['cuda'] names the architectures that were built)");
  if (device < kMaxDevices) loaded[device].fetch_or(bit);
}

}  // namespace

void fill_cuda(const Piece* pieces, size_t num_pieces, int device, void* stream) {
  const DeviceGuard guard(device);
  int num_processors = 0;
  check(cudaDeviceGetAttribute(&num_processors, cudaDevAttrMultiProcessorCount, device),
        "asking for the multiprocessors" + on_device(device));
  plan_launches(pieces, num_pieces, static_cast<uint32_t>(num_processors), [&](const Launch& launch) {
    load(launch.kernel, device);
    void* arguments[] = {const_cast<void*>(launch.parameters)};
    const cudaError_t status = cudaLaunchKernel(function_of(launch.kernel), dim3(launch.grid), dim3(kThreads),
                                                arguments, 0, static_cast<cudaStream_t>(stream));
    if (status == cudaSuccess) return;
    check(status, std::string("launching ") + name_of(launch.kernel) + on_device(device) + " for " +
                      std::to_string(launch.num_elements) + " elements in " + std::to_string(launch.num_pieces) +
                      " pieces, " + std::to_string(launch.grid) + " x " + std::to_string(kThreads) +
                      " threads (or running what was queued before)");
  });
}

}  // namespace shardinit
