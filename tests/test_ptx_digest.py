"""The PTX that nvcc emits for our digest kernels: only instructions of one meaning, and the CPU backend's sums."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
from ptx import Memory, Module
from ptx.audit import inspect
from ptx.compile import compile_to_ptx, needs_nvcc
from ptx_fills import ADDRESS, ARCHITECTURES, FLAGS, SOURCE

from torch_shardinit import _native
from torch_shardinit.digest import sums_of_slots

pytestmark = needs_nvcc

KERNELS = {"shardinit_digest_run", "shardinit_digest_grid"}
SLOTS = 0x5A0 << 32
EDGES = (0, 1, 3, 2**32 - 301, 2**32, 2**62 - 7)


def ptx_text(arch: str) -> str:
    return compile_to_ptx(SOURCE.parent / "digest_cuda.cu", arch, FLAGS)


@functools.cache
def module(arch: str = "sm_90") -> Module:
    return Module(ptx_text(arch))


# (first byte in the buffer, bytes of an element, sizes, strides, first index, steps)
Piece = tuple[int, int, tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]


def sums_of_ptx(
    buffer: np.ndarray, pieces: Sequence[Piece], arch: str, shape: tuple[int, int] | None, processors: int
) -> tuple[list[bytes], list[str]]:
    memory = Memory(count_writes=True)
    memory.map(buffer, ADDRESS, writable=False)
    native = [(ADDRESS + at, *rest) for at, *rest in pieces]
    (num_slots, ranges), launches = _native.digest_launches(native, processors, SLOTS)
    slots = np.full(num_slots * 16, 0xA5, np.uint8)
    if num_slots:
        memory.map(slots, SLOTS)
    for name, grid, threads, parameters in launches:
        grid, threads = shape or (grid, threads)
        module(arch).launch(name, grid, threads, parameters, memory)
    if num_slots:
        assert (memory.write_counts(SLOTS) == 1).all(), "each slot must be written once"
    return sums_of_slots(slots.view(np.uint32).reshape(-1, 4), ranges), [launch[0] for launch in launches]


def assert_same(
    pieces: Sequence[Piece], arch: str = "sm_90", shape: tuple[int, int] | None = None, processors: int = 132
) -> list[str]:
    """Equal sums, and no access outside the bytes of the elements' blocks. Returns the kernels."""
    ends = [
        at + size * (1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)))
        for at, size, sizes, strides, _, _ in pieces
        if 0 not in sizes
    ]
    # The buffer ends where the last element does: a load beyond it faults.
    buffer = np.random.default_rng(1).integers(0, 256, max(ends, default=16), np.uint8)
    got, kernels = sums_of_ptx(buffer, pieces, arch, shape, processors)
    want = _native.digest([(buffer.ctypes.data + at, *rest) for at, *rest in pieces], 1)
    differs = [piece for piece, one, other in zip(pieces, got, want, strict=True) if one != other]
    assert not differs, (len(differs), differs[0])
    return kernels


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_ptx_uses_only_instructions_of_one_meaning(arch: str) -> None:
    result = inspect(ptx_text(arch))
    assert result.violations == []
    assert set(result.opcodes) == KERNELS
    for kernel in KERNELS:
        counts = result.opcodes[kernel]
        assert not [opcode for opcode in counts if ".f32" in opcode or ".f64" in opcode or "atom" in opcode], kernel
        assert sum(n for opcode, n in counts.items() if opcode.startswith("st.")) == 1, "a slot, and nothing else"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_ptx_runs(size: int, arch: str) -> None:
    pieces: list[Piece] = []
    for k, first in enumerate(EDGES):
        for n in (1, 2, 3, 15, 16, 17, 31, 64, 777):
            pieces.append((16 * 61 * len(pieces) + size * (k % 5), size, (n,), (1,), first, (1,)))
    assert set(assert_same(pieces, arch)) == {"shardinit_digest_run"}


@pytest.mark.parametrize("shape", [(1, 32), (1, 256), (7, 96), (132, 256)])
def test_ptx_shapes_of_the_launch(shape: tuple[int, int]) -> None:
    """Sums depend on no grid or block size, nor on how many elements a thread gets."""
    for processors in (1, 132):
        pieces: list[Piece] = [
            (0, 4, (100_003,), (1,), 2**32 - 50_000, (1,)),
            (400_016, 2, (70_001,), (1,), 5, (1,)),
            (540_032, 1, (33_333,), (1,), 0, (1,)),
            (573_440, 4, (40, 100), (128, 1), 7, (1000, 1)),
        ]
        assert_same(pieces, shape=shape, processors=processors)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_ptx_boxes(size: int) -> None:
    random = np.random.default_rng(size)
    pieces: list[Piece] = []
    at = 0
    for _ in range(80):
        dims = int(random.integers(1, 6))
        sizes = tuple(int(n) for n in random.integers(1, (200, 20, 9, 5, 4)[dims - 1], dims))
        order = random.permutation(dims)
        strides, stride = [0] * dims, int(random.integers(1, 3))
        for axis in order:
            strides[axis] = stride
            stride *= sizes[axis] + int(random.integers(0, 2))
        steps = tuple(int(s) for s in random.choice([1, 3, 1000, 2**20 + 1, 2**31, 2**33], dims))
        pieces.append((at, size, sizes, tuple(strides), int(random.choice(EDGES)), steps))
        at += (stride + 1) * size + 16
        at -= at % size
    assert "shardinit_digest_grid" in assert_same(pieces)


def test_ptx_many_pieces_and_none() -> None:
    pieces: list[Piece] = [(16 * k, 4, (3,), (1,), k, (1,)) for k in range(300)]
    kernels = assert_same(pieces)
    assert kernels == ["shardinit_digest_run"] * -(-300 // 84), kernels
    assert assert_same([(0, 4, (0,), (1,), 0, (1,)), (0, 4, (3, 0), (1, 1), 0, (1, 1))]) == []
    wide: list[Piece] = [
        (k * 40_000, 2, (2,) * 12, tuple(3 * 2**d for d in range(12)), k, tuple(3**d for d in range(12)))
        for k in range(11)
    ]
    assert assert_same(wide) == ["shardinit_digest_grid"] * 3  # 12 axes each, of a pool of 64


def test_ptx_a_changed_element_changes_the_sum() -> None:
    buffer = np.random.default_rng(2).integers(0, 256, 4096, np.uint8)
    piece: Piece = (0, 4, (1024,), (1,), 9, (1,))
    (before,), _ = sums_of_ptx(buffer, [piece], "sm_90", None, 132)
    buffer[2049] ^= 4
    (after,), _ = sums_of_ptx(buffer, [piece], "sm_90", None, 132)
    assert before != after
