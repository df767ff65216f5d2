"""Rows of every length, order and distance: short ones share vectors, transposed ones are written in tiles. An element
has the value of its global index, and no byte beside it changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import assert_bitwise_equal

from torch_shardinit import _native
from torch_shardinit.draws import DTYPE_CODES, INTEGER_DTYPES, lower
from torch_shardinit.reference_draws import DRAWS

SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float8_e5m2": 1, "int64": 8, "int32": 4, "int16": 2, "bool": 1}
CASES = [
    ("normal", (0.5, 0.25), ("float64", "float32", "bfloat16", "float8_e5m2")),
    ("bernoulli", (0.4,), ("float32", "bool", "int16", "int64")),
    ("random", (-7.0, 100.0), ("float64", "bfloat16", "int32")),
    ("random_bits", (), ("int32", "int64")),
]
SEED, TENSOR_ID = 77, 2**63 + 5


def filled(
    distribution: str,
    params: tuple[float, ...],
    dtype: str,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    first: int,
    steps: tuple[int, ...],
    threads: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """(the whole memory, what it should be), as unsigned integers."""
    size = SIZES[dtype]
    unsigned = np.dtype(f"u{size}")
    extent = 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    memory = np.full(extent + 6, 0xA5, np.uint8).repeat(size).view(unsigned)
    want = memory.copy()
    draw = lower(distribution, params)
    code = {**DTYPE_CODES, **INTEGER_DTYPES}[dtype]
    place = (memory.ctypes.data + 3 * size, code, sizes, strides, first, steps)
    _native.fill([(*place, draw.code, draw.params, SEED, TENSOR_ID, draw.unary)], threads)
    axes = np.indices(sizes).reshape(len(sizes), -1).astype(np.uint64)
    at = sum(
        (k * np.uint64(stride) for k, stride in zip(axes, strides, strict=True)), np.zeros(axes.shape[1], np.uint64)
    )
    index = sum((k * np.uint64(step) for k, step in zip(axes, steps, strict=True)), np.zeros(axes.shape[1], np.uint64))
    values = DRAWS[distribution](index + np.uint64(first), *params, dtype=dtype, seed=SEED, tensor_id=TENSOR_ID)
    want[at.astype(np.int64) + 3] = values.view(unsigned)
    return memory, want


def row_major(sizes: tuple[int, ...], gap: int = 0) -> tuple[int, ...]:
    steps = [1]
    for n in reversed(sizes[1:]):
        steps.append(steps[-1] * n + gap)
    return tuple(reversed(steps))


SHAPES = {
    "runs of one": ((700, 1), (3, 1), (9, 1)),
    "runs of three": ((400, 3), (5, 1), (7, 1)),
    "runs that share blocks": ((300, 3), (3, 1), (3, 1)),
    "runs of 511": ((5, 511), (600, 1), (515, 1)),
    "runs of 513": ((5, 513), (600, 1), (515, 1)),
    "longer than what is collected": ((2, 511, 5), (4000, 7, 1), (5000, 9, 1)),
    "every second": ((3001,), (1,), (2,)),
    "apart in memory and index": ((1001,), (3,), (5,)),
    "transposed": ((40, 300), (1, 41), (1000, 1)),
    "transposed, long": ((35, 2600), (1, 35), (3000, 1)),
    "transposed, short": ((900, 9), (1, 900), (9, 1)),
    "channels last": ((6, 50, 3, 3), (450, 1, 150, 50), (450, 9, 3, 1)),
    "transposed box of a larger one": ((3, 70, 130), (10_000, 1, 72), (50_000, 300, 1)),
    "run axis first": ((200, 30), (31, 1), (1, 777)),
    "run axis in the middle": ((5, 60, 7), (1, 40, 5), (60_000, 1, 900)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_rows(isa: str, shape: str) -> None:
    sizes, strides, steps = SHAPES[shape]
    last = sum((n - 1) * step for n, step in zip(sizes, steps, strict=True))
    for distribution, params, dtypes in CASES:
        for dtype in dtypes:
            # The high word of the block number changes at 2^34, inside the piece.
            for first in (0, 5, 2**34 - last // 2 - 1, 2**63 - 1 - last):
                if dtype == "float64" and first not in (5, 2**34 - last // 2 - 1):
                    continue
                got, want = filled(distribution, params, dtype, sizes, strides, first, steps)
                assert_bitwise_equal(got, want, f"{isa} {distribution} {dtype} {shape} {first}")


def test_random_grids(isa: str) -> None:
    random = np.random.default_rng(21)
    for trial in range(150):
        num_dims = int(random.integers(1, 6))
        sizes = tuple(int(n) for n in random.integers(1, (2500, 80, 16, 9, 6)[num_dims - 1], num_dims))
        strides, steps = [0] * num_dims, [0] * num_dims
        for numbers, gap in ((strides, 3), (steps, 5)):
            extent = 1
            for d in random.permutation(num_dims):
                numbers[d] = extent
                extent *= sizes[d] + int(random.integers(0, gap))
        distribution, params, dtypes = CASES[trial % len(CASES)]
        dtype = dtypes[int(random.integers(len(dtypes)))]
        first = int(random.choice([0, 3, 2**34 - 40, 2**40 + 1]))
        got, want = filled(distribution, params, dtype, sizes, tuple(strides), first, tuple(steps))
        assert_bitwise_equal(got, want, f"{isa} {dtype} {sizes} {strides} {steps} {first}")


@pytest.mark.parametrize("threads", [2, 3])
def test_rows_cut_between_threads(isa: str, threads: int) -> None:
    """Spans end inside rows and inside tiles."""
    for sizes, strides, steps in (
        ((1000, 333), (1, 1001), (700, 1)),
        ((70_000, 3), (4, 1), (5, 1)),
        ((5, 40_001), (40_011, 1), (50_000, 1)),
        ((333, 1000), (1000, 1), (1, 400)),
    ):
        assert math.prod(sizes) > 3 * 2**16
        got, want = filled("random_bits", (), "int32", sizes, strides, 7, steps, threads)
        assert_bitwise_equal(got, want, f"{isa} {sizes}")
