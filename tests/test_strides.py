"""Strides, boxes and memory: a view's elements have the values of their global indices, nothing else is touched."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from conftest import TORCH_DTYPES, assert_bitwise_equal, patterns

import torch_shardinit as shardinit


def whole(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The unsharded tensor; that it equals the reference is test_fills.py's subject."""
    return shardinit.normal_(torch.empty(shape, dtype=dtype), 0.5, seed=4, tensor_id="w")


def fill(view: torch.Tensor | np.ndarray, **where: object) -> None:
    shardinit.normal_(view, 0.5, seed=4, tensor_id="w", **where)


VIEWS = {
    "contiguous": lambda t: t[2:5, 1:4, 3:9],
    "transposed": lambda t: t.permute(2, 0, 1)[1:7, 2:4, 1:4],
    "strided": lambda t: t[::2, 1::2, ::3],
    "inner column": lambda t: t[:, :, 4],
    "outer slice": lambda t: t[3],
    "one element": lambda t: t[1, 2, 3],
    "unit sizes": lambda t: t[1:2, :, 3:4],
    "reshaped": lambda t: t.view(6, -1)[:, 5:31],
    "channels last": lambda t: t[:, None].permute(0, 2, 3, 1),
}


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("name", VIEWS)
def test_only_the_view_is_written(isa: str, name: str, dtype: str) -> None:
    memory = torch.zeros(6 * 5 * 11 + 7, dtype=TORCH_DTYPES[dtype])
    base = memory[3:-4].view(6, 5, 11)  # an odd storage offset: nothing may rely on alignment
    view = VIEWS[name](base)
    marker = torch.full_like(memory, 7.0)
    memory.copy_(marker)
    fill(view)
    assert_bitwise_equal(patterns(view), patterns(whole(tuple(view.shape), TORCH_DTYPES[dtype])), name)
    view.copy_(torch.full(view.shape, 7.0).to(TORCH_DTYPES[dtype]))
    assert_bitwise_equal(patterns(memory), patterns(marker), f"{name}: outside the view")


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_long_strided_rows(isa: str, dtype: str) -> None:
    """Longer than what passes through the cache at a time, so that the position in memory is carried on."""
    memory = torch.zeros(3 * 5003 + 4, dtype=TORCH_DTYPES[dtype])
    view = memory[2:-2:3]
    fill(view)
    want = torch.zeros_like(memory)
    want[2:-2:3] = whole(tuple(view.shape), TORCH_DTYPES[dtype])
    assert_bitwise_equal(patterns(memory), patterns(want), dtype)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_long_strided_rows_of_bits(isa: str, dtype: str) -> None:
    memory = torch.zeros(5003, 2, dtype=getattr(torch, dtype))
    shardinit.random_bits_(memory[:, 1], seed=4, tensor_id="w")
    assert torch.equal(memory[:, 1], shardinit.random_bits_(torch.empty_like(memory[:, 0]), seed=4, tensor_id="w"))
    assert not memory[:, 0].any()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float8_e5m2"])
def test_misaligned_starts(isa: str, dtype: str) -> None:
    for begin, count in itertools.product(range(8), (1, 5, 63, 64, 65, 257)):
        memory = torch.full((begin + count + 64,), 7.0).to(TORCH_DTYPES[dtype])
        fill(memory[begin : begin + count], offset=begin)
        want = torch.full((begin + count + 64,), 7.0).to(TORCH_DTYPES[dtype])
        want[begin : begin + count] = whole((begin + count,), TORCH_DTYPES[dtype])[begin:]
        assert_bitwise_equal(patterns(memory), patterns(want), f"begin {begin} count {count}")


def test_boxes_equal_the_slice() -> None:
    shape = (5, 7, 6)
    full = whole(shape)
    count = 0
    for corner in itertools.product((0, 2), (0, 3, 6), (0, 1, 5)):
        for size in itertools.product((1, 3), (1, 4), (1, 5)):
            if any(c + s > n for c, s, n in zip(corner, size, shape, strict=True)):
                continue
            local = torch.empty(size)
            fill(local, offset=corner, global_shape=shape)
            want = full[tuple(slice(c, c + s) for c, s in zip(corner, size, strict=True))]
            assert_bitwise_equal(patterns(local), patterns(want), f"box at {corner}, {size}")
            count += 1
    assert count > 30


