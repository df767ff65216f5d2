"""Expert parallelism: experts stacked in one tensor and sharded on dim 0, and lists of experts, each rank its own."""

from __future__ import annotations

import copy
import functools
import re

import pytest
import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from fake_world import run_world
from guards import local_init
from sharded_nets import compare
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import torch_shardinit as shardinit

NUM_EXPERTS = 6


class Stacked(nn.Module):
    """As in torchtitan: the weights of all experts in one tensor each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(NUM_EXPERTS, 8, 4))
        self.down = nn.Parameter(torch.empty(NUM_EXPERTS, 4, 8))
        self.bias = nn.Parameter(torch.zeros(NUM_EXPERTS, 4))
        nn.init.trunc_normal_(self.up, std=0.02)
        nn.init.xavier_uniform_(self.down)
        with torch.no_grad():
            self.bias[1:5, 2].fill_(0.5)


class StackedMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, NUM_EXPERTS)
        self.experts = Stacked()


class ExpertParallel(ParallelStyle):
    """Shards each parameter of a module on dim 0."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            local = distribute_tensor(parameter.data, device_mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(local))
        return module


def shard_stacked(model: StackedMixture, mesh: DeviceMesh, data_dim: int | None) -> nn.Module:
    parallelize_module(model, mesh["ep"], {"experts": ExpertParallel()})
    if data_dim is not None:
        fully_shard(model.experts, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(min(data_dim, p.dim() - 1)))
        fully_shard(model, mesh=mesh["dp"])
    return model


def stacked(mesh_shape: tuple[int, ...], data_dim: int | None) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "ep")[-len(mesh_shape) :])
    mesh = mesh if len(mesh_shape) == 2 else {"ep": mesh}  # type: ignore[assignment]
    with shardinit.recording():
        model = StackedMixture()
    whole = shardinit.init_model_(copy.deepcopy(model), 3, device="cpu")
    truth = shard_stacked(whole, mesh, data_dim)  # type: ignore[arg-type]
    ours = shard_stacked(model, mesh, data_dim)
    with local_init():
        shardinit.init_model_(ours, 3, device="cpu")
    with local_init() as watch:
        shardinit.init_model_(ours, 3)
    assert watch.fresh == [], "no tensor in full"
    assert isinstance(ours.experts.up, DTensor)  # type: ignore[union-attr]
    return compare(ours, truth), ours.experts.up.to_local().numel()  # type: ignore[union-attr]


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_stacked_experts(world: int) -> None:
    """Also where they do not divide, and where ranks are more than experts."""
    assert sum(up for _, up in run_world(stacked, world, (world,), None)) == NUM_EXPERTS * 8 * 4


@pytest.mark.parametrize("data_dim", [0, 1])
def test_stacked_experts_under_fsdp2(data_dim: int) -> None:
    """fully_shard over the experts of a rank, or over a dimension within each."""
    assert sum(up for _, up in run_world(stacked, 6, (2, 3), data_dim)) == NUM_EXPERTS * 8 * 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)


class Mixture(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(4, NUM_EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(num_experts))


@functools.cache
def all_experts() -> dict[str, torch.Tensor]:
    with shardinit.recording():
        model = Mixture(NUM_EXPERTS)
    return {n: p.detach() for n, p in shardinit.init_model_(model, 3, device="cpu").named_parameters()}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_lists_of_experts(world: int, recorded: bool) -> None:
    """Rank r's experts.i is the whole's experts.(r * n + i): by the rank's own recording, or over torch's own values by
    the Plan of the whole."""
    per_rank, names = NUM_EXPERTS // world, []
    with shardinit.recording():
        whole = Mixture(NUM_EXPERTS)
    plan = None if recorded else shardinit.record(whole)
    for rank in range(world):

        def name_in_whole(name: str, rank: int = rank) -> str:
            return re.sub(r"(?<=experts\.)\d+", lambda found: str(rank * per_rank + int(found[0])), name)

        torch.manual_seed(rank)
        if plan is None:
            with shardinit.recording():
                model = Mixture(per_rank)
            shardinit.init_model_(model, 3, rename=name_in_whole, device="cpu")
        else:
            model = Mixture(per_rank)
            plan.apply_(model, 3, rename=name_in_whole)
        for name, parameter in model.named_parameters():
            assert_bitwise_equal(patterns(parameter), patterns(all_experts()[name_in_whole(name)]), name)
            names.append(name_in_whole(name))
    assert sorted(set(names)) == sorted(all_experts())
    assert len(names) == len(all_experts()) + 2 * (world - 1), "only the router is on every rank"
