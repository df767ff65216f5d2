// Which instruction set's kernels run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace shardinit {

inline constexpr int kMaxThreads = 256;

// The sets that this processor can run, the best one last.
std::vector<std::string> available_isas();

// The best available set, or the one that SHARDINIT_ISA names. std::invalid_argument where that can't be had.
const Kernels& active_kernels();

// Replaces the choice, for tests; an empty name goes back to the default.
void force_isa(const std::string& name);

}  // namespace shardinit
