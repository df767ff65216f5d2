// Shares the elements of many pieces out to threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <thread>

#include "dispatch.h"
#include "keep_going.h"

namespace shardinit {

inline constexpr int64_t kGrain = int64_t{1} << 16;    // elements worth a thread's while
inline constexpr int64_t kMaxSpan = int64_t{1} << 21;  // so that the caller is asked often

// Calls body(piece, begin, end) for spans of elements that together are all of each piece's grid once, from up to
// num_threads threads. Spans are whole chunks but at a piece's end, and handed out in order, the pieces laid end to
// end.
//
// Threads live for one call: they cost some tens of microseconds against milliseconds of work, and a process that forks
// afterwards inherits no pool. Where the system has no thread or memory to give, fewer do the work.
//
// Returns false where keep_going said so.
template <class Piece, class Body>
bool for_each_span(const Piece* pieces, size_t num_pieces, int num_threads, int64_t chunk, const KeepGoing& keep_going,
                   const Body& body) {
  int64_t total = 0;
  for (size_t k = 0; k < num_pieces; ++k) total += pieces[k].grid.numel();
  const int64_t wanted = std::min<int64_t>(std::max(num_threads, 1), (total + kGrain - 1) / kGrain);
  const int64_t share = wanted <= 1 ? total : std::max<int64_t>(kGrain, total / (wanted * 8));
  const int64_t span = (std::min(share, kMaxSpan) + chunk) / chunk * chunk;
  std::atomic<int64_t> next{0};
  std::atomic<bool> stopped{false};
  const auto work = [&](bool is_caller) {
    size_t piece = 0;
    int64_t piece_begin = 0;
    for (;;) {
      if (stopped.load(std::memory_order_relaxed)) return;
      if (is_caller && !keep_going()) {
        stopped.store(true, std::memory_order_relaxed);
        return;
      }
      int64_t begin = next.fetch_add(span);
      const int64_t end = std::min(begin + span, total);
      while (begin < end) {
        while (begin >= piece_begin + pieces[piece].grid.numel()) piece_begin += pieces[piece++].grid.numel();
        const int64_t stop = std::min(end, piece_begin + pieces[piece].grid.numel());
        body(piece, begin - piece_begin, stop - piece_begin);
        begin = stop;
      }
      if (end >= total) return;
    }
  };
  std::thread threads[kMaxThreads];
  int started = 0;
  try {
    for (; started < std::min<int64_t>(wanted - 1, kMaxThreads); ++started) threads[started] = std::thread(work, false);
  } catch (const std::exception&) {
  }
  work(true);
  for (int k = 0; k < started; ++k) threads[k].join();
  return !stopped.load();
}

}  // namespace shardinit
