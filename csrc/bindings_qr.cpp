// The binding of qr.h.
#include "bindings_qr.h"

#include <pybind11/pybind11.h>

#include <stdexcept>

#include "bindings_interrupt.h"
#include "qr.h"

namespace py = pybind11;

namespace shardinit {

void bind_qr(py::module_& m) {
  m.def(
      "orthonormalise",
      [](uintptr_t data, int64_t rows, int64_t cols, int num_threads) {
        if (!data || data % sizeof(double)) throw std::invalid_argument("orthonormalise: memory must be fp64");
        if (cols < 1 || rows < cols) throw std::invalid_argument("orthonormalise: rows must be >= cols >= 1");
        run_interruptibly([&](const KeepGoing& keep_going) {
          return orthonormalise(reinterpret_cast<double*>(data), rows, cols, num_threads, keep_going);
        });
      },
      py::arg("data"), py::arg("rows"), py::arg("cols"), py::arg("num_threads"));
}

}  // namespace shardinit
