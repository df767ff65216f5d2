// The CPU backend: cuts pieces into rows and chunks, shares them out to threads, and runs the kernels of the best
// instruction set.
#include <algorithm>

#include "dispatch.h"
#include "fill.h"
#include "fp_environment.h"
#include "kernels.h"
#include "parallel.h"

namespace shardinit {
namespace {

constexpr size_t kChunk = 2304;  // elements that pass through the cache at a time: whole batches of any set

template <class T>
void scatter(const T* from, size_t n, T* to, int64_t stride) {
  for (size_t i = 0; i < n; ++i) to[static_cast<int64_t>(i) * stride] = from[i];
}

// Elements `stride` apart in memory, from a chunk side by side.
void scatter_bytes(size_t size, const void* from, size_t n, void* to, int64_t stride) {
  switch (size) {
    case 1:
      return scatter(static_cast<const uint8_t*>(from), n, static_cast<uint8_t*>(to), stride);
    case 2:
      return scatter(static_cast<const uint16_t*>(from), n, static_cast<uint16_t*>(to), stride);
    case 4:
      return scatter(static_cast<const uint32_t*>(from), n, static_cast<uint32_t*>(to), stride);
    default:
      return scatter(static_cast<const uint64_t*>(from), n, static_cast<uint64_t*>(to), stride);
  }
}

// At most kChunk elements, side by side at `out`.
void fill_chunk(const Kernels& kernels, const Piece& piece, Elements which, size_t n, void* out) {
  alignas(64) uint64_t wide[kChunk];
  alignas(64) float real[kChunk];
  const Dtype dtype = piece.dtype;
  const Distribution distribution = piece.is_double ? piece.draw64.distribution : piece.draw32.distribution;
  if (distribution == Distribution::kBits) {
    if (dtype == Dtype::kBits32) return kernels.bits32(piece.draw32.stream, which, n, static_cast<uint32_t*>(out));
    return kernels.bits64(piece.draw32.stream, which, n, static_cast<uint64_t*>(out));
  }
  const bool is_random = distribution == Distribution::kRandom;
  if (piece.is_double) {
    auto* const values = static_cast<double*>(out);
    if (is_random) {
      kernels.integers(piece.draw64.stream, piece.draw64.random, which, n, wide);
      kernels.to_reals64(wide, n, values);
    } else {
      kernels.draw64(piece.draw64, which, n, values);
    }
    return kernels.unary64(piece.unary, piece.num_unary, values, n);
  }
  float* const values = dtype == Dtype::kFloat32 ? static_cast<float*>(out) : real;
  if (is_random) {
    kernels.integers(piece.draw32.stream, piece.draw32.random, which, n, wide);
    if (is_integer(dtype)) return kernels.truncate(dtype, wide, n, out);
    kernels.to_reals32(wide, n, values);
  } else {
    kernels.draw32(piece.draw32, which, n, values);
    if (is_integer(dtype)) return kernels.truncate_small(dtype, values, n, out);
  }
  kernels.unary32(piece.unary, piece.num_unary, values, n);
  if (dtype != Dtype::kFloat32) kernels.narrow(dtype, values, n, out);
}

// A run of n elements with consecutive global indices, `stride` elements apart in memory.
void fill_run(const Kernels& kernels, const Piece& piece, uint64_t first, size_t n, char* to, int64_t stride) {
  alignas(64) char buffer[kChunk * 8];
  const size_t size = size_of(piece.dtype);
  while (n) {
    const size_t count = std::min(n, kChunk);
    fill_chunk(kernels, piece, {first}, count, stride == 1 ? static_cast<void*>(to) : buffer);
    if (stride != 1) scatter_bytes(size, buffer, count, to, stride);
    first += count;
    n -= count;
    to += stride * static_cast<int64_t>(size) * static_cast<int64_t>(count);
  }
}

// Collects the blocks of many short runs, so that they share vectors.
class Gather {
 public:
  Gather(const Kernels& kernels, const Piece& piece, int64_t stride)
      : kernels_(kernels), piece_(piece), size_(size_of(piece.dtype)), stride_(stride) {}

