"""Random operations that the kernels lack, on a whole tensor or a view of it, from the stream's numbers for the
elements' indices. docs/stream.md, section 9, is their definition."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from . import _native, native
from . import region as rg
from .draws import check_draw
from .program import PlayedDraw, Ref


def draw_composite_(
    op: PlayedDraw, view: torch.Tensor, num_bytes: Sequence[int], seed: int, tensor_id: int, num_threads: int
) -> None:
    """Runs `op` in place on `view`, the CPU tensor of op.view. The values are the same for any number of threads."""
    if not view.numel():
        return
    if op.op == "orthogonal_":
        normals = _numbers(op, torch.float64, ("normal", (1.0, 0.0)), num_bytes, seed, tensor_id)
        view.copy_(orthogonal(normals, op.args[0], num_threads, narrow=view.dtype != torch.float64))
    elif op.op == "geometric" and not view.dtype.is_floating_point:
        numbers = _numbers(op, torch.float64, ("geometric", op.args), num_bytes, seed, tensor_id)
        largest = float(torch.iinfo(view.dtype).max)
        view.copy_(numbers.clamp(max=largest if largest < 2.0**62 else math.nextafter(largest, 0.0)))
    elif op.op in ("bernoulli", "random", "geometric"):
        view.copy_(_numbers(op, view.dtype, (op.op, op.args), num_bytes, seed, tensor_id))
    elif op.op == "permutation":
        words = _numbers(op, torch.int64, ("random_bits", ()), num_bytes, seed, tensor_id)
        view.copy_(_rounded(_as_unsigned(words).argsort(stable=True), view.dtype))
    else:
        sparsity, std = op.args
        view.copy_(_numbers(op, view.dtype, ("normal", (std, 0.0)), num_bytes, seed, tensor_id))
        words = _numbers(op, torch.int64, ("random_bits", ()), num_bytes, seed, tensor_id)
        num_zeros = math.ceil(sparsity * view.shape[0])
        # As unsigned; equal words, which a stable sort leaves in order, fall to the lesser row.
        order = _as_unsigned(words).argsort(dim=0, stable=True)
        view.scatter_(0, order[:num_zeros], 0.0)


def _as_unsigned(words: torch.Tensor) -> torch.Tensor:
    """int64 whose order is that of the words as unsigned integers."""
    return words ^ torch.iinfo(torch.int64).min


def _rounded(integers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Narrow floating-point types round from fp32."""
    return integers.float() if dtype.is_floating_point and dtype != torch.float64 else integers


def _numbers(
    op: PlayedDraw,
    dtype: torch.dtype,
    draw: tuple[str, tuple[float, ...]],
    num_bytes: Sequence[int],
    seed: int,
    tensor_id: int,
) -> torch.Tensor:
    """The stream's numbers for the elements of op.view, by their indices in the owner."""
    size = num_bytes[op.owner.storage] // op.owner.dtype.itemsize
    memory = torch.empty(size, dtype=dtype)  # laid out as the owner's storage, so that the view means the same elements

    def laid_out(ref: Ref) -> torch.Tensor:
        return memory.as_strided(ref.sizes, ref.strides, ref.offset)

    box = rg.full_box(op.owner.sizes) if op.region is None else op.region
    start, steps = rg.grid_of_box(box, op.owner.sizes)
    name = native.dtype_name(dtype)
    assert name is not None
    kind, params = draw
    params = check_draw(kind, params, name, op.op) if kind != "random_bits" else ()
    part = laid_out(op.owner.sub_view(box))
    native.fill([native.piece(part, kind, params, seed=seed, tensor_id=tensor_id, start=start, steps=steps)])
    return laid_out(op.view)


def orthogonal(normals: torch.Tensor, gain: float, num_threads: int, *, narrow: bool) -> torch.Tensor:
    """What orthogonal_ makes of an fp64 tensor of standard normal numbers: as a matrix (first dimension, all others) it
    gets (semi-)orthogonal rows or columns, times gain. narrow: rounded to fp32, from which narrower types round. It may
    overwrite `normals`."""
    num_rows = normals.shape[0]
    matrix = normals.reshape(num_rows, -1)
    wide = matrix.shape[1] > num_rows
    tall = (matrix.t() if wide else matrix).contiguous()
    _native.orthonormalise(tall.data_ptr(), tall.shape[0], tall.shape[1], num_threads)
    tall.mul_(gain)
    if narrow:
        tall = tall.float()
    return (tall.t() if wide else tall).reshape(normals.shape)
