"""init_model_ on shards, end to end: each rank's memory equals what the framework itself makes of the unsharded model.

Truth is the unsharded model, initialised in one piece and then sharded by the framework; ours is the same model sharded
on meta and initialised where it lies. Every rank of every world runs the real sharding code (fake process group, one
forked process a rank).
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from fake_world import run_world
from sharded_nets import compare, init_both, init_local, recorded, unsharded
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torch_shardinit as shardinit
from torch_shardinit.model import materialise_


def fsdp2(dim: int, mesh_shape: tuple[int, ...]) -> int:
    names = ("replica", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)

    def placement(parameter: torch.Tensor) -> Shard:
        return Shard(min(dim, parameter.dim() - 1))

    def shard(model: nn.Module) -> nn.Module:
        for unit in model.units:  # type: ignore[union-attr]
            fully_shard(unit, mesh=mesh, shard_placement_fn=placement if dim else None)
        fully_shard(model, mesh=mesh)
        return model

    return init_both(shard)


# fully_shard takes uneven sizes on dim 0 only
@pytest.mark.parametrize("world", range(1, 9))
def test_fsdp2_shards_of_dim_0(world: int) -> None:
    counts = run_world(fsdp2, world, 0, (world,))
    parameters = sum(p.numel() for p in unsharded().parameters())
    buffers = sum(b.numel() for b in unsharded().buffers())
    assert sum(counts) == parameters + world * buffers


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 3), (3, 2)])
def test_fsdp2_on_two_mesh_axes(mesh_shape: tuple[int, int]) -> None:
    assert min(run_world(fsdp2, mesh_shape[0] * mesh_shape[1], 0, mesh_shape)) > 0


def plain_dtensors(placements: list[int | None], mesh_shape: tuple[int, ...]) -> int:
    mesh = init_device_mesh("cpu", mesh_shape)

    def shard(model: nn.Module) -> nn.Module:
        memo: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                if id(parameter) not in memo:
                    chosen = [
                        Replicate() if dim is None else Shard(min(dim, parameter.dim() - 1)) for dim in placements
                    ]
                    memo[id(parameter)] = nn.Parameter(
                        distribute_tensor(parameter.data, mesh, chosen, src_data_rank=None)
                    )
                module._parameters[name] = memo[id(parameter)]
        return model

    return init_both(shard)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_dtensor_shards_of_every_dim(dim: int, world: int) -> None:
    assert len(run_world(plain_dtensors, world, [dim], (world,))) == world


@pytest.mark.parametrize("placements", [[0, 0], [0, 1], [1, 0], [2, 1], [None, 1], [1, 1]])
def test_dtensor_shards_on_a_mesh(placements: list[int | None]) -> None:
    assert len(run_world(plain_dtensors, 6, placements, (3, 2))) == 6


def strided_locals() -> int:
    """from_local of memory that is transposed and has gaps."""
    mesh = init_device_mesh("cpu", (3,))

    def shard(model: nn.Module, strided: bool) -> nn.Module:
        for unit in model.units:  # type: ignore[union-attr]
            for name in ("matrix", "table", "stack", "vector"):
                whole = getattr(unit, name)
                sharded = distribute_tensor(whole.data, mesh, [Shard(0)], src_data_rank=None)
                if strided:
                    sizes = sharded.to_local().shape
                    memory = torch.empty([2 * size + 1 for size in reversed(sizes)])
                    local = memory[tuple(slice(1, None, 2) for _ in sizes)].permute(*reversed(range(len(sizes))))
                    assert local.shape == sizes
                    sharded = DTensor.from_local(
                        local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
                    )
                setattr(unit, name, nn.Parameter(sharded))
        return model

    truth = shard(copy.deepcopy(unsharded()), False)
    ours = shard(recorded(), True)
    materialise_(ours, "cpu")
    init_local(ours)
    assert not ours.units[0].stack.to_local().is_contiguous()  # type: ignore[union-attr]
    return compare(ours, truth)


def test_local_tensors_of_any_strides() -> None:
    assert min(run_world(strided_locals, 3)) > 100


def fsdp2_and_tensor_parallel(mesh_shape: tuple[int, int], dim: int) -> int:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))

    def shard(model: nn.Module) -> nn.Module:
        for unit in model.units:  # type: ignore[union-attr]
            for name in ("matrix", "table", "stack"):
                whole = getattr(unit, name)
                local = distribute_tensor(whole.data, mesh["tp"], [Shard(dim)], src_data_rank=None)
                setattr(unit, name, nn.Parameter(local))
            fully_shard(unit, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        return model

    return init_both(shard)


@pytest.mark.parametrize(("mesh_shape", "dim"), [((3, 2), 0), ((4, 2), 0), ((2, 3), 0), ((3, 2), 1), ((2, 2), 1)])
def test_fsdp2_over_tensor_parallel(mesh_shape: tuple[int, int], dim: int) -> None:
    """Strided shards with sizes that do not divide: 7, 9 and 5 rows on dp 3 x tp 2, 9 rows on dp 4 x tp 2."""
    assert len(run_world(fsdp2_and_tensor_parallel, mesh_shape[0] * mesh_shape[1], mesh_shape, dim)) == 6 + 2 * (
        mesh_shape == (4, 2)
    ) - 2 * (mesh_shape == (2, 2))


def raw_fills(mesh_shape: tuple[int, ...], placements: list[int | None]) -> int:
    mesh = init_device_mesh("cpu", mesh_shape)
    chosen = [Replicate() if dim is None else Shard(dim) for dim in placements]
    whole = shardinit.uniform_(torch.empty(7, 5), -1, 1, seed=5, tensor_id="w")
    truth = distribute_tensor(whole, mesh, chosen, src_data_rank=None)
    ours = distribute_tensor(torch.zeros(7, 5), mesh, chosen, src_data_rank=None)
    version = ours._version
    assert shardinit.uniform_(ours, -1, 1, seed=5, tensor_id="w") is ours
    assert ours._version > version
    assert_bitwise_equal(patterns(ours.to_local()), patterns(truth.to_local()), str(chosen))
    bits = distribute_tensor(torch.zeros(7, 5, dtype=torch.int64), mesh, chosen, src_data_rank=None)
    want = shardinit.random_bits_(torch.empty(7, 5, dtype=torch.int64), tensor_id=1)
    want = distribute_tensor(want, mesh, chosen, src_data_rank=None)
    assert torch.equal(shardinit.random_bits_(bits, tensor_id=1).to_local(), want.to_local())
    for where in ({"offset": 3}, {"offset": (0, 0), "global_shape": (7, 5)}, {"global_shape": (7, 5)}):
        with pytest.raises(ValueError, match="a DTensor knows its place; offset and global_shape must be left out"):
            shardinit.uniform_(ours, tensor_id="w", **where)
    with pytest.raises(ValueError, match="Partial"):
        shardinit.normal_(DTensor.from_local(torch.zeros(3), mesh, [Partial()] * len(mesh_shape)), tensor_id="w")
    assert torch.equal(ours.to_local(), truth.to_local())
    return ours.to_local().numel()


@pytest.mark.parametrize(
    ("mesh_shape", "placements"), [((4,), [0]), ((3,), [1]), ((2, 3), [None, 0]), ((3, 2), [0, 1])]
)
def test_raw_fill_of_a_dtensor(mesh_shape: tuple[int, ...], placements: list[int | None]) -> None:
    world = torch.Size(mesh_shape).numel()
    copies = 2 if None in placements else 1
    assert sum(run_world(raw_fills, world, mesh_shape, placements)) == 35 * copies


def fill_outside_the_mesh() -> tuple[float, int]:
    mesh = DeviceMesh("cpu", [0, 1])
    tensor = distribute_tensor(torch.zeros(6), mesh, [Shard(0)], src_data_rank=None)
    shardinit.normal_(tensor, tensor_id="w")
    return float(tensor.to_local().abs().sum()), tensor.to_local().numel()


def test_a_rank_outside_the_mesh_has_nothing_to_fill() -> None:
    inside, other, outside = run_world(fill_outside_the_mesh, 3)
    assert inside[1] == other[1] == 3 and inside[0] > 0
    assert outside == (0.0, 0)
