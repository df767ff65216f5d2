// Digests on the CPU: cuts pieces into rows and segments, shares them out to threads.
#include <algorithm>
#include <mutex>
#include <string>

#include "digest_kernels.h"
#include "dispatch.h"
#include "parallel.h"

namespace shardinit {
namespace {

constexpr int64_t kChunk = 2048;  // elements that pass through a buffer at a time
constexpr int64_t kRow = 16;      // elements that make a row of contiguous memory worth it

DigestRun active_run() {
  const std::string isa = active_kernels().name;
#if defined(__x86_64__)
  if (isa == "avx512") return digest_run_avx512;
  if (isa == "avx2") return digest_run_avx2;
#endif
  return digest_run_baseline;
}

// Adds words to one sum, with the key of their index's high half at hand.
struct Adder {
  DigestRun run;
  uint64_t high = ~uint64_t{0};
  DigestKey key{};
  DigestSum sum{};

  // n elements of 1, 2 or 4 bytes side by side with indices first, first + step, ... , cut where the high half changes.
  void add(const char* elements, uint32_t size, int64_t n, uint64_t first, uint64_t step) {
    while (n) {
      if (high != first >> 32) {
        high = first >> 32;
        key = DigestKey::of(static_cast<uint32_t>(high));
      }
      const uint64_t low = first & 0xffffffffu;
      const auto count = std::min<int64_t>(n, step ? static_cast<int64_t>((0xffffffffu - low) / step) + 1 : n);
      run(elements, size, static_cast<size_t>(count), static_cast<uint32_t>(low), step, key, sum.w);
      elements += count * size;
      first += static_cast<uint64_t>(count) * step;
      n -= count;
    }
  }
};

template <class T>
void gather(const char* from, int64_t n, int64_t stride_bytes, char* to) {
  for (int64_t i = 0; i < n; ++i) memcpy(to + i * static_cast<int64_t>(sizeof(T)), from + i * stride_bytes, sizeof(T));
}

// n elements, `stride` elements apart in memory.
void digest_row(Adder* adder, uint32_t size, const char* from, int64_t n, int64_t stride, uint64_t first,
                uint64_t step) {
  const uint32_t part = std::min(size, 4u);  // bytes of a word
  const uint64_t words = size / part;        // of an element
  if (stride == 1 && (words == 1 || step == 1)) {
    return adder->add(from, part, n * static_cast<int64_t>(words), first * words, step);
  }
  char buffer[kChunk * 4];
  const int64_t stride_bytes = stride * static_cast<int64_t>(size);
  for (; n;) {
    const int64_t count = std::min(n, kChunk);
    for (uint64_t word = 0; word < words; ++word) {
      const char* begin = from + 4 * word;
      if (part == 1) {
        gather<uint8_t>(begin, count, stride_bytes, buffer);
      } else if (part == 2) {
        gather<uint16_t>(begin, count, stride_bytes, buffer);
      } else {
        gather<uint32_t>(begin, count, stride_bytes, buffer);
      }
      adder->add(buffer, part, count, first * words + word, step * words);
    }
    from += count * stride_bytes;
    first += static_cast<uint64_t>(count) * step;
    n -= count;
  }
}

// The order of a grid's axes does not matter to a sum: memory in order, and rows that are worth a call.
Grid in_memory_order(const Grid& grid) {
  Grid sorted = grid;
  const auto begin = sorted.axis, end = sorted.axis + sorted.num_axes;
  std::stable_sort(begin, end, [](const Axis& a, const Axis& b) { return std::abs(a.stride) > std::abs(b.stride); });
  sorted.collapse();
  Axis& inner = sorted.axis[sorted.num_axes - 1];
  Axis* longest = std::max_element(sorted.axis, sorted.axis + sorted.num_axes,
                                   [](const Axis& a, const Axis& b) { return a.size < b.size; });
  if (inner.size < kRow) std::swap(*longest, inner);
  return sorted;
}

// Elements [begin, end) of a piece, counted row by row.
void digest_part(Adder* adder, const void* data, uint32_t size, const Grid& grid, int64_t begin, int64_t end) {
  const int num_outer = grid.num_axes - 1;
  const Axis& inner = grid.axis[num_outer];
  while (begin < end) {
    const Row row = row_of(grid.axis, num_outer, grid.first, static_cast<uint64_t>(begin / inner.size));
    const int64_t from = begin % inner.size;
    const int64_t count = std::min(inner.size - from, end - begin);
    const char* at = static_cast<const char*>(data) + (row.memory + from * inner.stride) * static_cast<int64_t>(size);
    digest_row(adder, size, at, count, inner.stride,
               row.first + static_cast<uint64_t>(from) * static_cast<uint64_t>(inner.step),
               static_cast<uint64_t>(inner.step));
    begin += count;
  }
}

}  // namespace

bool digest_cpu(const DigestPiece* pieces, size_t num_pieces, int num_threads, const KeepGoing& keep_going,
                DigestSum* sums) {
  const DigestRun run = active_run();
  std::fill(sums, sums + num_pieces, DigestSum{});
  std::mutex mutex;
  return for_each_span(pieces, num_pieces, num_threads, kChunk, keep_going,
                       [&](size_t piece, int64_t begin, int64_t end) {
                         const DigestPiece& one = pieces[piece];
                         Adder adder{run};
                         digest_part(&adder, one.data, one.size, in_memory_order(one.grid), begin, end);
                         const std::lock_guard<std::mutex> lock(mutex);
                         sums[piece].add(adder.sum.w);
                       });
}

}  // namespace shardinit
