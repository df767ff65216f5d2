"""DTensor, and with it FSDP2, HSDP and tensor parallelism: the box of the global tensor that a rank holds.

torch's own compute_local_shape_and_global_offset is wrong where FSDP2 and tensor parallelism shard one dimension and
sizes do not divide (torch 2.13: 9 rows over dp 4 x tp 2, two ranks of eight). Sharding is repeated chunking, in the
order in which the mesh axes were applied; so that is what is done here, on integers.

FSDP2 keeps each local shard in front of the padding rows of a larger storage. They are zeros of its own making, not
part of any tensor that it shows, and no fill of a local shard touches them: they are not reported as padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .names import is_a
from .plain import is_plain
from .private import check_private, package_version, private

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

ShardOrder = list[tuple[int, tuple[int, ...]]]  # (tensor dim, mesh axes in the order in which they chunk it)


def is_dtensor(tensor: object) -> bool:
    return is_a(tensor, "torch", "DTensor")


def is_dtensor_spec(value: object) -> bool:
    return is_a(value, "torch", "DTensorSpec")


# --- integers ----------------------------------------------------------------------------------------------------


def chunk(start: int, size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """(start, size) of chunk `index` of the interval (start, size), as torch.chunk cuts it: every chunk as long as the
    first, ceil(size / num_chunks), until the interval ends."""
    length = -(-size // num_chunks)
    low, high = min(length * index, size), min(length * (index + 1), size)
    return start + low, high - low


def box_of_shard_order(
    shape: Sequence[int], order: ShardOrder, mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sizes, offset) of the shard at a mesh coordinate."""
    sizes, offset = list(shape), [0] * len(shape)
    for dim, axes in order:
        for axis in axes:
            offset[dim], sizes[dim] = chunk(offset[dim], sizes[dim], mesh_shape[axis], coordinate[axis])
    return tuple(sizes), tuple(offset)


def shard_order(shards: Sequence[tuple[int, int] | None], mesh_shape: Sequence[int]) -> ShardOrder | None:
    """The order in which mesh axes chunk each dimension. `shards` has, for each mesh axis, the (tensor dim, split
    factor) of its placement, or None for Replicate; None where no order fits.

    A plain Shard has split factor 1. A _StridedShard's is the product of the sizes of the axes that chunk its dimension
    before it although they come later in the mesh (fully_shard over tensor parallelism: 'dp' before 'tp' in the mesh,
    after it in time). So axes are placed from the last backwards, each behind the axes whose sizes make up its factor.
    """
    axes_of_dim: dict[int, list[int]] = {}
    for axis in reversed(range(len(shards))):
        shard = shards[axis]
        if shard is None:
            continue
        dim, split_factor = shard
        axes = axes_of_dim.setdefault(dim, [])
        position, product = 0, 1
        while product != split_factor:
            if position == len(axes):
                return None
            product *= mesh_shape[axes[position]]
            position += 1
        axes.insert(position, axis)
    return [(dim, tuple(axes)) for dim, axes in sorted(axes_of_dim.items())]


# --- the shell ---------------------------------------------------------------------------------------------------


def _order_of_spec(spec: DTensorSpec) -> ShardOrder:
    shards: list[tuple[int, int] | None] = []
    strided = False
    placements = private(spec, "placements")
    for placement in placements:
        if placement.is_replicate():
            shards.append(None)
        elif placement.is_partial():
            raise ValueError(
                f"a DTensor must be sharded or replicated to have a place in the global tensor, got {spec.placements}: "
                "a Partial holds summands; redistribute it first"
            )
        elif is_a(placement, "torch", "Shard") or is_a(placement, "torch", "_StridedShard"):
            dim = private(placement, "dim")
            is_strided = is_a(placement, "torch", "_StridedShard")
            factor = private(placement, "split_factor") if is_strided else 1
            strided = strided or is_strided
            shards.append((dim if dim >= 0 else dim + len(spec.shape), factor))
        else:
            raise ValueError(
                f"placements must be Shard, _StridedShard or Replicate, got {type(placement).__name__} in "
                f"{spec.placements}"
            )
    order = shard_order(shards, tuple(spec.mesh.shape))
    stated = None if strided else private(spec, "shard_order")
    if stated is not None:  # it need not be left to right
        stated = [(private(entry, "tensor_dim"), tuple(private(entry, "mesh_dims"))) for entry in stated]
        check_private(
            sorted((dim, sorted(axes)) for dim, axes in stated) == [(dim, sorted(axes)) for dim, axes in order or ()],
            f"the shard order of {placements} must have each axis that shards a dimension",
            stated,
        )
        return stated
    if order is None or (strided and private(spec, "use_strided_shard_as_shard_order") is False):
        raise ValueError(
            f"the split factors must follow from an order of the mesh axes, got {spec.placements} on a mesh of shape "
            f"{tuple(spec.mesh.shape)}: such a shard is no box ({package_version('torch')})"
        )
    return order


def dtensor_box(
    spec: DTensorSpec, coordinate: Sequence[int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(sizes, offset) of the local shard in the global tensor, for any even or uneven placements.

    coordinate: the position in the mesh, by default this rank's. None is returned where this rank is not in the mesh.
    A Partial placement, or strided shards that no order of the mesh axes explains, are a ValueError.
    """
    order = _order_of_spec(spec)
    if coordinate is None:
        coordinate = spec.mesh.get_coordinate()
        if coordinate is None:
            return None
    return box_of_shard_order(tuple(spec.shape), order, tuple(spec.mesh.shape), coordinate)


def locate_dtensor(
    dtensor: DTensor, name: str = "DTensor"
) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]] | None:
    """(local, sizes, offset): this rank's shard as a detached view of its memory, and its box in the global tensor.
    None where this rank is not in the mesh. `name` is for messages."""
    spec, local = private(dtensor, "_spec"), private(dtensor, "_local_tensor")
    try:
        box = dtensor_box(spec)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if box is None:
        return None
    sizes, offset = box
    if not is_plain(local):
        raise TypeError(
            f"{name}: the local tensor of a DTensor must be an ordinary tensor, got a {type(local).__name__}"
        )
    local = local.detach()
    shape = tuple(local.shape)
    # A rank beyond the last chunk may hold an empty shard of another shape (from_local, or torch.empty(0)).
    if shape != sizes and not (local.numel() == 0 and 0 in sizes):
        raise ValueError(
            f"{name}: the local shard must have the shape {sizes} that the placements give at mesh coordinate "
            f"{tuple(spec.mesh.get_coordinate() or ())}, got {shape}; global shape {tuple(spec.shape)}, placements "
            f"{spec.placements}, mesh {tuple(spec.mesh.shape)} ({package_version('torch')})"
        )
    if shape != sizes:
        local = local.view(sizes)
    return local, sizes, offset
