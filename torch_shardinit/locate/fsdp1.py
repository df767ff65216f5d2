"""FullyShardedDataParallel (FSDP1): runs of each parameter in the local shard of a flat parameter.

A unit flattens its parameters into one FlatParameter, each in the order of its memory, with alignment padding between
them (use_orig_params=True) and padding at the end; rank r of the sharding group keeps elements r * n .. (r + 1) * n of
it, all of it where the strategy does not shard. Nothing here needs a forward, a collective or the unsharded tensor.

Over tensor parallelism the flat parameter holds the local tensors of DTensors, with their specs as extensions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from .. import region
from ..targets import is_flat_parameter
from .dtensor import dtensor_box, is_dtensor, is_dtensor_spec
from .names import is_a
from .private import check_private, package_version, private


@dataclass(frozen=True)
class FlatEntry:
    """One parameter of a flat parameter, from element `start` of the unsharded flat parameter on. `shape` and
    `memory_order` are of what was flattened: the whole parameter, or under tensor parallelism the box of it at
    `corner`."""

    start: int
    shape: tuple[int, ...]
    memory_order: tuple[int, ...]
    global_shape: tuple[int, ...]
    corner: tuple[int, ...] | None  # None: it is the whole
    owners: tuple[tuple[nn.Module, str], ...]  # every (module, attribute) of the unit that is this parameter
    original: torch.Tensor | None  # the Parameter that was flattened, with use_orig_params=True

    @property
    def numel(self) -> int:
        return region.numel(region.full_box(self.shape))

    def shown(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """What the modules register for this parameter, with use_orig_params=True: the original Parameter, with the
        shard's memory; or, under NO_SHARD over tensor parallelism, a DTensor of that memory."""
        registered = [module._parameters.get(attribute) for module, attribute in self.owners]
        return [
            one for one in registered if one is not None and (one is self.original or _memory(one) == _memory(flat))
        ]


def _memory(tensor: torch.Tensor) -> int:
    local = private(tensor, "_local_tensor") if is_dtensor(tensor) else tensor
    return local.untyped_storage()._cdata


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


def is_row_major(shape: Sequence[int], order: Sequence[int]) -> bool:
    """Whether a memory order is that of a contiguous tensor: dimensions of one element may be anywhere."""
    return [dim for dim in order if shape[dim] > 1] == [dim for dim in range(len(shape)) if shape[dim] > 1]


def runs_of_entry(
    start: int,
    shape: Sequence[int],
    order: Sequence[int],
    shard_start: int,
    shard_length: int,
    corner: Sequence[int] | None = None,
) -> list[Run]:
    """Which elements of a parameter that starts at `start` of the flat parameter, with memory order `order`, are in
    the shard; one Run of no elements where none are. With `corner` what is flattened is the box there of the whole."""
    numel = region.numel(region.full_box(shape))
    low, high = max(start, shard_start), min(start + numel, shard_start + shard_length)
    if low >= high:
        return [Run(0, 0, 0)]
    if is_row_major(shape, order) and corner is None:
        return [Run(low - shard_start, high - low, low - start)]
    runs, at = [], low - shard_start
    stored_shape = [shape[dim] for dim in order]
    for box in region.boxes_of_run(stored_shape, low - start, high - low):
        offset = [0] * len(shape) if corner is None else list(corner)
        for dim, s in zip(order, box, strict=True):
            offset[dim] += s.start
        length = region.numel(box)
        runs.append(Run(at, length, tuple(offset), tuple(s.size for s in box), tuple(order)))
        at += length
    return runs


# --- the shell ---------------------------------------------------------------------------------------------------


def handle_of(module: nn.Module) -> Any | None:
    """The flat parameter handle of an FSDP1 unit that manages parameters, else None."""
    return private(module, "_handle") if is_a(module, "torch", "FullyShardedDataParallel") else None


def flat_parameter_of(handle: Any) -> torch.Tensor:
    flat = private(handle, "flat_param")
    check_private(is_flat_parameter(flat), "flat_param of an FSDP unit must be a FlatParameter", type(flat).__name__)
    return flat


def is_inside_unit(tensor: torch.Tensor) -> bool:
    """Whether this is a flat parameter, or a parameter that an FSDP1 unit shows instead of a part of one."""
    return is_flat_parameter(tensor) or bool(getattr(tensor, "_fsdp_flattened", False))


def check_sharded(flat: torch.Tensor, name: str) -> None:
    """A fill of the local shard is lost while the unit is unsharded: what computes is another tensor."""
    # These attributes exist from the first forward on; before it, the flat parameter is the local shard.
    keys = ("_local_shard", "_full_param_padded", "_full_prec_full_param_padded")
    shard, *unsharded = values = [getattr(flat, key, None) for key in keys]
    kinds = [type(value).__name__ for value in values]
    check_private(
        all(value is None or isinstance(value, torch.Tensor) for value in values),
        f"{name}: {', '.join(keys)} of a flat parameter must be tensors or None",
        kinds,
    )
    moved = shard is not None and shard.untyped_storage()._cdata != flat.untyped_storage()._cdata
    if moved or any(full is not None and full.untyped_storage().size() > 0 for full in unsharded):
        raise ValueError(
            f"{name}: the flat parameter must be its own local shard, got one that is unsharded (inside "
            "summon_full_params, or between a forward and the end of its backward) or moved after its first forward"
        )


