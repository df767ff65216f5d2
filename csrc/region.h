// From a strided tensor to runs of consecutive global indices.
#pragma once

#include <cstdint>

#include "numeric.h"

namespace shardinit {

inline constexpr int kMaxDims = 64;  // torch's own limit

struct Axis {
  int64_t size;
  int64_t stride;  // in memory, elements
  int64_t step;    // in global index

  // Whether this axis goes on where all of the next one ends.
  bool continues(const Axis& next) const { return stride == next.size * next.stride && step == next.size * next.step; }
};

// Element (k0, k1, ...) lies at data + sum k_d * stride_d elements and has global index first + sum k_d * step_d.
struct Grid {
  int num_axes;
  uint64_t first;
  Axis axis[kMaxDims];

  int64_t numel() const {
    int64_t n = 1;
    for (int d = 0; d < num_axes; ++d) n *= axis[d].size;
    return n;
  }

  // Drops dimensions of size 1 and joins neighbours that continue each other both in memory and in global index. At
  // least one dimension is left, so that the last one is the run.
  void collapse() {
    int kept = 0;
    for (int d = 0; d < num_axes; ++d) {
      if (axis[d].size == 1) continue;
      if (kept && axis[kept - 1].continues(axis[d])) {
        axis[kept - 1] = {axis[kept - 1].size * axis[d].size, axis[d].stride, axis[d].step};
      } else {
        axis[kept++] = axis[d];
      }
    }
    if (kept == 0) axis[kept++] = {1, 1, 1};
    num_axes = kept;
  }

  // Puts the axis along which global indices are consecutive last, if there is one; where its elements lie apart in
  // memory, before it the one whose elements lie side by side.
  void put_run_last() {
    int last = num_axes - 1;
    for (int d = 0; d < last; ++d) {
      if (axis[d].step == 1 && axis[last].step != 1) move(d, last);
    }
    for (int d = 0; d < last - 1; ++d) {
      if (axis[d].stride == 1 && axis[last].stride != 1) move(d, last - 1);
    }
  }

 private:
  void move(int from, int to) {
    const Axis moved = axis[from];
    for (int d = from; d < to; ++d) axis[d] = axis[d + 1];
    axis[to] = moved;
  }
};

// Where a row starts: one pass over the last axis of a grid.
struct Row {
  int64_t memory;  // elements from data
  uint64_t first;  // global index
};

// Row number `row`, counted over the axes before the last, outermost first.
SHARDINIT_HD Row row_of(const Axis* outer, int num_outer, uint64_t first, uint64_t row) {
  Row result{0, first};
  SHARDINIT_ROLLED
  for (int d = num_outer - 1; d >= 0; --d) {
    const auto size = static_cast<uint64_t>(outer[d].size);
    const uint64_t k = row % size;
    row /= size;
    result.memory += static_cast<int64_t>(k) * outer[d].stride;
    result.first += k * static_cast<uint64_t>(outer[d].step);
  }
  return result;
}

}  // namespace shardinit