def test_box_into_a_transposed_view() -> None:
    full = whole((9, 8))
    local = torch.empty(4, 5).t()
    fill(local, offset=(3, 2), global_shape=(9, 8))
    assert torch.equal(local, full[3:8, 2:6])


def test_large_boxes_are_shared_among_threads() -> None:
    full = whole((1024, 600))
    local = torch.empty(1024, 151)
    fill(local, offset=(0, 300), global_shape=(1024, 600))
    assert torch.equal(local, full[:, 300:451])
    column = torch.empty(1024, 1)
    fill(column, offset=(0, 599), global_shape=(1024, 600))
    assert torch.equal(column, full[:, 599:])


def test_flat_runs_equal_the_slice_for_every_world() -> None:
    full = whole((7, 9)).flatten()
    for world in range(1, 9):
        size = -(-63 // world)
        for rank in range(world):
            begin, end = min(rank * size, 63), min((rank + 1) * size, 63)
            shard = torch.empty(end - begin)
            fill(shard, offset=begin)
            assert torch.equal(shard, full[begin:end])


def test_huge_global_shapes() -> None:
    """Indices need 64 bits: a box of a tensor of 2^62 elements equals the flat run there."""
    shape = (2**20, 2**22, 2**20)
    corner = (2**20 - 1, 2**22 - 2, 2**20 - 6)
    local = torch.empty(1, 2, 5)
    fill(local, offset=corner, global_shape=shape)
    for row in range(2):
        start = ((corner[0] * shape[1]) + corner[1] + row) * shape[2] + corner[2]
        run = torch.empty(5)
        fill(run, offset=start)
        assert torch.equal(local[0, row], run)


def test_a_dimension_of_one_takes_no_step() -> None:
    """Its row-major stride may be 2^63, which no int64 holds."""
    want = whole((9,))[4:7]
    local, array = torch.empty(1, 3), np.empty((1, 3), np.float32)
    fill(local, offset=(0, 4), global_shape=(1, 2**63))
    fill(array, offset=(0, 4), global_shape=(1, 2**63))
    assert torch.equal(local[0], want) and torch.equal(torch.from_numpy(array[0]), want)


def test_dims_beyond_the_usual() -> None:
    shape = (1,) * 30 + (2,) * 4 + (3,)
    assert torch.equal(whole(shape).flatten(), whole((48,)))
    assert torch.equal(whole((2,) * 12), whole((4096,)).view((2,) * 12))
    scalar = torch.empty(())
    fill(scalar, offset=5)
    assert scalar == whole((6,))[5]
    empty = torch.empty(0, 3)
    fill(empty, offset=(2, 0), global_shape=(2, 3))
    assert empty.numel() == 0


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_numpy_arrays_of_any_strides(isa: str, dtype: type) -> None:
    memory = np.full((12, 10), 7.0, dtype)
    view = memory[9:1:-2, 8:2:-1].T
    want = whole(view.shape, getattr(torch, np.dtype(dtype).name)).numpy()
    assert shardinit.normal_(view, 0.5, seed=4, tensor_id="w") is view
    np.testing.assert_array_equal(view, want)
    view[...] = 7.0
    assert (memory == 7.0).all()


def test_fill_allocates_nothing() -> None:
    """The peak of resident memory while a touched 256 MiB buffer is filled stays within 2 MiB of where it was."""
    buffer = torch.zeros(2**26)
    transposed = buffer[: 2**24].view(4096, 4096).t()

    def peak_growth(action: object) -> int:
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")  # resets the peak to the present size

        def peak() -> int:
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

        before = peak()
        action()  # type: ignore[operator]
        return peak() - before

    fill(buffer[:1000])
    assert peak_growth(lambda: fill(buffer)) < 2048
    assert peak_growth(lambda: fill(transposed)) < 2048
    # Large enough that the allocator takes it from the system, not from what earlier tests gave back.
    assert peak_growth(lambda: torch.ones(2**25)) > 100_000, "the measurement itself must see an allocation"
