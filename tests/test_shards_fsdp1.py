"""init_model_ and param_init_fn under FSDP1, end to end: each flat parameter's bytes are those that FSDP1 itself makes
of the unsharded model, whatever way and order the values came by. Nothing is unsharded, nothing sent."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from fake_world import run_ranks, run_world
from guards import local_init
from sharded_nets import Net, Unit, flat_parameters, init_local, recorded, unsharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor

import torch_shardinit as shardinit

CPU = torch.device("cpu")
Prepare = Callable[[nn.Module], nn.Module]
Wrap = Callable[..., FullyShardedDataParallel]


def wrapper(strategy: str, use_orig_params: bool, nested: bool = True, **options: Any) -> Wrap:
    def wrap(model: nn.Module, param_init_fn: Callable[[nn.Module], None] | None = None) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Unit}) if nested else None,
            sharding_strategy=ShardingStrategy[strategy],
            device_id=CPU,
            use_orig_params=use_orig_params,
            param_init_fn=param_init_fn,
            **options,
        )

    return wrap


def locally(fn: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    def guarded(module: nn.Module) -> None:
        with local_init():
            fn(module)

    return guarded


def with_garbage(model: nn.Module) -> Callable[[nn.Module], None]:
    """Allocation without values, and garbage in it, so that an element that is not filled shows."""
    allocate = shardinit.param_init_fn(model, fill=False, device="cpu")

    def fn(module: nn.Module) -> None:
        allocate(module)
        with torch.no_grad():
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                tensor.fill_(1e30)

    return fn


def every_way(wrap: Wrap, prepare: Prepare, turned: bool) -> Iterator[tuple[str, FullyShardedDataParallel]]:
    """The same model initialised in each way that there is."""
    model = prepare(recorded(turned))
    yield "unit by unit", wrap(model, locally(shardinit.param_init_fn(model, 11)))

    model = prepare(recorded(turned))
    model = wrap(model, with_garbage(model))
    init_local(model)
    yield "recorded, wrapped, filled in place", model

    torch.manual_seed(torch.distributed.get_rank())
    model = wrap(prepare(Net(turned)))  # initialised by torch, from this rank's own generator
    with local_init():
        shardinit.init_model_(model, 11, init_fn=lambda net: net.init_weights())
    yield "wrapped, recorded and filled in place", model

    model = prepare(recorded(turned))
    model = wrap(model, with_garbage(model))
    for index in (1, 0):  # the inner units first, each on its own
        unit = model.module.units[index]
        if not isinstance(unit, FullyShardedDataParallel):
            return
        with local_init():
            shardinit.init_model_(unit, 11, rename=f"units.{index}.".__add__)
    with local_init():
        shardinit.init_model_(model, 11, keep=["units.*"])
    yield "inner units first", model


def flat_truth(wrap: Callable[[nn.Module], nn.Module], whole: nn.Module) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """For each unit the flat shard that FSDP1 makes of a real model, and which of its elements are no padding: those
    that follow the values."""
    moved = copy.deepcopy(whole)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.copy_(parameter + 1e3)
    shards, others = flat_parameters(wrap(copy.deepcopy(whole))), flat_parameters(wrap(moved))
    want = {name: patterns(flat.data) for name, flat in shards.items()}
    return {name: (bits, bits != patterns(others[name].data)) for name, bits in want.items()}


def assert_flat(ours: nn.Module, truth: dict[str, tuple[np.ndarray, np.ndarray]], what: str, zeroed: bool) -> int:
    """zeroed: padding too was filled by us. Returns the number of elements that are no padding."""
    flats, count = flat_parameters(ours), 0
    assert flats.keys() == truth.keys()
    for name, (want, real) in truth.items():
        got = patterns(flats[name].data)
        assert_bitwise_equal(got[real], want[real], f"{what}: unit {name}")
        count += int(real.sum())
        assert not zeroed or (got[~real] == 0).all(), f"{what}: padding that we fill is zero"
    return count


def check(wrap: Wrap, prepare: Prepare = lambda model: model, turned: bool = False) -> int:
    """The number of elements that were compared, over all ways."""
    whole = unsharded(turned)
    truth = flat_truth(lambda model: wrap(prepare(model)), whole)
    trainable = [parameter.requires_grad for parameter in wrap(prepare(copy.deepcopy(whole))).parameters()]
    buffers, count = dict(whole.named_buffers()), 0
    for way, ours in every_way(wrap, prepare, turned):
        count += assert_flat(ours, truth, way, zeroed=way != "unit by unit")
        for name, buffer in ours.named_buffers():
            assert_bitwise_equal(patterns(buffer), patterns(buffers[clean_tensor_name(name)]), f"{way}: {name}")
        assert [parameter.requires_grad for parameter in ours.parameters()] == trainable
    return count


TURNED = 2 * 60
NUM_PARAMETERS = 11 * 6 + sum(rows * 5 + 9 * 6 + 60 + 13 + 1 + 7 * 6 + 7 for rows in (7, 16))
BOTH = pytest.mark.parametrize("use_orig_params", [False, True])


def fsdp1(strategy: str, use_orig_params: bool, mesh_shape: tuple[int, ...] | None) -> int:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replica", "shard")) if mesh_shape else None
    return check(wrapper(strategy, use_orig_params, device_mesh=mesh), turned=True)


def assert_counts(counts: list[int], copies: int = 1, num_parameters: int = NUM_PARAMETERS, ways: int = 4) -> None:
    assert sum(counts) == ways * copies * num_parameters


@BOTH
@pytest.mark.parametrize("world", range(1, 9))
def test_full_shard(world: int, use_orig_params: bool) -> None:
    assert_counts(run_world(fsdp1, world, "FULL_SHARD", use_orig_params, None), 1, NUM_PARAMETERS + TURNED)


@BOTH
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_other_strategies(strategy: str, use_orig_params: bool) -> None:
    counts = run_world(fsdp1, 4, strategy, use_orig_params, None)
    assert_counts(counts, 4 if strategy == "NO_SHARD" else 1, NUM_PARAMETERS + TURNED)


@BOTH
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_hybrid_shard(strategy: str, use_orig_params: bool) -> None:
    assert_counts(run_world(fsdp1, 6, strategy, use_orig_params, (2, 3)), 2, NUM_PARAMETERS + TURNED)


@BOTH
def test_64_ranks(use_orig_params: bool) -> None:
    counts = run_ranks(fsdp1, list(range(64)), 64, "FULL_SHARD", use_orig_params, None)
    assert_counts(counts, 1, NUM_PARAMETERS + TURNED)


def offloaded(use_orig_params: bool) -> int:
    return check(wrapper("FULL_SHARD", use_orig_params, cpu_offload=CPUOffload(offload_params=True)))


@BOTH
def test_cpu_offload(use_orig_params: bool) -> None:
    assert_counts(run_world(offloaded, 3, use_orig_params))


def frozen(use_orig_params: bool) -> int:
    def freeze(model: nn.Module) -> nn.Module:
        assert isinstance(model, Net)
        model.units[0].requires_grad_(False)
        if use_orig_params:  # else a unit must be of one kind
            model.units[1].table.requires_grad_(False)
            model.units[1].linear.requires_grad_(False)
        return model

    return check(wrapper("FULL_SHARD", use_orig_params), freeze)


@BOTH
def test_frozen_and_trainable(use_orig_params: bool) -> None:
    assert_counts(run_world(frozen, 3, use_orig_params))


def over_tensor_parallel(mesh_shape: tuple[int, int], dim: int, use_orig_params: bool, strategy: str) -> int:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))

    def parallelise(model: nn.Module) -> nn.Module:
        assert isinstance(model, Net)
        for unit in model.units:
            for name in ("matrix", "table", "stack"):
                whole = getattr(unit, name)
                local = distribute_tensor(whole.data, mesh["tp"], [Shard(dim)], src_data_rank=None)
                setattr(unit, name, nn.Parameter(local))
        return model

    # torch 2.13 flattens DTensors that a NO_SHARD unit shows once more, in the unit around it: no nesting there.
    nested = strategy != "NO_SHARD"
    return check(wrapper(strategy, use_orig_params, nested, device_mesh=mesh["dp"]), parallelise)


@BOTH
@pytest.mark.parametrize(
    ("mesh_shape", "dim", "strategy"),
    [
        ((2, 2), 0, "FULL_SHARD"),
        ((3, 2), 1, "FULL_SHARD"),
        ((2, 4), 0, "SHARD_GRAD_OP"),
        ((2, 3), 1, "NO_SHARD"),
    ],
)
def test_over_tensor_parallelism(mesh_shape: tuple[int, int], dim: int, strategy: str, use_orig_params: bool) -> None:
    """Sizes that divide neither axis; a rank of tp 4 holds no row of a tensor of 5 or 9."""
    counts = run_world(over_tensor_parallel, mesh_shape[0] * mesh_shape[1], mesh_shape, dim, use_orig_params, strategy)
    # What tensor parallelism does not shard, each rank of its axis holds.
    sharded = 2 * (9 * 6 + 60) + (7 + 16) * 5
    copies = mesh_shape[0] if strategy == "NO_SHARD" else 1
    ways = 3 if strategy == "NO_SHARD" else 4  # it has no inner units
    assert_counts(counts, copies, sharded + mesh_shape[1] * (NUM_PARAMETERS - sharded), ways)


# --- a trunk, wrapped and initialised before its head exists -------------------------------------------------------


class WithHead(nn.Module):
    def __init__(self, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head


def trunk_first(use_orig_params: bool) -> int:
    with shardinit.recording():
        whole = WithHead(Net(), nn.Linear(6, 4))
    whole = shardinit.init_model_(whole, 11, device="cpu")
    wrap_units, wrap_one = (wrapper("FULL_SHARD", use_orig_params, nested) for nested in (True, False))
    truth = flat_truth(lambda model: wrap_one(WithHead(wrap_units(model.trunk), model.head)), whole)

    trunk: nn.Module = recorded()
    trunk = wrap_units(trunk, with_garbage(trunk))
    with local_init():
        shardinit.init_model_(trunk, 11, rename="trunk.".__add__)
    with shardinit.recording():
        head = nn.Linear(6, 4)
    model = WithHead(trunk, head)
    wrapped = wrap_one(model, locally(shardinit.param_init_fn(model, 11, device="cpu")))
    return assert_flat(wrapped, truth, "trunk first", zeroed=False)


@BOTH
def test_trunk_before_its_head_exists(use_orig_params: bool) -> None:
    assert sum(run_world(trunk_first, 2, use_orig_params)) == NUM_PARAMETERS + 28
