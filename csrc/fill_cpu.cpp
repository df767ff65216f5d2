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
  if (stride == 1) {
    memcpy(to, from, n * sizeof(T));
  } else {
    for (size_t i = 0; i < n; ++i) to[static_cast<int64_t>(i) * stride] = from[i];
  }
}

// A run of n elements with consecutive global indices, `stride` elements apart in memory.
void fill_run(const Kernels& kernels, const Piece& piece, uint64_t first, size_t n, char* to, int64_t stride) {
  alignas(64) char buffer[kChunk * 8];
  alignas(64) char narrowed[kChunk * 2];
  auto* as_float = reinterpret_cast<float*>(buffer);
  auto* as_double = reinterpret_cast<double*>(buffer);
  const int64_t step = stride * static_cast<int64_t>(size_of(piece.dtype));
  while (n) {
    size_t count = std::min(n, kChunk);
    switch (piece.dtype) {
      case Dtype::kBits32: {
        auto* out = stride == 1 ? reinterpret_cast<uint32_t*>(to) : reinterpret_cast<uint32_t*>(buffer);
        kernels.bits32(piece.draw32.stream, first, count, out);
        if (stride != 1) scatter(out, count, reinterpret_cast<uint32_t*>(to), stride);
        break;
      }
      case Dtype::kBits64: {
        auto* out = stride == 1 ? reinterpret_cast<uint64_t*>(to) : reinterpret_cast<uint64_t*>(buffer);
        kernels.bits64(piece.draw32.stream, first, count, out);
        if (stride != 1) scatter(out, count, reinterpret_cast<uint64_t*>(to), stride);
        break;
      }
      case Dtype::kFloat64: {
        auto* out = stride == 1 ? reinterpret_cast<double*>(to) : as_double;
        kernels.draw64(piece.draw64, first, count, out);
        kernels.unary64(piece.unary, piece.num_unary, out, count);
        if (stride != 1) scatter(out, count, reinterpret_cast<double*>(to), stride);
        break;
      }
      case Dtype::kFloat32: {
        auto* out = stride == 1 ? reinterpret_cast<float*>(to) : as_float;
        kernels.draw32(piece.draw32, first, count, out);
        kernels.unary32(piece.unary, piece.num_unary, out, count);
        if (stride != 1) scatter(out, count, reinterpret_cast<float*>(to), stride);
        break;
      }
      default: {
        kernels.draw32(piece.draw32, first, count, as_float);
        kernels.unary32(piece.unary, piece.num_unary, as_float, count);
        kernels.narrow(piece.dtype, as_float, count, stride == 1 ? static_cast<void*>(to) : narrowed);
        if (stride == 1) break;
        if (size_of(piece.dtype) == 2) {
          scatter(reinterpret_cast<uint16_t*>(narrowed), count, reinterpret_cast<uint16_t*>(to), stride);
        } else {
          scatter(reinterpret_cast<uint8_t*>(narrowed), count, reinterpret_cast<uint8_t*>(to), stride);
        }
      }
    }
    first += count;
    n -= count;
    to += step * static_cast<int64_t>(count);
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
