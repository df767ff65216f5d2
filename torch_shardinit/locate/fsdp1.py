"""FullyShardedDataParallel (FSDP1): runs of each parameter in the local shard of a flat parameter.

A unit flattens its parameters into one FlatParameter, each in the order of its memory, with alignment padding between
them (use_orig_params=True) and padding at the end; rank r of the sharding group keeps elements r * n .. (r + 1) * n of
it, all of it where the strategy does not shard. Nothing here needs a forward, a collective or the unsharded tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from .. import region
from .names import is_a


@dataclass(frozen=True)
class FlatEntry:
    """One parameter of a flat parameter: its length and place are in elements of the unsharded flat parameter."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    owners: tuple[tuple[nn.Module, str], ...]  # every (module, attribute) of the unit that is this parameter
    original: torch.Tensor | None  # the registered parameter, with use_orig_params=True


@dataclass(frozen=True)
class Run:
    """Part of a parameter in a local shard: local elements at .. at + length - 1. With `sizes` they are, row-major in
    the dimensions `memory_order`, the box of these sizes at `offset`; else the run of global elements from `offset`."""

    at: int
    length: int
    offset: int | tuple[int, ...]
    sizes: tuple[int, ...] | None = None
    memory_order: tuple[int, ...] = ()


# --- integers ----------------------------------------------------------------------------------------------------


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The dimensions from the outermost in memory to the innermost, or None where the tensor is not dense."""
    order = tuple(sorted(range(len(shape)), key=lambda dim: (shape[dim] > 1, -strides[dim], dim)))
    expected = region.row_major_strides([shape[dim] for dim in order])
    dense = all(strides[dim] == stride for dim, stride in zip(order, expected, strict=True) if shape[dim] > 1)
    return order if dense else None


def runs_of_entry(
    start: int, shape: Sequence[int], order: Sequence[int], shard_start: int, shard_length: int
) -> list[Run]:
    """Which elements of a parameter that starts at `start` of the flat parameter, with memory order `order`, are in
    the shard; one Run of no elements where none are."""
    numel = region.numel(region.full_box(shape))
    low, high = max(start, shard_start), min(start + numel, shard_start + shard_length)
    if low >= high:
        return [Run(0, 0, 0)]
    if tuple(dim for dim in order if shape[dim] > 1) == tuple(dim for dim in range(len(shape)) if shape[dim] > 1):
        return [Run(low - shard_start, high - low, low - start)]
    runs, at = [], low - shard_start
    stored_shape = [shape[dim] for dim in order]
    for box in region.boxes_of_run(stored_shape, low - start, high - low):
        offset = [0] * len(shape)
        for dim, s in zip(order, box, strict=True):
            offset[dim] = s.start
        length = region.numel(box)
        runs.append(Run(at, length, tuple(offset), tuple(s.size for s in box), tuple(order)))
        at += length
    return runs


# --- the shell ---------------------------------------------------------------------------------------------------


def handle_of(module: nn.Module) -> Any | None:
    """The flat parameter handle of an FSDP1 unit that manages parameters, else None."""
    return getattr(module, "_handle", None) if is_a(module, "torch", "FullyShardedDataParallel") else None


def check_sharded(handle: Any, name: str) -> None:
    """A fill of the local shard is lost while the unit is unsharded: what computes is another tensor."""
    flat = handle.flat_param
    # These attributes exist from the first forward on; before it, the flat parameter is the local shard.
    unsharded = [getattr(flat, key, None) for key in ("_full_param_padded", "_full_prec_full_param_padded")]
    shard = getattr(flat, "_local_shard", None)
    moved = shard is not None and shard.untyped_storage()._cdata != flat.untyped_storage()._cdata
    if moved or any(full is not None and full.untyped_storage().size() > 0 for full in unsharded):
        raise ValueError(
            f"{name}: the flat parameter must be its own local shard, got one that is unsharded (inside "
            "summon_full_params, or between a forward and the end of its backward) or moved after its first forward"
        )


def local_shard(handle: Any, name: str) -> tuple[torch.Tensor, int]:
    """(the local flat shard as a detached 1-D view, the flat parameter's element that it starts at)."""
    check_sharded(handle, name)
    flat = handle.flat_param
    local = flat.detach()
    length = flat._sharded_size.numel()
    start = handle.rank * length if handle.uses_sharded_strategy else 0
    if local.dim() != 1 or local.numel() != length or not local.is_contiguous():
        raise ValueError(
            f"{name}: the local flat shard must be 1-D and contiguous with {length} elements, got shape "
            f"{tuple(local.shape)} and strides {local.stride()} on rank {handle.rank} of {handle.world_size}"
        )
    return local, start


def entries(handle: Any, name: str) -> Iterator[FlatEntry]:
    """The parameters of a flat parameter, in its order."""
    flat = handle.flat_param
    shared: dict[tuple[int, str], list[tuple[nn.Module, str]]] = {}
    for info in flat._shared_param_infos:
        shared.setdefault((id(info.prim_module), info.prim_param_name), []).append((info.module, info.param_name))
    extensions = flat._param_extensions or [None] * len(flat._fqns)
    start, index = 0, 0
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            info, shape, strides = flat._param_infos[index], tuple(flat._shapes[index]), tuple(flat._strides[index])
            fqn = f"{name}: {flat._fqns[index]}"
            if extensions[index] is not None:
                raise ValueError(
                    f"{fqn}: FSDP1 over tensor parallelism is not supported yet, got a parameter with "
                    f"_param_extensions; use fully_shard (FSDP2) over tensor parallelism"
                )
            if region.numel(region.full_box(shape)) != numel or memory_order(shape, strides) is None:
                raise ValueError(
                    f"{fqn}: a parameter in a flat parameter must be dense, got shape {shape} with strides {strides} "
                    f"in {numel} elements; FSDP1 reads others wrongly (make it contiguous before wrapping)"
                )
            owners = ((info.module, info.param_name), *shared.get((id(info.module), info.param_name), ()))
            original = None if flat._params is None else flat._params[index]
            yield FlatEntry(start, shape, strides, owners, original)
            index += 1
        start += numel


def view_of_run(local: torch.Tensor, run: Run) -> torch.Tensor:
    """The memory of a run, in the parameter's own dimensions where it is a box."""
    part = local[run.at : run.at + run.length]
    if run.sizes is None:
        return part
    inverse = [0] * len(run.memory_order)
    for position, dim in enumerate(run.memory_order):
        inverse[dim] = position
    return part.view(run.sizes).permute(inverse)


def padding_runs(held: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """(at, length) of what no (at, length) of `held`, disjoint and in order, takes of `length` local elements."""
    gaps, at = [], 0
    for start, size in [*held, (length, 0)]:
        if start < at:
            raise ValueError(f"the runs of a flat shard must be disjoint and in order, got {list(held)}")
        if start > at:
            gaps.append((at, start - at))
        at = start + size
    return gaps


def parts_of_handle(
    handle: Any, name: str
) -> tuple[list[tuple[FlatEntry, list[tuple[torch.Tensor, int | tuple[int, ...]]]]], list[torch.Tensor]]:
    """For each parameter of a unit its (local view, offset) parts, at least one; and the padding's views."""
    local, shard_start = local_shard(handle, name)
    found, held = [], []
    for entry in entries(handle, name):
        order = memory_order(entry.shape, entry.strides)
        assert order is not None  # entries() has refused it
        runs = runs_of_entry(entry.start, entry.shape, order, shard_start, local.numel())
        held += [(run.at, run.length) for run in runs if run.length]
        found.append((entry, [(view_of_run(local, run), run.offset) for run in runs]))
    padding = [local[at : at + length] for at, length in padding_runs(held, local.numel())]
    return found, padding
