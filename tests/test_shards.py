"""init_model_ on shards, end to end: each rank's memory equals what the framework itself makes of the unsharded model.

Truth is the unsharded model, initialised in one piece and then sharded by the framework; ours is the same model sharded
on meta and initialised where it lies. Every rank of every world runs the real sharding code (fake process group, one
forked process a rank).
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from fake_world import run_ranks, run_world
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torch_shardinit as shardinit

CPU = torch.device("cpu")


class Unit(nn.Module):
    """Odd sizes, every kind of step, and regions that cut across shards."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(rows, 5))
        self.table = nn.Parameter(torch.empty(9, 6))
        self.stack = nn.Parameter(torch.empty(5, 4, 3))
        self.vector = nn.Parameter(torch.ones(13))
        self.one = nn.Parameter(torch.zeros(1))
        self.linear = nn.Linear(6, 7)
        nn.init.normal_(self.matrix, std=0.02)
        nn.init.trunc_normal_(self.table, std=0.5)
        nn.init.uniform_(self.stack, -0.1, 0.3)
        with torch.no_grad():
            self.matrix.mul_(0.7).add_(0.1)
            self.table[4].zero_()
            self.table[:, 1::2].mul_(3).clamp_(-1, 1)
            self.stack[1:4, :, 2].fill_(2.5)
            self.vector[5:].uniform_(0, 1)
        self.register_buffer("ramp", torch.arange(6.0).cos())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=3)
        self.units = nn.ModuleList([Unit(7), Unit(16)])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight


def recorded() -> Net:
    with shardinit.recording():
        return Net()


@functools.cache
def unsharded() -> Net:
    return shardinit.init_model_(recorded(), 11, device="cpu")  # type: ignore[return-value]


def compare(ours: nn.Module, truth: nn.Module) -> int:
    """The local memory of every parameter and buffer, by bytes. Returns how many elements there were."""
    count = 0
    want = dict(itertools.chain(truth.named_parameters(), truth.named_buffers()))
    got = dict(itertools.chain(ours.named_parameters(), ours.named_buffers()))
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        other = want[name]
        if isinstance(tensor, DTensor):
            assert isinstance(other, DTensor) and tensor.placements == other.placements, name
            tensor, other = tensor.to_local(), other.to_local()
        assert_bitwise_equal(patterns(tensor), patterns(other), name)
        count += tensor.numel()
    return count


Sharding = Callable[[nn.Module], nn.Module]


def init_both(shard: Sharding) -> int:
    truth = shard(copy.deepcopy(unsharded()))
    ours = shard(recorded())
    shardinit.init_model_(ours, 11, device="cpu")
    count = compare(ours, truth)
    # Again, over what is there: region steps and all, the same bits.
    shardinit.init_model_(ours, 11)
    assert compare(ours, truth) == count
    shardinit.init_model_(ours, 12)
    if count > 40:  # the last ranks of a large world hold a constant or two, which no seed changes
        with pytest.raises(AssertionError, match="elements differ"):
            compare(ours, truth)
    return count


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


# ---- FSDP1 --------------------------------------------------------------------------------------------------------


def wrap_fsdp1(model: nn.Module, strategy: str, use_orig_params: bool, **kwargs: object) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Unit}),
        sharding_strategy=ShardingStrategy[strategy],
        device_id=CPU,
        use_orig_params=use_orig_params,
        **kwargs,  # type: ignore[arg-type]
    )


def flat_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    modules = FullyShardedDataParallel.fsdp_modules(model)
    return {str(i): m._handle.flat_param for i, m in enumerate(modules) if m._handle is not None}  # type: ignore[union-attr]


def with_garbage(model: nn.Module) -> Callable[[nn.Module], None]:
    """Allocation without values, and garbage in it, so that an element that is not filled shows."""
    allocate = shardinit.param_init_fn(model, fill=False, device="cpu")

    def fn(module: nn.Module) -> None:
        allocate(module)
        with torch.no_grad():
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                tensor.fill_(1e30)

    return fn


def fsdp1(strategy: str, use_orig_params: bool, mesh_shape: tuple[int, ...] | None) -> tuple[int, int]:
    kwargs = {}
    if mesh_shape is not None:
        kwargs["device_mesh"] = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replica", "shard"))
    truth = wrap_fsdp1(copy.deepcopy(unsharded()), strategy, use_orig_params, **kwargs)
    # Padding is what does not follow the values: the same wrapping of other values has the same bytes there.
    moved = copy.deepcopy(unsharded())
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.copy_(parameter + 1e3)
    other = flat_parameters(wrap_fsdp1(moved, strategy, use_orig_params, **kwargs))

    model = recorded()
    by_unit = wrap_fsdp1(model, strategy, use_orig_params, param_init_fn=shardinit.param_init_fn(model, 11), **kwargs)
    model = recorded()
    in_place = wrap_fsdp1(model, strategy, use_orig_params, param_init_fn=with_garbage(model), **kwargs)
    shardinit.init_model_(in_place, 11)

    elements = padding = 0
    for ours in (by_unit, in_place):
        flats = flat_parameters(ours)
        assert flats.keys() == flat_parameters(truth).keys()
        for name, flat in flats.items():
            got, want = patterns(flat.data), patterns(flat_parameters(truth)[name].data)
            real = want != patterns(other[name].data)
            assert_bitwise_equal(got[real], want[real], f"unit {name}")
            elements += int(real.sum())
            padding += int((~real).sum())
            if ours is in_place:
                assert (got[~real] == 0).all(), "padding that we fill is zero"
        for name, buffer in ours.named_buffers():
            assert_bitwise_equal(patterns(buffer), patterns(dict(truth.named_buffers())[name]), name)
    if use_orig_params:
        assert by_unit.module.head.weight is by_unit.module.embedding.weight
    return elements, padding


NUM_PARAMETERS = 11 * 6 + sum(rows * 5 + 9 * 6 + 60 + 13 + 1 + 7 * 6 + 7 for rows in (7, 16))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world", range(1, 9))
def test_fsdp1_full_shard(world: int, use_orig_params: bool) -> None:
    counts = run_world(fsdp1, world, "FULL_SHARD", use_orig_params, None)
    assert sum(elements for elements, _ in counts) == 2 * NUM_PARAMETERS


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp1_other_strategies(strategy: str, use_orig_params: bool) -> None:
    counts = run_world(fsdp1, 4, strategy, use_orig_params, None)
    copies = 4 if strategy == "NO_SHARD" else 1
    assert sum(elements for elements, _ in counts) == 2 * copies * NUM_PARAMETERS


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_hybrid_shard(use_orig_params: bool) -> None:
    counts = run_world(fsdp1, 6, "HYBRID_SHARD", use_orig_params, (2, 3))
    assert sum(elements for elements, _ in counts) == 2 * 2 * NUM_PARAMETERS


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_at_64_ranks(use_orig_params: bool) -> None:
    counts = run_ranks(fsdp1, list(range(64)), 64, "FULL_SHARD", use_orig_params, None)
    assert sum(elements for elements, _ in counts) == 2 * NUM_PARAMETERS