def local_shard(handle: Any, name: str) -> tuple[torch.Tensor, int]:
    """(the local flat shard as a detached 1-D view, the flat parameter's element that it starts at)."""
    flat = flat_parameter_of(handle)
    check_sharded(flat, name)
    num_shards = private(handle, "world_size") if private(handle, "uses_sharded_strategy") else 1
    rank = private(handle, "rank") if num_shards > 1 else 0
    total = sum(private(flat, "_numels_with_padding"))
    length = -(-total // num_shards)
    local = flat.detach()
    shard_size = tuple(private(flat, "_sharded_size"))
    check_private(
        tuple(local.shape) == shard_size == (length,) and local.is_contiguous() and 0 <= rank < num_shards,
        f"{name}: the local flat shard must be contiguous and one of {num_shards} equal parts of {total} elements",
        f"shape {tuple(local.shape)}, strides {local.stride()} and _sharded_size {shard_size} on rank {rank}",
    )
    return local, rank * length


def _place_in_whole(spec: Any, shape: tuple[int, ...], what: str) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """(global shape, corner) of what was flattened; `spec` is that of the DTensor whose local tensor it is, or None."""
    if spec is None:
        return shape, None
    check_private(is_dtensor_spec(spec), f"{what}: an extension must be a DTensorSpec", type(spec).__name__)
    try:
        box = dtensor_box(spec)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    sizes, corner = box if box is not None else (None, None)
    check_private(
        sizes == shape, f"{what}: the flattened local tensor must have the shape {sizes} of its placements", shape
    )
    return tuple(spec.shape), corner


# One element a parameter; the last two are None where every element would be.
_LISTS = ("_param_infos", "_fqns", "_shapes", "_strides", "_contiguities", "_param_extensions", "_params")


def _parameters(flat: torch.Tensor, name: str) -> list[tuple[Any, ...]]:
    """(start, numel, then an element of each of _LISTS) of each parameter that was flattened."""
    numels, is_padding = private(flat, "_numels_with_padding"), private(flat, "_is_padding_mask")
    starts = itertools.accumulate(numels, initial=0)
    places = [(start, numel) for start, numel, skip in zip(starts, numels, is_padding, strict=False) if not skip]
    lists = [private(flat, attribute) for attribute in _LISTS]
    lists[-2:] = [[None] * len(places) if values is None else values for values in lists[-2:]]
    lengths = {attribute: len(values) for attribute, values in zip(_LISTS, lists, strict=True)}
    check_private(
        set(lengths.values()) == {len(places)} and len(numels) == len(is_padding),
        f"{name}: a flat parameter must tell of each of its {len(places)} parameters",
        f"{lengths} and {len(numels)} sizes, {len(is_padding)} of them marked as padding or not",
    )
    return [(*place, *values) for place, values in zip(places, zip(*lists, strict=True), strict=True)]


def entries(handle: Any, name: str = "FSDP unit") -> list[FlatEntry]:
    """The parameters of a flat parameter, in its order. `name` is for messages."""
    flat = flat_parameter_of(handle)
    shared: dict[tuple[int, str], list[tuple[nn.Module, str]]] = {}
    for info in private(flat, "_shared_param_infos"):
        first = id(private(info, "prim_module")), private(info, "prim_param_name")
        shared.setdefault(first, []).append((private(info, "module"), private(info, "param_name")))
    found = []
    for start, numel, info, fqn, size, stride, is_contiguous, spec, original in _parameters(flat, name):
        shape, strides, what = tuple(size), tuple(stride), f"{name}: {fqn}"
        order = memory_order(shape, strides)
        if order is None:
            raise ValueError(
                f"{what}: a parameter in a flat parameter must be dense, got shape {shape} with strides {strides}; "
                f"FSDP1 of {package_version('torch')} reads others wrongly (make it contiguous before wrapping)"
            )
        module, attribute = private(info, "module"), private(info, "param_name")
        owners = (module, attribute), *shared.pop((id(module), attribute), ())
        entry = FlatEntry(start, shape, order, *_place_in_whole(spec, shape, what), owners, original)
        check_private(
            entry.numel == numel
            and fqn.rpartition(".")[2] == attribute
            and (is_contiguous == (strides[-1:] == (1,) and is_row_major(shape, order)) or not numel),
            f"{what}: its sizes, strides, names and contiguity must agree",
            f"shape {shape}, strides {strides} and {numel} elements, {attribute}, contiguous: {is_contiguous}",
        )
        found.append(entry)
    check_private(not shared, f"{name}: a shared parameter must be one of the flattened ones", sorted(shared))
    return found


def _check_runs(entry: FlatEntry, runs: list[Run], shard_start: int, info: Any, name: str) -> None:
    """FSDP1 keeps the part of each parameter that a shard holds beside what it follows from: both must agree."""
    held = sum(run.length for run in runs)
    ours = (runs[0].at, held, max(shard_start - entry.start, 0))
    theirs = tuple(private(info, key) for key in ("offset_in_shard", "numel_in_shard", "intra_param_start_idx"))
    check_private(
        (ours == theirs if private(info, "in_shard") else not held) or not entry.numel,
        f"{name}: {entry.owners[0][1]} of the flat parameter must be in the shard as its sizes and the rank say: "
        f"(place in shard, length, place in parameter) = {ours}",
        theirs,
    )


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
    infos, all_entries = private(flat_parameter_of(handle), "_shard_param_infos"), entries(handle, name)
    check_private(len(infos) == len(all_entries), f"{name}: _shard_param_infos must be {len(all_entries)}", len(infos))
    found, held = [], []
    for entry, info in zip(all_entries, infos, strict=True):
        runs = runs_of_entry(entry.start, entry.shape, entry.memory_order, shard_start, local.numel(), entry.corner)
        _check_runs(entry, runs, shard_start, info, name)
        held += [(run.at, run.length) for run in runs if run.length]
        found.append((entry, [(view_of_run(local, run), run.offset) for run in runs]))
    padding = [local[at : at + length] for at, length in padding_runs(held, local.numel())]
    return found, padding
