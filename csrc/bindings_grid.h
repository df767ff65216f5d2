// What the bindings of fills and of digests read alike.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <vector>

#include "region.h"

namespace shardinit {

// A collapsed grid from Python's sequences of sizes, strides and steps.
inline Grid grid_of(const pybind11::handle& py_sizes, const pybind11::handle& py_strides, uint64_t first,
                    const pybind11::handle& py_steps) {
  const auto sizes = py_sizes.cast<std::vector<int64_t>>();
  const auto strides = py_strides.cast<std::vector<int64_t>>();
  const auto steps = py_steps.cast<std::vector<int64_t>>();
  if (sizes.size() > kMaxDims || strides.size() != sizes.size() || steps.size() != sizes.size()) {
    throw std::invalid_argument("a piece needs as many strides and steps as sizes, and at most 64");
  }
  Grid grid{};
  grid.num_axes = static_cast<int>(sizes.size());
  grid.first = first;
  for (size_t d = 0; d < sizes.size(); ++d) grid.axis[d] = {sizes[d], strides[d], steps[d]};
  grid.collapse();
  return grid;
}

}  // namespace shardinit
