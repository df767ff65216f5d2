"""Pieces for the C++ kernels, from torch tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from . import _native
from .draws import DTYPE_CODES, INTEGER_DTYPES, UNARY_CODES, UnaryCode, lower

_DTYPE_NAMES = {getattr(torch, name): name for name in (*DTYPE_CODES, *INTEGER_DTYPES)}
_CODES = {**DTYPE_CODES, **INTEGER_DTYPES}

NativePiece = tuple[Any, ...]

_CPU = torch.device("cpu")


def dtype_name(dtype: torch.dtype) -> str | None:
    """The stream's name of a dtype that can be filled, else None."""
    return _DTYPE_NAMES.get(dtype)


def end_of_integers(dtype: torch.dtype) -> int:
    """Where random_ without bounds ends: after the last of the integers that a dtype holds one by one, as in torch; for
    fp64 one before, since 2^53 + 1 is no parameter in fp64."""
    if dtype == torch.float64:
        return 1 << 53
    if dtype.is_floating_point:
        return 2 ** round(1 - math.log2(torch.finfo(dtype).eps)) + 1
    return 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1


_HOW_TO_GET_CUDA = (
    "install it again where there is an nvcc (a CUDA toolkit, or pip install nvidia-cuda-nvcc nvidia-cuda-crt "
    "nvidia-cuda-runtime nvidia-cuda-cccl nvidia-nvvm), with SHARDINIT_CUDA=1 so that a missing one is an error"
)


def check_device(what: str, device: torch.device) -> None:
    """Refuses a device whose memory this build can't fill."""
    if device.type == "cpu":
        return
    if device.type != "cuda" or torch.version.hip:
        kind = "a ROCm device" if device.type == "cuda" else device
        raise ValueError(f"{what}: tensor must be on cpu or an NVIDIA GPU, got one on {kind}")
    if _native.CUDA is None:
        raise ValueError(
            f"{what}: tensor must be on cpu, got one on {device}: this torch_shardinit was built without CUDA; "
            + _HOW_TO_GET_CUDA
        )


def check_memory(what: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor whose elements are not all in its storage, or not at multiples of their size.

    Raises:
        ValueError: see above. FSDP frees a flat parameter's storage and keeps its shape, so this does happen.
    """
    numel = tensor.numel()
    if numel == 0:
        return
    size = tensor.element_size()
    if tensor.is_contiguous():
        last = tensor.storage_offset() + numel - 1
    else:
        last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    held = tensor.untyped_storage().nbytes()
    if (last + 1) * size > held:
        raise ValueError(
            f"{what}: tensor must lie in its storage, got one that needs {(last + 1) * size} bytes of {held} "
            "(freed by FSDP, or resize_?)"
        )
    if tensor.data_ptr() % size:
        raise ValueError(f"{what}: tensor must be aligned to its {size}-byte elements (torch.frombuffer?)")


def unary_codes(steps: Sequence[tuple[str, tuple[float, ...]]]) -> tuple[UnaryCode, ...]:
    """Steps (op, args) after a draw, as the kernels number them; clamp is two of theirs."""
    codes: list[UnaryCode] = []
    for op, args in steps:
        if op == "clamp":
            low, high = args
            if low != float("-inf"):
                codes.append((UNARY_CODES["clamp_min"], low))
            if high != float("inf"):
                codes.append((UNARY_CODES["clamp_max"], high))
        else:
            codes.append((UNARY_CODES[op], args[0] if args else 0.0))
    return tuple(codes)


def piece(
    view: torch.Tensor,
    distribution: str,
    params: tuple[float, ...],
    *,
    seed: int,
    tensor_id: int,
    start: int,
    steps: Sequence[int],
    unary: tuple[UnaryCode, ...] = (),
) -> NativePiece:
    """A piece whose element (k0, k1, ...) takes global index start + sum k_d * steps[d].

    ``view`` has passed check_memory, or is a view of a tensor that has. ``params`` have passed check_draw. ``seed`` and
    ``tensor_id`` are in [0, 2^64).
    """
    draw = lower(distribution, params)
    return (
        view.data_ptr(),
        _CODES[_DTYPE_NAMES[view.dtype]],
        tuple(view.shape),
        view.stride(),
        start,
        tuple(steps),
        draw.code,
        draw.params,
        seed,
        tensor_id,
        draw.unary + unary,
    )


def fill(pieces: list[NativePiece], device: torch.device = _CPU) -> None:
    """Fills all pieces, which lie in the memory of one device: on the CPU with torch's number of intra-op threads and
    before it returns; on a GPU in the order of torch's current stream there. The tensors must outlive the call.

    Raises:
        RuntimeError: CUDA refuses; the message says what was launched where.
    """
    if device != _CPU and device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(index):
            _native.fill_cuda(pieces, index, torch.cuda.current_stream(index).cuda_stream)
    else:
        _native.fill(pieces, torch.get_num_threads())
