"""Digests of tensors (docs/stream.md, section 10): sums over what this process holds, and the hashes over them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from . import _native, region
from .native import check_memory

Sum = int  # 128 bits: four u32, u4's lowest
Part = tuple[torch.Tensor, "int | tuple[int, ...]"]  # a local view and its place, as locate gives them

_MASK32 = (1 << 32) - 1
# Elements that are copied to the CPU at a time, from devices that no kernel of ours reads.
_CHUNK = 1 << 24


def add_sums(sums: Iterable[Sum]) -> Sum:
    """The sum of the union of disjoint sets of elements."""
    lanes = [0, 0, 0, 0]
    for one in sums:
        for k in range(4):
            lanes[k] += one >> (32 * k)
    return sum((lane & _MASK32) << (32 * k) for k, lane in enumerate(lanes))


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_digest(dtype: str, shape: Sequence[int], total: Sum) -> str:
    """The digest of a whole tensor, 32 hex digits."""
    text = f"torch_shardinit digest 1\0{dtype}\0{','.join(map(str, shape))}\0".encode()
    return hashlib.sha256(text + total.to_bytes(16, "little")).hexdigest()[:32]


def combined_digest(tensors: Mapping[str, str]) -> str:
    """The digest of named tensors, 32 hex digits, from theirs."""
    state = hashlib.sha256(b"torch_shardinit digest 1 of tensors\0")
    for name in sorted(tensors):
        raw = name.encode("utf-8")
        state.update(len(raw).to_bytes(8, "little") + raw + bytes.fromhex(tensors[name]))
    return state.hexdigest()[:32]


def _native_piece(view: torch.Tensor, offset: int | tuple[int, ...], shape: Sequence[int]) -> tuple[Any, ...]:
    if isinstance(offset, int):
        first, steps = offset, region.row_major_strides(view.shape)
    else:
        strides = region.row_major_strides(shape)
        first = sum(start * stride for start, stride in zip(offset, strides, strict=True))
        # A dimension of one element takes no step; its own may be 2^63, which no int64 holds.
        steps = tuple(1 if n <= 1 else stride for n, stride in zip(view.shape, strides, strict=True))
    return view.data_ptr(), view.element_size(), tuple(view.shape), view.stride(), first, steps


def _chunks(view: torch.Tensor, offset: int | tuple[int, ...]) -> Iterator[Part]:
    """The part in bounded ones."""
    for start in range(0, view.numel(), _CHUNK):
        length = min(_CHUNK, view.numel() - start)
        for box in region.boxes_of_run(tuple(view.shape), start, length):
            if isinstance(offset, int):
                # A run's view is one-dimensional.
                yield view[region.slices(box)], offset + (box[0].start if box else 0)
            else:
                yield view[region.slices(box)], tuple(o + s.start for o, s in zip(offset, box, strict=True))


def _as_memory(view: torch.Tensor) -> torch.Tensor:
    view = view.detach()
    if view.is_conj() or view.is_neg():  # lazily: the bits in memory are not the values'
        view = view.resolve_conj().resolve_neg()
    return view


def _check_storage(view: torch.Tensor) -> None:
    """As check_memory, but for alignment: the CPU's kernels read any address, and safetensors files load at such."""
    last = view.storage_offset() + sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
    needed, held = (last + 1) * view.element_size(), view.untyped_storage().nbytes()
    if needed > held:
        raise ValueError(
            f"fingerprint: tensor must lie in its storage, got one that needs {needed} bytes of {held} (freed by FSDP, "
            "or resize_?)"
        )


def digest_parts(parts: Sequence[tuple[torch.Tensor, int | tuple[int, ...], Sequence[int]]]) -> list[Sum]:
    """The sum of each (local view, offset, global shape), in one call of the kernels for each device.

    Nothing is copied, but from devices that have no kernel: those are read through the CPU in bounded chunks.

    Raises:
        ValueError: a tensor has no memory (is on meta, or was freed).
    """
    sums: list[Sum] = [0] * len(parts)
    native: dict[torch.device, list[tuple[int, tuple[Any, ...]]]] = {}
    alive = []  # what _as_memory made
    for number, (tensor, offset, shape) in enumerate(parts):
        if tensor.numel() == 0:
            continue
        if tensor.is_meta:
            raise ValueError("fingerprint: a tensor must have memory, got one on meta")
        view = _as_memory(tensor)
        alive.append(view)
        if view.device.type == "cpu" or (view.is_cuda and _native.CUDA is not None and not torch.version.hip):
            if view.is_cuda:
                check_memory("fingerprint", view)
            else:
                _check_storage(view)
            native.setdefault(view.device, []).append((number, _native_piece(view, offset, shape)))
        else:
            for chunk, at in _chunks(view, offset):
                (one,) = digest_parts([(chunk.cpu(), at, shape)])
                sums[number] = add_sums((sums[number], one))
    for device, numbered in native.items():
        pieces = [piece for _, piece in numbered]
        found = _on_cuda(pieces, device) if device.type == "cuda" else _native.digest(pieces, torch.get_num_threads())
        for (number, _), raw in zip(numbered, found, strict=True):
            sums[number] = int.from_bytes(raw, "little")
    return sums


def sums_of_slots(slots: np.ndarray, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """What each piece adds up to; slots: uint32, (slots, 4)."""
    running = np.zeros((len(slots) + 1, 4), np.uint32)
    np.cumsum(slots, axis=0, dtype=np.uint32, out=running[1:])
    return [(running[end] - running[begin]).astype("<u4").tobytes() for begin, end in ranges]


def _on_cuda(pieces: list[tuple[Any, ...]], device: torch.device) -> list[bytes]:
    """By the kernels, on torch's current stream; some MiB of slots at most, of which each thread writes one."""
    index = torch.cuda.current_device() if device.index is None else device.index
    processors = torch.cuda.get_device_properties(index).multi_processor_count
    (num_slots, ranges), _ = _native.digest_launches(pieces, processors, 0)
    with torch.cuda.device(index):
        slots = torch.empty((num_slots, 4), dtype=torch.int32, device=device)
        stream = torch.cuda.current_stream(index).cuda_stream
        _native.digest_cuda(pieces, index, stream, processors, slots.data_ptr())
        return sums_of_slots(slots.cpu().numpy().view(np.uint32), ranges)


def whole(shape: Sequence[int]) -> tuple[int, int]:
    """(elements, sum of their global indices modulo 2^64) of a whole tensor."""
    numel = math.prod(shape)
    return numel, numel * (numel - 1) // 2 % 2**64


def extent(box: region.Box, shape: Sequence[int]) -> tuple[int, int]:
    """The same of a box."""
    numel = region.numel(box)
    first, steps = region.grid_of_box(box, shape)
    moment = numel * first
    for s, step in zip(box, steps, strict=True):
        if s.size:
            moment += step * (s.size * (s.size - 1) // 2) * (numel // s.size)
    return numel, moment % 2**64
