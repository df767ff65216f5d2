// The CUDA backend.
#pragma once

#include "fill.h"

namespace shardinit {

// Fills all pieces, which lie in the memory of one device, on a stream of it. Only queues kernels: no synchronisation,
// no allocation, no copy, so that it can be captured into a graph. Throws std::runtime_error where a launch is refused.
void fill_cuda(const Piece* pieces, size_t num_pieces, int device, void* stream);

}  // namespace shardinit
