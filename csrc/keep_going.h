// How a long call of the CPU backend is stopped.
#pragma once

#include <functional>

namespace shardinit {

// Asked often, by the calling thread; false stops the work, part of it undone.
using KeepGoing = std::function<bool()>;

}  // namespace shardinit