  // A run of n elements from global index `first`, `stride` apart from `to` on.
  void add(uint64_t first, uint64_t n, char* to) {
    while (n) {
      const uint64_t block = first / 4;
      const uint64_t high = block / kBlocksPerHighWord;
      if (num_runs_ == kMaxBlocks || (num_blocks_ && high != first_ / 4 / kBlocksPerHighWord)) flush();
      // A block may come again, when runs end and begin inside it.
      const bool again = num_blocks_ && lows_[num_blocks_ - 1] == static_cast<uint32_t>(block);
      if (num_blocks_ == kMaxBlocks && !again) flush();
      const size_t slot = again ? num_blocks_ - 1 : num_blocks_;
      const uint64_t last = std::min(block + (kMaxBlocks - slot), (high + 1) * kBlocksPerHighWord);
      const uint64_t count = std::min(n, 4 * last - first);
      first_ = first;
      runs_[num_runs_++] = {static_cast<uint32_t>(4 * slot + first % 4), static_cast<uint32_t>(count), to};
      const auto end = static_cast<size_t>((first + count + 3) / 4 - block);
      for (size_t k = 0; k < end; ++k) lows_[slot + k] = static_cast<uint32_t>(block + k);
      num_blocks_ = slot + end;
      first += count;
      n -= count;
      to += static_cast<int64_t>(count) * stride_ * static_cast<int64_t>(size_);
    }
  }

  void flush() {
    alignas(64) char values[kChunk * 8];
    if (num_blocks_) fill_chunk(kernels_, piece_, {first_, lows_}, 4 * num_blocks_, values);
    for (size_t k = 0; k < num_runs_; ++k) {
      const char* from = values + runs_[k].from * size_;
      if (stride_ == 1) {
        memcpy(runs_[k].to, from, runs_[k].count * size_);
      } else {
        scatter_bytes(size_, from, runs_[k].count, runs_[k].to, stride_);
      }
    }
    num_blocks_ = num_runs_ = 0;
  }

 private:
  static constexpr size_t kMaxBlocks = kChunk / 4;
  struct Run {
    uint32_t from;  // in elements of the collected blocks
    uint32_t count;
    char* to;
  };
  const Kernels& kernels_;
  const Piece& piece_;
  const size_t size_;
  const int64_t stride_;
  uint64_t first_ = 0;
  size_t num_blocks_ = 0;
  size_t num_runs_ = 0;
  uint32_t lows_[kMaxBlocks];
  Run runs_[kMaxBlocks];
};

// ---- rows of a grid: one pass over its last axis each -------------------------------------------

// Steps from row to row.
class Rows {
 public:
  Rows(const Grid& grid, int64_t row) : grid_(grid), num_outer_(grid.num_axes - 1) {
    at_ = row_of(grid.axis, num_outer_, grid.first, static_cast<uint64_t>(row));
    for (int d = num_outer_ - 1; d >= 0; --d) {
      k_[d] = row % grid.axis[d].size;
      row /= grid.axis[d].size;
    }
  }
  const Row& at() const { return at_; }
  void next() {
    for (int d = num_outer_ - 1; d >= 0; --d) {
      const Axis& axis = grid_.axis[d];
      at_.memory += axis.stride;
      at_.first += static_cast<uint64_t>(axis.step);
      if (++k_[d] < axis.size) return;
      at_.memory -= axis.size * axis.stride;
      at_.first -= static_cast<uint64_t>(axis.size) * static_cast<uint64_t>(axis.step);
      k_[d] = 0;
    }
  }

 private:
  const Grid& grid_;
  const int num_outer_;
  Row at_;
  int64_t k_[kMaxDims];
};

// Elements [begin, end) of a piece whose rows are short, or have no consecutive indices.
void fill_short_rows(const Kernels& kernels, const Piece& piece, int64_t begin, int64_t end) {
  const Axis& inner = piece.grid.axis[piece.grid.num_axes - 1];
  const auto bytes = static_cast<int64_t>(size_of(piece.dtype));
  auto* data = static_cast<char*>(piece.data);
  Gather gather(kernels, piece, inner.stride);
  Rows rows(piece.grid, begin / inner.size);
  for (int64_t from = begin % inner.size; begin < end; from = 0, rows.next()) {
    const int64_t count = std::min(inner.size - from, end - begin);
    char* to = data + (rows.at().memory + from * inner.stride) * bytes;
    uint64_t first = rows.at().first + static_cast<uint64_t>(from) * static_cast<uint64_t>(inner.step);
    if (inner.step == 1) {
      gather.add(first, static_cast<uint64_t>(count), to);
    } else {
      for (int64_t i = 0; i < count; ++i, to += inner.stride * bytes, first += static_cast<uint64_t>(inner.step)) {
        gather.add(first, 1, to);
      }
    }
    begin += count;
  }
  gather.flush();
}

template <class T>
void __attribute__((always_inline)) inline transpose(const T* from, int64_t num_rows, int64_t row_length, int64_t n,
                                                     T* to, int64_t stride) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t row = 0; row < num_rows; ++row) to[i * stride + row] = from[row * row_length + i];
  }
}

constexpr int64_t kTileLength = 128;  // elements of each row, at most: a batch of the widest vectors

