// The digests' part of the native module.
#pragma once

#include <pybind11/pybind11.h>

namespace shardinit {

void bind_digest(pybind11::module_& m);

}  // namespace shardinit
