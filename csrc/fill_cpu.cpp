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

// At most kChunk elements with consecutive global indices, side by side at `out`.
void fill_chunk(const Kernels& kernels, const Piece& piece, uint64_t first, size_t n, void* out) {
  alignas(64) uint64_t wide[kChunk];
  alignas(64) float real[kChunk];
  const Dtype dtype = piece.dtype;
  const Distribution distribution = piece.is_double ? piece.draw64.distribution : piece.draw32.distribution;
  if (distribution == Distribution::kBits) {
    if (dtype == Dtype::kBits32) return kernels.bits32(piece.draw32.stream, first, n, static_cast<uint32_t*>(out));
    return kernels.bits64(piece.draw32.stream, first, n, static_cast<uint64_t*>(out));
  }
  const bool is_random = distribution == Distribution::kRandom;
  if (piece.is_double) {
    auto* const values = static_cast<double*>(out);
    if (is_random) {
      kernels.integers(piece.draw64.stream, piece.draw64.random, first, n, wide);
      kernels.to_reals64(wide, n, values);
    } else {
      kernels.draw64(piece.draw64, first, n, values);
    }
    return kernels.unary64(piece.unary, piece.num_unary, values, n);
  }
  float* const values = dtype == Dtype::kFloat32 ? static_cast<float*>(out) : real;
  if (is_random) {
    kernels.integers(piece.draw32.stream, piece.draw32.random, first, n, wide);
    if (is_integer(dtype)) return kernels.truncate(dtype, wide, n, out);
    kernels.to_reals32(wide, n, values);
  } else {
    kernels.draw32(piece.draw32, first, n, values);
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
    fill_chunk(kernels, piece, first, count, stride == 1 ? static_cast<void*>(to) : buffer);
    if (stride != 1) scatter_bytes(size, buffer, count, to, stride);
    first += count;
    n -= count;
    to += stride * static_cast<int64_t>(size) * static_cast<int64_t>(count);
  }
}

// Elements [begin, end) of a collapsed piece, counted row by row.
void fill_part(const Kernels& kernels, const Piece& piece, int64_t begin, int64_t end) {
  const Grid& grid = piece.grid;
  const int num_outer = grid.num_axes - 1;
  const Axis& inner = grid.axis[num_outer];
  const auto bytes = static_cast<int64_t>(size_of(piece.dtype));
  auto* data = static_cast<char*>(piece.data);
  while (begin < end) {
    const Row row = row_of(grid.axis, num_outer, grid.first, static_cast<uint64_t>(begin / inner.size));
    const int64_t from = begin % inner.size;
    const int64_t count = std::min(inner.size - from, end - begin);
    char* to = data + (row.memory + from * inner.stride) * bytes;
    const uint64_t first = row.first + static_cast<uint64_t>(from) * static_cast<uint64_t>(inner.step);
    if (inner.step == 1) {
      fill_run(kernels, piece, first, static_cast<size_t>(count), to, inner.stride);
    } else {
      for (int64_t i = 0; i < count; ++i) {
        fill_run(kernels, piece, first + static_cast<uint64_t>(i) * static_cast<uint64_t>(inner.step), 1,
                 to + i * inner.stride * bytes, 1);
      }
    }
    begin += count;
  }
}

}  // namespace

void fill_cpu(const Piece* pieces, size_t num_pieces, int num_threads) {
  const Kernels& kernels = active_kernels();
  for_each_span(pieces, num_pieces, num_threads, kChunk, [&](size_t piece, int64_t begin, int64_t end) {
    const DefaultFpEnvironment environment;
    fill_part(kernels, pieces[piece], begin, end);
  });
}

}  // namespace shardinit
