#include "bindings_digest.h"

#include <pybind11/stl.h>

#include <stdexcept>
#include <vector>

#include "bindings_grid.h"
#include "bindings_interrupt.h"
#include "digest_cuda.h"

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
  piece.grid = grid_of(t[2], t[3], t[4].cast<uint64_t>(), t[5]);
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
  run_interruptibly([&](const KeepGoing& keep_going) {
    return digest_cpu(pieces.data(), pieces.size(), num_threads, keep_going, sums.data());
  });
  py::list result;
  for (const DigestSum& sum : sums) result.append(bytes_of(sum));
  return result;
}

// The slots of a plan: (how many, [(begin, end) of each piece]).
py::tuple slots_of(const DigestSlots& slots) {
  py::list ranges;
  for (const auto& range : slots.of_piece) ranges.append(py::make_tuple(range.first, range.second));
  return py::make_tuple(slots.num_slots, ranges);
}

// What digest_cuda would launch: the slots, and [(kernel, thread blocks, threads of each, parameters)].
py::tuple digest_launches(const py::list& list, uint32_t num_multiprocessors, uint64_t slots) {
  const std::vector<DigestPiece> pieces = pieces_of(list);
  py::list launches;
  const DigestSlots planned =
      plan_digest(pieces.data(), pieces.size(), num_multiprocessors, slots, [&](const DigestLaunch& launch) {
        launches.append(py::make_tuple(launch.is_run ? "shardinit_digest_run" : "shardinit_digest_grid", launch.grid,
                                       kThreads,
                                       py::bytes(static_cast<const char*>(launch.parameters), launch.num_bytes)));
      });
  return py::make_tuple(slots_of(planned), launches);
}

#if defined(SHARDINIT_CUDA)
py::tuple digest_on_cuda(const py::list& list, int device, uintptr_t stream, uint32_t num_multiprocessors,
                         uint64_t slots) {
  const std::vector<DigestPiece> pieces = pieces_of(list);
  DigestSlots found;
  {
    const py::gil_scoped_release release;
    found =
        digest_cuda(pieces.data(), pieces.size(), device, reinterpret_cast<void*>(stream), num_multiprocessors, slots);
  }
  return slots_of(found);
}
#endif

}  // namespace

void bind_digest(py::module_& m) {
  m.def("digest", &digest, py::arg("pieces"), py::arg("num_threads"));
  m.def("digest_launches", &digest_launches, py::arg("pieces"), py::arg("num_multiprocessors"), py::arg("slots"));
#if defined(SHARDINIT_CUDA)
  m.def("digest_cuda", &digest_on_cuda, py::arg("pieces"), py::arg("device"), py::arg("stream"),
        py::arg("num_multiprocessors"), py::arg("slots"));
#endif
}

}  // namespace shardinit
