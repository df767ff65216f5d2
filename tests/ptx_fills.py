"""Fills by the PTX of our kernels beside the same fills by the CPU backend, to the last byte."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from ptx import Memory, Module
from ptx.compile import compile_to_ptx

from torch_shardinit import _native
from torch_shardinit.draws import DTYPE_CODES, INTEGER_DTYPES, lower
from torch_shardinit.native import unary_codes

SOURCE = Path(__file__).resolve().parents[1] / "csrc" / "fill_cuda.cu"
FLAGS = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "-DNDEBUG")  # as in CMakeLists.txt
ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")
SEED, TENSOR_ID = 2**63 + 12345, 0x9E3779B97F4A7C15

SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
SIZES.update({"int32": 4, "int64": 8, "bool": 1, "int8": 1, "int16": 2})
GUARD = 256  # bytes before and after what is filled
GUARD_BYTE = 0xA5
# A 4 GiB boundary lies in the buffer, so that an address computed in 32 bits goes astray.
ADDRESS = (0x7F3 << 32) - 4096


def ptx_text(arch: str = "sm_90") -> str:
    return compile_to_ptx(SOURCE, arch, FLAGS)


@functools.cache
def module(arch: str = "sm_90") -> Module:
    return Module(ptx_text(arch))


@dataclasses.dataclass(frozen=True)
class Fill:
    """One piece: sizes, strides (elements), global index of the first element and index steps.

    skip: elements of the buffer left out before it, which decides how its memory is aligned.
    """

    distribution: str
    params: tuple[float, ...]
    dtype: str
    sizes: tuple[int, ...]
    first: int = 0
    strides: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    unary: tuple[tuple[str, tuple[float, ...]], ...] = ()
    skip: int = 0
    seed: int = SEED
    tensor_id: int = TENSOR_ID

    def extent(self) -> int:
        """Elements from the first to after the last."""
        pairs = zip(self.sizes, self.strides or _row_major(self.sizes), strict=True)
        return 1 + sum((n - 1) * stride for n, stride in pairs) if 0 not in self.sizes else 0

    def num_bytes(self) -> int:
        return (self.skip + self.extent()) * SIZES[self.dtype]

    def native(self, address: int) -> tuple[object, ...]:
        draw = lower(self.distribution, self.params)
        return (
            address + self.skip * SIZES[self.dtype],
            {**DTYPE_CODES, **INTEGER_DTYPES}[self.dtype],
            self.sizes,
            self.strides or _row_major(self.sizes),
            self.first,
            self.steps or _row_major(self.sizes),
            draw.code,
            draw.params,
            self.seed,
            self.tensor_id,
            draw.unary + unary_codes(self.unary),
        )


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for n in reversed(sizes[1:]):
        strides.append(strides[-1] * n)
    return tuple(reversed(strides))


def _offsets(fills: Sequence[Fill]) -> tuple[list[int], int]:
    """Where each fill's memory begins in a buffer, guards between them, and the buffer's size."""
    offsets, end = [], GUARD
    for fill in fills:
        offsets.append(end)
        end += -(-fill.num_bytes() // 64) * 64 + GUARD
    return offsets, end


def _aligned(size: int) -> np.ndarray:
    memory = np.full(size + 64, GUARD_BYTE, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def bytes_of_cpu(fills: Sequence[Fill]) -> np.ndarray:
    """The whole buffer, guards included."""
    offsets, size = _offsets(fills)
    buffer = _aligned(size)
    address = buffer.ctypes.data
    _native.fill([fill.native(address + offset) for fill, offset in zip(fills, offsets, strict=True)], 1)
    return buffer


@dataclasses.dataclass
class PtxResult:
    buffer: np.ndarray
    writes: np.ndarray  # of each byte
    kernels: list[str]


def bytes_of_ptx(
    fills: Sequence[Fill],
    kernels: Module,
    *,
    shape: tuple[int, int] | None = None,
    num_multiprocessors: int = 132,
    rsqrt_ulp: int | np.random.Generator | Callable[[np.ndarray], np.ndarray] = 0,
    max_instructions: int = 10_000_000,
) -> PtxResult:
    """The same by the kernels. shape: thread blocks and threads of each, else what would be launched."""
    offsets, size = _offsets(fills)
    buffer = np.full(size, GUARD_BYTE, np.uint8)
    memory = Memory(count_writes=True)
    memory.map(buffer, ADDRESS)
    pieces = [fill.native(ADDRESS + offset) for fill, offset in zip(fills, offsets, strict=True)]
    names = []
    for name, grid, threads, parameters, _, _ in _native.launches(pieces, num_multiprocessors):
        grid, threads = shape or (grid, threads)
        kernels.launch(name, grid, threads, parameters, memory, rsqrt_ulp, max_instructions)
        names.append(name)
    return PtxResult(buffer, memory.write_counts(ADDRESS), names)


def expected_writes(fills: Sequence[Fill]) -> np.ndarray:
    """1 for each byte of an element, 0 elsewhere."""
    offsets, size = _offsets(fills)
    writes = np.zeros(size, np.uint8)
    for fill, offset in zip(fills, offsets, strict=True):
        if 0 in fill.sizes:
            continue
        item = SIZES[fill.dtype]
        start = offset + fill.skip * item
        grid = np.ndarray(
            (*fill.sizes, item),
            np.uint8,
            writes.data,
            start,
            (*(stride * item for stride in fill.strides or _row_major(fill.sizes)), 1),
        )
        grid[...] += 1
    return writes


def assert_same(fills: Sequence[Fill], kernels: Module | None = None, **options: object) -> list[str]:
    """Every byte equals the CPU's; each byte of an element is written once, no other at all. Returns the kernels."""
    got = bytes_of_ptx(fills, kernels or module(), **options)  # type: ignore[arg-type]
    want = bytes_of_cpu(fills)
    differs = np.flatnonzero(got.buffer != want)
    assert differs.size == 0, (
        f"{differs.size} of {want.size} bytes differ, first at {int(differs[0])}: got {got.buffer[differs[0]]:#x}, "
        f"want {want[differs[0]]:#x}; {got.kernels}"
    )
    np.testing.assert_array_equal(got.writes, expected_writes(fills), "bytes written other than once")
    return got.kernels


def last_of_ptx(fill: Fill, kernels: Module, address: int, memory: np.ndarray, num_blocks: int = 1) -> str:
    """The last thread blocks alone of a fill too large to hold. memory: its end. Returns the kernel."""
    size = fill.num_bytes()
    mapped = Memory()
    mapped.map(memory, address + size - memory.size)
    ((name, grid, threads, parameters, _, _),) = _native.launches([fill.native(address)], 132)
    kernels.launch(name, grid, threads, parameters, mapped, blocks=range(grid - num_blocks, grid))
    return name
