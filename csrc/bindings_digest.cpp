#include "bindings_digest.h"

#include <pybind11/stl.h>

#include <stdexcept>
#include <vector>

#include "digest.h"

namespace py = pybind11;

namespace shardinit {
namespace {

// A piece as Python passes it: (pointer, bytes of an element, sizes, strides, first global index, steps).
DigestPiece piece_of(const py::tuple& t) {
  if (t.size() != 6) throw std::invalid_argument("a piece to digest has 6 fields");
  DigestPiece piece{};
  piece.data = reinterpret_cast<const void*>(t[0].cast<uintptr_t>());
  piece.size = t[1].cast<uint32_t>();
  if (piece.size > 16 || piece.size == 0 || (piece.size & (piece.size - 1))) {
    throw std::invalid_argument("an element to digest has 1, 2, 4, 8 or 16 bytes");
  }
  const auto sizes = t[2].cast<std::vector<int64_t>>();
  const auto strides = t[3].cast<std::vector<int64_t>>();
  const auto steps = t[5].cast<std::vector<int64_t>>();
  if (sizes.size() > kMaxDims || strides.size() != sizes.size() || steps.size() != sizes.size()) {
    throw std::invalid_argument("a piece needs as many strides and steps as sizes, and at most 64");
  }
  piece.grid.num_axes = static_cast<int>(sizes.size());
  piece.grid.first = t[4].cast<uint64_t>();
  for (size_t d = 0; d < sizes.size(); ++d) piece.grid.axis[d] = {sizes[d], strides[d], steps[d]};
  piece.grid.collapse();
  if (piece.grid.numel() && !piece.data) throw std::invalid_argument("a piece of a tensor that holds no memory");
  return piece;
}

std::vector<DigestPiece> pieces_of(const py::list& list) {
  std::vector<DigestPiece> pieces;
  pieces.reserve(list.size());
  for (const auto& item : list) pieces.push_back(piece_of(item.cast<py::tuple>()));
  return pieces;
}

py::bytes bytes_of(const DigestSum& sum) {
  char bytes[16];
  for (int k = 0; k < 16; ++k) bytes[k] = static_cast<char>(sum.w[k / 4] >> (8 * (k % 4)));
  return py::bytes(bytes, sizeof(bytes));
}

py::list digest(const py::list& list, int num_threads) {
  const std::vector<DigestPiece> pieces = pieces_of(list);
  std::vector<DigestSum> sums(pieces.size());
  {
    const py::gil_scoped_release release;
    digest_cpu(pieces.data(), pieces.size(), num_threads, sums.data());
  }
  py::list result;
  for (const DigestSum& sum : sums) result.append(bytes_of(sum));
  return result;
}

}  // namespace

void bind_digest(py::module_& m) { m.def("digest", &digest, py::arg("pieces"), py::arg("num_threads")); }

}  // namespace shardinit