// Rows that lie side by side in memory, the elements of each apart: in tiles, so that whole cache lines are written.
template <class T>
void fill_tiles(const Kernels& kernels, const Piece& piece, Row row, int64_t num_rows, uint64_t step_of_row) {
  constexpr int64_t kLine = 64 / sizeof(T);  // elements of a cache line
  constexpr int64_t kElements = kLine * kTileLength;
  alignas(64) T tile[kElements];
  const Axis& inner = piece.grid.axis[piece.grid.num_axes - 1];
  T* const data = static_cast<T*>(piece.data) + row.memory;
  const int64_t width = std::min(inner.size, kTileLength);
  for (int64_t top = 0; top < num_rows; top += kElements / width) {
    const int64_t height = std::min(kElements / width, num_rows - top);
    for (int64_t left = 0; left < inner.size; left += width) {
      const int64_t length = std::min(width, inner.size - left);
      Gather gather(kernels, piece, 1);
      for (int64_t k = 0; k < height; ++k) {
        const uint64_t first = row.first + static_cast<uint64_t>(top + k) * step_of_row + static_cast<uint64_t>(left);
        T* const to = tile + k * width;
        if (length == kTileLength) {
          fill_chunk(kernels, piece, {first}, static_cast<size_t>(length), to);
        } else {
          gather.add(first, static_cast<uint64_t>(length), reinterpret_cast<char*>(to));
        }
      }
      gather.flush();
      T* const to = data + top + left * inner.stride;
      if (width == kTileLength && height == kLine) {
        transpose(tile, kLine, kTileLength, length, to, inner.stride);  // sizes that the compiler knows
      } else {
        transpose(tile, height, width, length, to, inner.stride);
      }
    }
  }
}

void fill_tiles_of(const Kernels& kernels, const Piece& piece, Row row, int64_t num_rows, uint64_t step_of_row) {
  switch (size_of(piece.dtype)) {
    case 1:
      return fill_tiles<uint8_t>(kernels, piece, row, num_rows, step_of_row);
    case 2:
      return fill_tiles<uint16_t>(kernels, piece, row, num_rows, step_of_row);
    case 4:
      return fill_tiles<uint32_t>(kernels, piece, row, num_rows, step_of_row);
    default:
      return fill_tiles<uint64_t>(kernels, piece, row, num_rows, step_of_row);
  }
}

constexpr int64_t kShortRow = 512;  // from here on what a row wastes of its last vectors is less than collecting costs

// Elements [begin, end) of a piece, counted row by row.
void fill_part(const Kernels& kernels, const Piece& piece, int64_t begin, int64_t end) {
  const Grid& grid = piece.grid;
  const int num_outer = grid.num_axes - 1;
  const Axis& inner = grid.axis[num_outer];
  const bool is_run = inner.step == 1;
  const bool is_transposed = is_run && num_outer && inner.stride != 1 && grid.axis[num_outer - 1].stride == 1;
  if (num_outer && (!is_run || (inner.size < kShortRow && !is_transposed))) {
    return fill_short_rows(kernels, piece, begin, end);
  }
  if (!is_run && inner.size > 1) return fill_short_rows(kernels, piece, begin, end);
  const auto bytes = static_cast<int64_t>(size_of(piece.dtype));
  while (begin < end) {
    const int64_t number = begin / inner.size;
    const Row row = row_of(grid.axis, num_outer, grid.first, static_cast<uint64_t>(number));
    const int64_t from = begin % inner.size;
    if (is_transposed && from == 0 && end - begin >= inner.size) {
      const Axis& across = grid.axis[num_outer - 1];
      const int64_t num_rows = std::min(across.size - number % across.size, (end - begin) / inner.size);
      fill_tiles_of(kernels, piece, row, num_rows, static_cast<uint64_t>(across.step));
      begin += num_rows * inner.size;
      continue;
    }
    const int64_t count = std::min(inner.size - from, end - begin);
    char* to = static_cast<char*>(piece.data) + (row.memory + from * inner.stride) * bytes;
    fill_run(kernels, piece, row.first + static_cast<uint64_t>(from), static_cast<size_t>(count), to, inner.stride);
    begin += count;
  }
}

}  // namespace

bool fill_cpu(Piece* pieces, size_t num_pieces, int num_threads, const KeepGoing& keep_going) {
  const Kernels& kernels = active_kernels();
  for (size_t k = 0; k < num_pieces; ++k) pieces[k].grid.put_run_last();
  return for_each_span(pieces, num_pieces, num_threads, kChunk, keep_going,
                       [&](size_t piece, int64_t begin, int64_t end) {
                         const DefaultFpEnvironment environment;
                         fill_part(kernels, pieces[piece], begin, end);
                       });
}

}  // namespace shardinit
