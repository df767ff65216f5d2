// From a strided tensor to runs of consecutive global indices.
#pragma once

#include <cstdint>

namespace shardinit {

inline constexpr int kMaxDims = 64;  // torch's own limit

// Element (k0, k1, ...) lies at data + sum k_d * stride_d elements and has global index first + sum k_d * step_d.
struct Grid {
  int num_dims;
  uint64_t first;
  int64_t size[kMaxDims];
  int64_t stride[kMaxDims];
  int64_t step[kMaxDims];

  int64_t numel() const {
    int64_t n = 1;
    for (int d = 0; d < num_dims; ++d) n *= size[d];
    return n;
  }

  // Drops dimensions of size 1 and joins neighbours that continue each other both in memory and in global index. At
  // least one dimension is left, so that the last one is the run.
  void collapse() {
    int kept = 0;
    for (int d = 0; d < num_dims; ++d) {
      if (size[d] == 1) continue;
      if (kept && stride[kept - 1] == size[d] * stride[d] && step[kept - 1] == size[d] * step[d]) {
        size[kept - 1] *= size[d];
        stride[kept - 1] = stride[d];
        step[kept - 1] = step[d];
      } else {
        size[kept] = size[d];
        stride[kept] = stride[d];
        step[kept] = step[d];
        ++kept;
      }
    }
    if (kept == 0) {
      size[0] = 1;
      stride[0] = 1;
      step[0] = 1;
      kept = 1;
    }
    num_dims = kept;
  }
};

// Where row number `row` of a collapsed grid starts; a row is one pass over the last dimension.
struct Row {
  int64_t memory;  // elements from data
  uint64_t first;  // global index
};

inline Row row_of(const Grid& grid, int64_t row) {
  Row result{0, grid.first};
  for (int d = grid.num_dims - 2; d >= 0; --d) {
    const int64_t k = row % grid.size[d];
    row /= grid.size[d];
    result.memory += k * grid.stride[d];
    result.first += static_cast<uint64_t>(k) * static_cast<uint64_t>(grid.step[d]);
  }
  return result;
}

}  // namespace shardinit
