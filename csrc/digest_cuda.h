// Digests of memory on a GPU.
#pragma once

#include "digest_launch.h"

namespace shardinit {

// Launches on a stream (a cudaStream_t); the slots are written when the stream has come that far.
// std::runtime_error where CUDA refuses.
DigestSlots digest_cuda(const DigestPiece* pieces, size_t num_pieces, int device, void* stream,
                        uint32_t num_multiprocessors, uint64_t slots);

}  // namespace shardinit
