// Python's door to the seam: numbers in, no tensor types. Arguments are checked in Python (ops.py, apply.py).
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <vector>

#include "bindings_digest.h"
#include "bindings_grid.h"
#include "bindings_interrupt.h"
#include "bindings_qr.h"
#include "dispatch.h"
#include "fill.h"
#include "fill_cuda.h"
#include "fp_environment.h"
#include "launch.h"
#include "params.h"
#include "soft_fma.h"

namespace py = pybind11;
using namespace shardinit;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

// A piece as Python passes it: (pointer, dtype, sizes, strides, first global index, steps, distribution, parameters,
// seed, tensor_id, unary steps).
Piece piece_of(const py::tuple& t) {
  if (t.size() != 11) throw std::invalid_argument("a piece has 11 fields");
  Piece piece{};
  piece.data = reinterpret_cast<void*>(t[0].cast<uintptr_t>());
  piece.dtype = static_cast<Dtype>(t[1].cast<int>());
  piece.grid = grid_of(t[2], t[3], t[4].cast<uint64_t>(), t[5]);
  const auto unary = t[10].cast<std::vector<std::pair<int, double>>>();
  if (unary.size() > kMaxUnary) throw std::invalid_argument("a piece has at most 35 steps after its draw");
  piece.num_unary = static_cast<int>(unary.size());
  for (size_t k = 0; k < unary.size(); ++k) piece.unary[k] = {static_cast<UnaryOp>(unary[k].first), unary[k].second};
  const auto params = t[7].cast<std::vector<double>>();
  if (params.size() > 4) throw std::invalid_argument("a draw has at most 4 parameters");
  double p[4] = {};
  std::copy(params.begin(), params.end(), p);
  set_draw(&piece, static_cast<Distribution>(t[6].cast<int>()), p, t[8].cast<uint64_t>(), t[9].cast<uint64_t>());
  return piece;
}

// To be called under the default floating-point environment. Empty pieces are left out.
std::vector<Piece> pieces_of(const py::list& list) {
  std::vector<Piece> pieces;
  pieces.reserve(list.size());
  for (const auto& item : list) {
    const Piece piece = piece_of(item.cast<py::tuple>());
    if (piece.grid.numel() == 0) continue;
    if (!piece.data) throw std::invalid_argument("a piece of a tensor that holds no memory");
    if (reinterpret_cast<uintptr_t>(piece.data) % size_of(piece.dtype)) {
      throw std::invalid_argument("a piece must be aligned to its elements");
    }
    pieces.push_back(piece);
  }
  return pieces;
}

void fill(const py::list& list, int num_threads) {
  std::vector<Piece> pieces;
  {
    const DefaultFpEnvironment environment;
    pieces = pieces_of(list);
  }
  run_interruptibly(
      [&](const KeepGoing& keep_going) { return fill_cpu(pieces.data(), pieces.size(), num_threads, keep_going); });
}

#if defined(SHARDINIT_CUDA)
void fill_on_cuda(const py::list& list, int device, uintptr_t stream) {
  const DefaultFpEnvironment environment;
  const std::vector<Piece> pieces = pieces_of(list);
  const py::gil_scoped_release release;
  fill_cuda(pieces.data(), pieces.size(), device, reinterpret_cast<void*>(stream));
}
#endif

// What fill_on_cuda would launch: (kernel, thread blocks, threads of each, parameters, pieces, elements).
py::list launches(const py::list& list, uint32_t num_multiprocessors) {
  if (!num_multiprocessors) throw std::invalid_argument("num_multiprocessors must be at least 1");
  const DefaultFpEnvironment environment;
  const std::vector<Piece> pieces = pieces_of(list);
  py::list result;
  plan_launches(pieces.data(), pieces.size(), num_multiprocessors, [&](const Launch& launch) {
    result.append(py::make_tuple(name_of(launch.kernel), launch.grid, kThreads,
                                 py::bytes(static_cast<const char*>(launch.parameters), launch.num_bytes),
                                 launch.num_pieces, launch.num_elements));
  });
  return result;
}

// The pairs of values of given words; for the tests of accuracy, which choose the words.
py::tuple transform(bool is_double, int distribution, const std::vector<double>& params, const Array<uint64_t>& p,
                    const Array<uint64_t>& q) {
  if (params.size() > 4 || p.size() != q.size()) throw std::invalid_argument("transform: sizes must agree");
  Piece piece{};
  piece.dtype = is_double ? Dtype::kFloat64 : Dtype::kFloat32;
  double raw[4] = {};
  std::copy(params.begin(), params.end(), raw);
  Array<double> even(p.size());
  Array<double> odd(p.size());
  const DefaultFpEnvironment environment;
  set_draw(&piece, static_cast<Distribution>(distribution), raw, 0, 0);
  active_kernels().transform(piece, p.data(), q.data(), static_cast<size_t>(p.size()), even.mutable_data(),
                             odd.mutable_data());
  return py::make_tuple(even, odd);
}

double round_to_fp32(double x) {
  const DefaultFpEnvironment environment;
  return to_float32(x);
}

std::vector<uint32_t> philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
  const auto words = philox4x32<uint32_t>(c0, c1, c2, c3, PhiloxKey::of(key));
  return {words.w, words.w + 4};
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "The kernels of torch_shardinit. Private: use the package's functions.";
  m.attr("STREAM_VERSION") = kStreamVersion;
  m.attr("MAX_UNARY") = kMaxUnary - kDrawUnary;
  m.attr("COMPILER") = SHARDINIT_COMPILER;
  m.def("fill", &fill, py::arg("pieces"), py::arg("num_threads"));
#if defined(SHARDINIT_CUDA)
  m.attr("CUDA") = SHARDINIT_CUDA;
  m.def("fill_cuda", &fill_on_cuda, py::arg("pieces"), py::arg("device"), py::arg("stream"));
#else
  m.attr("CUDA") = py::none();
#endif
  bind_qr(m);
  m.def("launches", &launches, py::arg("pieces"), py::arg("num_multiprocessors"));
  m.def("has_value_below", [](int dtype, double b) { return has_value_below(static_cast<Dtype>(dtype), b); });
  m.def("round_to_fp32", &round_to_fp32);
  m.def("geometric_rate", [](double p) {
    const DefaultFpEnvironment environment;
    return geometric_rate(p);
  });
  m.def("available_isas", &available_isas);
  m.def("active_isa", [] { return std::string(active_kernels().name); });
  m.def("force_isa", &force_isa);
  m.def("philox", &philox);
  m.def("transform", &transform);
  m.def("soft_fma", [](double a, double b, double c) { return soft_fma(a, b, c); });
  m.def("soft_fmaf", [](float a, float b, float c) { return soft_fma(a, b, c); });
  bind_digest(m);
}
