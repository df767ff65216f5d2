// The Q factor of a matrix by Householder reflections in fp64, in one written order of operations: the same bits on
// every instruction set and for any number of threads.
#pragma once

#include <cstdint>

#include "keep_going.h"

namespace shardinit {

// Replaces a row-major matrix of rows >= cols >= 1 by the Q of its QR decomposition, each column multiplied by the sign
// of its diagonal element of R (0 where that is 0), as torch.nn.init.orthogonal_ does. Allocates as much again and
// rows * 32 numbers.
//
// The order: columns in panels of 32. Reflections of a panel one after another, H = I - tau v v^T, v[k] = 1; then the
// panel's block reflection I - V T V^T, to the panels after it as V^T C, T^T W, C - V W, and backwards over the
// identity to form Q. Every sum is over ascending indices, from 0; products are rounded before they are added.
//
// False where keep_going, asked for each panel, stopped it; the matrix is then as it was.
bool orthonormalise(double* matrix, int64_t rows, int64_t cols, int num_threads, const KeepGoing& keep_going);

}  // namespace shardinit
