// The part of the Python module that is qr.h.
#pragma once

#include <pybind11/pybind11.h>

namespace shardinit {

void bind_qr(pybind11::module_& m);

}  // namespace shardinit
