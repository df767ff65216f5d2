"""The PTX that nvcc emits for our CUDA kernels, run on the CPU, gives the CPU backend's bytes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from ptx import Memory
from ptx.compile import needs_nvcc
from ptx_fills import ARCHITECTURES, GUARD, GUARD_BYTE, SIZES, Fill, assert_same, bytes_of_cpu, last_of_ptx, module

from torch_shardinit import _native

pytestmark = needs_nvcc

INF = math.inf
FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
# (distribution, params, kernel family)
DRAWS = {
    "uniform": ("uniform", (-0.3, 0.7)),
    "uniform-tiny": ("uniform", (-3e-42, 5e-42)),  # b - a times 2^-24 is not exact
    "uniform-zeros": ("uniform", (-2e-44, 1.4e-45)),  # -0 under a top of +0
    "uniform-subnormal": ("uniform", (-(2.0**-120), 2.0**-120)),  # in the kernel of runs
    "uniform-equal": ("uniform", (0.5, 0.5)),
    "normal": ("normal", (0.02, 0.25)),
    "normal-huge": ("normal", (3e38, 0.0)),  # overflows to infinity
    "normal-subnormal": ("normal", (1e-39, 1e-41)),
    "trunc-subnormal": ("trunc_normal", (1e-39, 0.0, -2e-39, 2e-39)),
    "trunc-central": ("trunc_normal", (1.0, 0.0, -2.0, 2.0)),
    "trunc-above": ("trunc_normal", (1.0, 0.0, -1.0, 8.0)),  # central at one end
    "trunc-below": ("trunc_normal", (1.0, 0.0, -8.0, 1.0)),
    "trunc-whole": ("trunc_normal", (0.02, 0.1, -INF, INF)),
    "trunc-tail": ("trunc_normal", (1.0, 0.0, 5.0, 7.0)),
    "trunc-far": ("trunc_normal", (1.0, 0.0, 11.0, INF)),  # scaled by 2^64
    "trunc-narrow": ("trunc_normal", (2.0, 3.0, 3.0, 3.1)),
    "trunc-equal": ("trunc_normal", (1.0, 0.0, 1.5, 1.5)),
    "constant": ("fill", (-0.3,)),
    "nan": ("fill", (math.nan,)),
    "exponential": ("exponential", (0.7,)),
    "log_normal": ("log_normal", (0.5, 2.0)),
    "cauchy": ("cauchy", (0.1, 3.0)),
    "geometric": ("geometric", (0.2,)),
    "geometric-rare": ("geometric", (1e-9,)),
    "bernoulli": ("bernoulli", (0.3,)),
    "bernoulli-never": ("bernoulli", (0.0,)),
    "bernoulli-always": ("bernoulli", (1.0,)),
    "random": ("random", (-1000.0, 77777.0)),
    "random-wide": ("random", (-(2.0**63), 2.0**63 - 2048)),
}
EDGES = (0, 1, 2, 3, 2**32 - 301, 2**34 - 302, 2**34, 2**63 - 777)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("draw", DRAWS)
def test_ptx_runs_of_each_distribution_and_type(draw: str, dtype: str) -> None:
    """At lane edges, past 2^32, across 2^34 (where the block number's high word changes) and at the end of indices."""
    distribution, params = DRAWS[draw]
    fills = [Fill(distribution, params, dtype, (777,), first, skip=k % 4) for k, first in enumerate(EDGES)]
    assert_same(fills, rsqrt_ulp=np.random.default_rng(1))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_ptx_raw_words(dtype: str, arch: str) -> None:
    assert_same(
        [Fill("random_bits", (), dtype, (777,), first, skip=k % 4) for k, first in enumerate(EDGES)], module(arch)
    )


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_100"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_ptx_of_other_architectures(dtype: str, arch: str) -> None:
    fills = [
        Fill(distribution, params, dtype, (1501,), 2**34 - 700 + k, skip=k % 3, tensor_id=k)
        for k, (distribution, params) in enumerate(DRAWS.values())
    ]
    steps = (("mul", (0.5,)), ("add", (0.25,)))
    boxes = [
        Fill(distribution, params, dtype, (7, 9), 5, (11, 1), (100, 1), steps, tensor_id=k)
        for k, (distribution, params) in enumerate(DRAWS.values())
    ]
    assert_same(fills + boxes, module(arch), rsqrt_ulp=np.random.default_rng(2))


@pytest.mark.parametrize("size", [*range(1, 20), 127, 128, 129, 509, 512, 513, 4095, 4096, 4097])
@pytest.mark.parametrize("skip", range(4))
def test_ptx_heads_and_tails(size: int, skip: int) -> None:
    for dtype in ("float32", "bfloat16", "float8_e5m2", "float64"):
        fills = [Fill("normal", (1.0, 0.0), dtype, (size,), first, skip=skip) for first in range(4)]
        fills += [Fill("fill", (0.7,), dtype, (size,), skip=skip)]
        assert_same(fills)


@pytest.mark.parametrize("shape", [(1, 32), (1, 256), (7, 96), (132, 256), (300, 64)])
def test_ptx_shapes_of_the_launch(shape: tuple[int, int]) -> None:
    """Values depend on no grid or block size. One multiprocessor: spans of several passes."""
    for num_multiprocessors in (1, 132):
        fills = [
            Fill("normal", (1.0, 0.0), "float32", (100_003,), 3),
            Fill("uniform", (0.0, 1.0), "bfloat16", (70_001,), 2**34 - 9),
            Fill("trunc_normal", (1.0, 0.0, -2.0, 2.0), "float32", (50_000,), 0, skip=1),
            Fill("fill", (0.1,), "float16", (300_007,)),
            Fill("normal", (1.0, 0.0), "float32", (40, 100), 7, (128, 1), (1000, 1)),
        ]
        assert_same(fills, shape=shape, num_multiprocessors=num_multiprocessors)


def test_ptx_seed_of_the_square_root_does_not_matter() -> None:
    fills = [
        Fill("normal", (1.0, 0.0), "float32", (30_000,)),
        Fill("trunc_normal", (1.0, 0.0, 3.0, 9.0), "float32", (9_000,)),
    ]
    for ulp in (-8, -3, -1, 0, 1, 5, 8):
        assert_same(fills, rsqrt_ulp=ulp)
    assert_same(fills, rsqrt_ulp=np.random.default_rng(3))


# Steps of each kind, and chains that overflow, make NaN and meet both zeros.
CHAINS = [
    (("add", (0.3,)),),
    (("sub", (0.3,)),),
    (("mul", (0.1,)),),
    (("div", (7.0,)),),
    (("neg", ()),),
    (("clamp", (-0.5, 0.25)),),
    (("clamp", (-INF, 0.25)), ("neg", ())),
    (("mul", (1e38,)), ("mul", (1e38,)), ("mul", (0.0,))),
    (("mul", (INF,)), ("sub", (INF,))),
    (("mul", (1e-38,)), ("div", (1e6,)), ("mul", (3.0,))),
    tuple(("add", (0.001 * k,)) for k in range(32)),
    (("exp", ()),),
    (("mul", (60.0,)), ("exp", ())),
    (("log", ()),),
    (("mul", (1e-40,)), ("log", ())),
    (("sqrt", ()),),
    (("erfinv", ()), ("mul", (0.02,))),
    (("mul", (INF,)), ("erfinv", ())),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("chain", range(len(CHAINS)))
def test_ptx_steps_after_the_draw(chain: int, dtype: str) -> None:
    fills = [
        Fill(distribution, params, dtype, (501,), 2**32 - 100 + k, unary=CHAINS[chain], tensor_id=k)
        for k, (distribution, params) in enumerate(DRAWS.values())
    ]
    assert_same(fills, rsqrt_ulp=np.random.default_rng(4))


@pytest.mark.parametrize("dtype", ["bool", "int8", "int16", "int32", "int64"])
def test_ptx_integers(dtype: str) -> None:
    draws = [pair for name, pair in DRAWS.items() if name.startswith(("bernoulli", "random"))]
    fills = [
        Fill(*pair, dtype, sizes, first, strides, steps, skip=k % 3, tensor_id=k)
        for k, pair in enumerate(draws)
        for sizes, first, strides, steps in (
            ((777,), 2**34 - 302, None, None),
            ((5, 9), 3, (11, 1), (100, 1)),
            ((6, 5), 3, (1, 7), (100, 1)),
        )
    ]
    assert_same(fills)


def random_box(random: np.random.Generator, dtype: str) -> Fill:
    """A box of a global tensor in memory of any layout: axes permuted, gaps between rows, several dimensions."""
    num_dims = int(random.integers(1, 6))
    sizes = tuple(int(n) for n in random.integers(1, (400, 30, 12, 6, 5)[num_dims - 1], num_dims))
    steps, step = [], 1
    for n in reversed(sizes):
        steps.append(step)
        step *= n + int(random.integers(0, 3)) * (n > 1)
    order = random.permutation(num_dims)
    strides, stride = [0] * num_dims, int(random.integers(1, 3))
    for axis in order:
        strides[axis] = stride
        stride *= sizes[axis] + int(random.integers(0, 2))
    kind = list(DRAWS)[int(random.integers(len(DRAWS)))]
    chain = CHAINS[int(random.integers(len(CHAINS)))] if random.integers(3) == 0 else ()
    distribution, params = DRAWS[kind]
    first = int(random.choice([0, 1, 6, 2**32 - 20, 2**34 - 7, 2**62 + 3]))
    return Fill(
        distribution, params, dtype, sizes, first, tuple(strides), tuple(reversed(steps)), chain,
        skip=int(random.integers(0, 4)), tensor_id=int(random.integers(2**62)),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
def test_ptx_boxes(dtype: str) -> None:
    random = np.random.default_rng(sum(dtype.encode()))
    assert_same([random_box(random, dtype) for _ in range(60)], rsqrt_ulp=random)


@pytest.mark.parametrize("dtype", FLOATS)
def test_ptx_a_column_that_lies_side_by_side(dtype: str) -> None:
    """One axis, contiguous in memory, of index step not 1: a shard of one column."""
    fills = [
        Fill("normal", (1.0, 0.0), dtype, (301,), 2**34 - 900 + step, (1,), (step,), skip=step % 3, tensor_id=step)
        for step in (2, 4, 7, 1000)
    ]
    draws = (("uniform", (0.0, 1.0)), ("fill", (0.3,)), ("trunc_normal", (1.0, 0.0, -2.0, 2.0)))
    fills += [Fill(*draw, dtype, (97,), 5, (1,), (12,)) for draw in draws]
    assert all("_grid_" in name for name in assert_same(fills))


def test_ptx_a_box_after_more_than_2_to_the_32_blocks() -> None:
    """Rows, and units before a piece, beyond 32 bits: the end of a large box and a small one after it."""
    large = Fill("uniform", (0.0, 1.0), "float32", (2**32 + 9, 2**8), 0, (2**8 + 32, 1), (2**9, 1))
    small = Fill("uniform", (0.0, 1.0), "float32", (60, 16), 5, (20, 1), (100, 1), tensor_id=1)
    want = bytes_of_cpu([small])
    count = 1000
    last = Fill("uniform", (0.0, 1.0), "float32", (4, 2**8), (2**32 + 5) * 2**9, (2**8 + 32, 1), (2**9, 1))
    buffer = np.full(want.size, GUARD_BYTE, np.uint8)
    end = np.full(last.num_bytes() + 4096, GUARD_BYTE, np.uint8)
    memory = Memory()
    memory.map(buffer, 0x10_0000)
    memory.map(end, 0x7000_0000_0000 + large.num_bytes() - end.size)
    pieces = [large.native(0x7000_0000_0000), small.native(0x10_0000 + GUARD)]
    ((name, grid, threads, parameters, _, _),) = _native.launches(pieces, 132)
    module().launch(name, grid, threads, parameters, memory, blocks=range(grid - 2, grid))
    np.testing.assert_array_equal(buffer, want)
    np.testing.assert_array_equal(end[-4 * count :][-1024:], bytes_of_cpu([last])[GUARD:][: last.num_bytes()][-1024:])


def test_ptx_more_axes_than_a_launch_has_room_for() -> None:
    sizes = (2,) * 12
    steps = tuple(3**k for k in reversed(range(12)))
    fills = [
        Fill("normal", (1.0, 0.0), "float32", sizes, k, tuple(2 ** (12 - i) for i in range(12)), steps)
        for k in range(9)
    ]
    # 9 grids of 13 axes (the run included) and a pool of 65
    assert assert_same(fills) == ["shardinit_grid_normal_32"] * 2
    dims = 16
    wide = Fill(
        "uniform",
        (0.0, 1.0),
        "float64",
        (2,) * dims,
        0,
        tuple(3 * 2**k for k in range(dims)),
        tuple(3**k for k in range(dims)),
    )
    assert_same([wide])


def test_ptx_batches_go_down_in_few_launches() -> None:
    """A shard of many tensors: one launch for 60 pieces of a kernel and more, whatever their order."""
    random = np.random.default_rng(5)
    fills = []
    for k in range(400):
        distribution, params = [("normal", (0.02, 0.0)), ("uniform", (-0.1, 0.1)), ("fill", (1.0,))][k % 3]
        fills.append(
            Fill(
                distribution,
                params,
                ("float32", "bfloat16")[k // 3 % 2],
                (int(random.integers(1, 900)),),
                k,
                tensor_id=k,
            )
        )
    names = assert_same(fills)
    assert len(names) == 11, names
    other_seed = [Fill("normal", (1.0, 0.0), "float32", (50,), seed=seed) for seed in (1, 1, 2, 2, 2, 3)]
    assert len(assert_same(other_seed)) == 3


def test_ptx_empty_pieces_launch_nothing() -> None:
    assert (
        assert_same([Fill("normal", (1.0, 0.0), "float32", (0,)), Fill("normal", (1.0, 0.0), "float32", (3, 0))]) == []
    )


@pytest.mark.parametrize(
    "size", [2**33 + 54321, 2**36 + 54321]
)  # within a change of the block number's high word, and over
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_ptx_runs_of_more_than_2_to_the_32_elements(dtype: str, size: int) -> None:
    """The end of more than this machine could hold, written by the last thread block of the launch."""
    memory = np.full(150_000 * SIZES[dtype], GUARD_BYTE, np.uint8)
    fill = Fill("normal", (1.0, 0.0), dtype, (size,), 2**40 + 3)
    last_of_ptx(fill, module(), 0x7000_0000_0000, memory)
    written = np.flatnonzero(memory != GUARD_BYTE)
    count = (memory.size - written[0]) // SIZES[dtype]
    assert count > 4000
    want = bytes_of_cpu([dataclasses.replace(fill, sizes=(count,), first=fill.first + size - count)])
    np.testing.assert_array_equal(memory[-count * SIZES[dtype] :], want[GUARD : GUARD + count * SIZES[dtype]])


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "float64"])
def test_ptx_boxes_of_more_than_2_to_the_32_elements(dtype: str) -> None:
    rows, length, pitch = 2**20, 2**20, 2**20 + 32
    fill = Fill("uniform", (0.0, 1.0), dtype, (rows, length), 2**40, (pitch, 1), (2**21, 1))
    memory = np.full(5000 * SIZES[dtype], GUARD_BYTE, np.uint8)
    last_of_ptx(fill, module(), 0x7000_0000_0000, memory)
    count = 1024  # 256 threads, a Philox block each
    want = bytes_of_cpu([Fill("uniform", (0.0, 1.0), dtype, (count,), 2**40 + (rows - 1) * 2**21 + length - count)])
    np.testing.assert_array_equal(memory[-count * SIZES[dtype] :], want[GUARD : GUARD + count * SIZES[dtype]])
    assert set(memory[: -count * SIZES[dtype]].tolist()) == {GUARD_BYTE}
