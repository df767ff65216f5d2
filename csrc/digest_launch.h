// What goes to the CUDA kernels of digests, and the plan of their launches. There is no CUDA in here, as in launch.h.
//
// Each thread writes what it has added to a slot of its own, of 16 bytes, so that nothing is atomic; whoever launches
// adds up the slots of a piece, in any order.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "digest.h"
#include "launch.h"

namespace shardinit {

struct DigestHeader {
  uint64_t slots;  // address of the launch's first slot
  uint64_t total;  // spans; a span is what a warp does at a time, and has a slot for each of its threads
  uint32_t num_pieces;
  uint32_t span;  // blocks (runs) or elements (grids) of a span, a multiple of a warp
};

// Elements of 1, 2 or 4 bytes side by side in memory, with consecutive indices. A block is 16 bytes.
struct DigestRunPiece {
  uint64_t origin;      // address of block 0, which holds the first element and may begin before it
  uint64_t begin, end;  // in elements from there
  uint64_t first;       // index of the element at the origin, modulo 2^64
  uint64_t first_span;  // spans of the pieces before
  uint32_t size;        // bytes of an element
};

// Any strides and steps.
struct DigestGridPiece {
  uint64_t data;
  uint64_t first;  // index
  uint64_t numel;
  uint64_t first_span;
  uint32_t size;
  uint32_t first_axis, num_axes;
};

struct DigestRunBatch {
  using Piece = DigestRunPiece;
  static constexpr size_t kMaxPieces = (kParameterBytes - sizeof(DigestHeader)) / sizeof(Piece);
  DigestHeader header;
  Piece pieces[kMaxPieces];
};

struct DigestGridBatch {
  using Piece = DigestGridPiece;
  static constexpr size_t kMaxAxes = kMaxDims;
  static constexpr size_t kMaxPieces =
      (kParameterBytes - sizeof(DigestHeader) - kMaxAxes * sizeof(Axis)) / sizeof(Piece);
  DigestHeader header;
  Axis axes[kMaxAxes];
  Piece pieces[kMaxPieces];
};

struct DigestLaunch {
  bool is_run;    // which kernel
  uint32_t grid;  // thread blocks of kThreads
  const void* parameters;
  size_t num_bytes;
};

struct DigestSlots {
  uint64_t num_slots;
  std::vector<std::pair<uint64_t, uint64_t>> of_piece;  // begin, end
};

// Calls emit for each launch that digests the pieces on a device with so many multiprocessors, into slots from the
// address `slots` on.
DigestSlots plan_digest(const DigestPiece* pieces, size_t num_pieces, uint32_t num_multiprocessors, uint64_t slots,
                        const std::function<void(const DigestLaunch&)>& emit);

}  // namespace shardinit
