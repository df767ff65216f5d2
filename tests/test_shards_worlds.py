"""init_model_ under FSDP2 in every world from 1 to 512, and what else fully_shard offers. Truth is fully_shard of the
unsharded model."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from fake_world import assert_pieces, numbered, run_places, run_ranks, run_world
from guards import local_init
from sharded_nets import init_both, unsharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import torch_shardinit as shardinit
from torch_shardinit.locate import locate


def fsdp2(mesh_shape: tuple[int, ...], **options: object) -> int:
    names = ("replica", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)

    def shard(model: nn.Module) -> nn.Module:
        for unit in model.units:  # type: ignore[union-attr]
            fully_shard(unit, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    return init_both(shard)


def ranks_of(world: int) -> list[int]:
    """The first, the last, and two that the world draws."""
    return sorted({0, *random.Random(world).sample(range(world), 2), world - 1})


@pytest.mark.parametrize("world", [16, 31, 64, 100, 256, 511, 512])
def test_large_worlds(world: int) -> None:
    assert max(run_ranks(fsdp2, ranks_of(world), world, (world,))) > 40


def mapped(shapes: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], object]]:
    """For each shape the local shard and its place as fully_shard and locate have them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Module()
    for index, shape in enumerate(shapes):
        model.register_parameter(f"w{index}", nn.Parameter(numbered(shape)))
    fully_shard(model, mesh=mesh)
    pieces = locate(model).pieces
    assert_pieces(pieces, {f"w{index}": numbered(shape) for index, shape in enumerate(shapes)})
    return [(tuple(piece.local.shape), piece.offset) for piece in pieces]


SHAPES = [(1, 2), (97,), (128, 3), (512,), (513, 2), (1000,)]


def test_every_world_to_512() -> None:
    """One rank of each, drawn; what the others hold follows from it: equal chunks until the rows end."""
    places = [(random.Random(world).randrange(world), world) for world in range(1, 513)]
    for (rank, world), found in zip(places, run_places(mapped, places, SHAPES), strict=True):
        for (rows, *row), (sizes, offset) in zip(SHAPES, found, strict=True):
            length = -(-rows // world)
            start = min(rank * length, rows)
            assert (sizes, offset) == ((min(length, rows - start), *row), (start, *[0] * len(row)))


def three_axes(dim: int) -> int:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replica", "shard", "tp"))

    def shard(model: nn.Module) -> nn.Module:
        for unit in model.units:  # type: ignore[union-attr]
            for name in ("matrix", "table", "stack"):
                whole = getattr(unit, name)
                local = distribute_tensor(whole.data, mesh["tp"], [Shard(dim)], src_data_rank=None)
                setattr(unit, name, nn.Parameter(local))
            fully_shard(unit, mesh=mesh["replica", "shard"])
        return fully_shard(model, mesh=mesh["replica", "shard"])

    return init_both(shard)


@pytest.mark.parametrize("dim", [0, 1])
def test_hsdp_over_tensor_parallelism(dim: int) -> None:
    assert len(run_world(three_axes, 8, dim)) == 8


def by_last_dim(world: int) -> int:
    def placement(parameter: nn.Parameter) -> Shard | None:
        # fully_shard takes uneven sizes on dim 0 only.
        dims = [dim for dim in range(1, parameter.dim()) if parameter.shape[dim] % world == 0]
        return Shard(dims[-1]) if dims else None

    def shard(model: nn.Module) -> nn.Module:
        for unit in model.units:  # type: ignore[union-attr]
            fully_shard(unit, mesh=init_device_mesh("cpu", (world,)), shard_placement_fn=placement)
            assert unit.table.placements == (Shard(1),)
        return fully_shard(model, mesh=init_device_mesh("cpu", (world,)), shard_placement_fn=placement)

    return init_both(shard)


@pytest.mark.parametrize("world", [2, 3])
def test_shard_placement_fn(world: int) -> None:
    assert len(run_world(by_last_dim, world, world)) == world


def from_meta(over_tensor_parallel: bool) -> list[int]:
    """The bytes of each allocation of an init that gives a model on meta its memory."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with shardinit.recording():
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
    if over_tensor_parallel:
        parallelize_module(model, mesh["tp"], {"*": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"] if over_tensor_parallel else mesh)
    with local_init() as watch:
        shardinit.init_model_(model, 1, device="cpu")
    return watch.fresh


@pytest.mark.parametrize(("over_tensor_parallel", "shards"), [(False, 2), (True, 4)])
def test_a_model_on_meta_gets_memory_for_its_shards_alone(over_tensor_parallel: bool, shards: int) -> None:
    (fresh,) = run_ranks(from_meta, [3], 4, over_tensor_parallel)
    assert fresh == [64 * 64 * 4 // shards] * 3


def test_cpu_offload_and_mixed_precision() -> None:
    sizes = run_world(offloaded, 3)
    buffers = sum(buffer.numel() for buffer in unsharded().buffers())
    assert sum(sizes) == sum(p.numel() for p in unsharded().parameters()) + 3 * buffers


def offloaded() -> int:
    return fsdp2(
        (3,),
        offload_policy=CPUOffloadPolicy(pin_memory=False),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
