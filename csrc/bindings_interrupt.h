// Ctrl-C during a long call.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>

#include "keep_going.h"

namespace shardinit {

// Runs work(keep_going) without the GIL, and Python's signal handlers ten times a second: where one raises, the work
// stops and the exception goes on. Other threads than the main one have no handlers to run.
template <class Work>
void run_interruptibly(const Work& work) {
  using Clock = std::chrono::steady_clock;
  bool done;
  {
    const pybind11::gil_scoped_release release;
    auto asked = Clock::now();
    done = work([&asked] {
      const auto now = Clock::now();
      if (now - asked < std::chrono::milliseconds(100)) return true;
      asked = now;
      const pybind11::gil_scoped_acquire acquire;
      return PyErr_CheckSignals() == 0;
    });
  }
  if (!done) throw pybind11::error_already_set();
}

}  // namespace shardinit
