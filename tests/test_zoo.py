"""Every model of the zoo: what its own code gives under every layout is what it gives on one process, bit for bit."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from fake_world import run_world
from recorded_models import eager, interpreted
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from zoo import MODELS

import torch_shardinit as shardinit
from torch_shardinit.plan import Plan
from torch_shardinit.program import Exact, Played

SEED = 29
CPU = torch.device("cpu")


def recorded(name: str) -> nn.Module:
    with shardinit.recording():
        return MODELS[name]()


@functools.cache
def plan_of(name: str) -> Plan:
    return shardinit.record(recorded(name))


@functools.cache
def unsharded(name: str, seed: int = SEED) -> dict[str, torch.Tensor]:
    """By the parent process, with its two threads; ranks have one."""
    model = shardinit.init_model_(recorded(name), seed, device="cpu")
    return dict(tensors_of(model))


def tensors_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, tensor.detach()) for name, tensor in named]


def units(model: nn.Module) -> list[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [unit for one in lists for unit in one if any(True for _ in unit.parameters())]


def with_values(name: str) -> nn.Module:
    """A real model, built by stock torch, that holds the unsharded values: the framework shards them."""
    model = MODELS[name]()
    values = unsharded(name)
    with torch.no_grad():
        for key, tensor in tensors_of(model):
            tensor.copy_(values[key])
    return model


def shard_fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for unit in units(model):
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shard_fsdp1(model: nn.Module, use_orig_params: bool, **options: object) -> nn.Module:
    wrapped = {id(unit) for unit in units(model)}
    policy = CustomPolicy(lambda module: id(module) in wrapped)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=CPU, use_orig_params=use_orig_params, **options
    )  # type: ignore[arg-type]


def compare(ours: nn.Module, truth: nn.Module, what: str) -> int:
    want, count = dict(tensors_of(truth)), 0
    for name, tensor in tensors_of(ours):
        other = want.pop(name)
        if isinstance(tensor, DTensor):
            assert isinstance(other, DTensor) and tensor.placements == other.placements
            tensor, other = tensor.to_local(), other.to_local()
        if tensor.is_complex() or tensor.dtype == torch.bool:
            tensor, other = (torch.view_as_real(t) if t.is_complex() else t.to(torch.uint8) for t in (tensor, other))
        assert_bitwise_equal(patterns(tensor), patterns(other), f"{what} {name}")
        count += tensor.numel()
    assert not want
    return count


def on_a_rank(name: str) -> int:
    truth = shard_fsdp2(with_values(name))
    ours = shard_fsdp2(recorded(name))
    shardinit.init_model_(ours, SEED, device="cpu")
    count = compare(ours, truth, "fsdp2")
    # A Plan of the whole, through JSON, on the sharded model.
    again = shard_fsdp2(recorded(name))
    again.to_empty(device="cpu")
    Plan.from_json(plan_of(name).to_json()).apply_(again, SEED)
    compare(again, truth, "fsdp2 by JSON")
    # Without the original parameters FSDP1 wants all of a unit frozen, or none.
    is_mixed = len({parameter.requires_grad for parameter in again.parameters()}) > 1
    for use_orig_params in (True,) if is_mixed else (False, True):
        truth = shard_fsdp1(with_values(name), use_orig_params)
        model = recorded(name)
        init_fn = shardinit.param_init_fn(model, SEED, device="cpu")
        compare(shard_fsdp1(model, use_orig_params, param_init_fn=init_fn), truth, "fsdp1 param_init_fn")
        model = recorded(name)
        allocate = shardinit.param_init_fn(model, fill=False, device="cpu")
        ours = shard_fsdp1(model, use_orig_params, param_init_fn=allocate)
        shardinit.init_model_(ours, SEED)
        count += compare(ours, truth, "fsdp1")
    return count


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_holds_the_unsharded_bits(name: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert unsharded(name) and plan_of(name)
    finally:
        torch.set_num_threads(before)
    for world in (2, 3):
        assert min(run_world(on_a_rank, world, name)) > 0


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_has_a_program(name: str) -> None:
    plan = plan_of(name)
    assert plan.entries and all(isinstance(entry.program, (Exact, Played)) for entry in plan.entries.values())
    parameters = [entry for entry in plan.entries.values() if entry.kind == "parameter"]
    played = [entry.name for entry in parameters if isinstance(entry.program, Played)]
    assert sorted(played) == sorted(PLAYED_PARAMETERS.get(name, []))


# Every other parameter of the zoo is exact.
PLAYED_PARAMETERS = {
    "Swin": ["logit_scale"],
    "Mamba": ["A_log", "dt_proj.bias"],
    "RWKV": [f"layers.{i}.{name}" for i in range(3) for name in ("time_first", "time_mix", "key.weight")],
    "OrthogonalLSTM": [
        *(f"lstm.weight_hh_l{i}" for i in range(2)),
        *(f"gru.weight_{kind}_l0{reverse}" for kind in ("ih", "hh") for reverse in ("", "_reverse")),
    ],
    "WeightNorms": ["new.parametrizations.weight.original0", "old.weight_g", "g"],
    "Teacher": [*(f"teacher.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")), "prototypes.weight"],
    "Sparse": ["reservoir.weight"],
    "CastAfterInit": ["layers.1.weight"],
}


@pytest.mark.parametrize("name", MODELS)
def test_random_tensors_follow_the_seed_and_differ_from_each_other(name: str) -> None:
    one, two = unsharded(name), unsharded(name, SEED + 1)
    seen: dict[bytes, str] = {}
    for key, entry in plan_of(name).entries.items():
        program = entry.program
        random = program.is_random if isinstance(program, Exact) else bool(program.depends_on)  # type: ignore[union-attr]
        assert torch.equal(one[key], two[key]) != random, key
        if random and isinstance(program, Exact) and program.drawn_as is None:
            other = seen.setdefault(one[key].flatten()[:8].view(torch.uint8).numpy().tobytes(), key)
            assert other == key


@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_random_is_what_torch_gives(name: str) -> None:
    ours, stock = unsharded(name), dict(tensors_of(MODELS[name]()))
    assert ours.keys() == stock.keys()
    for key, entry in plan_of(name).entries.items():
        program = entry.program
        random = program.is_random if isinstance(program, Exact) else bool(program.depends_on)  # type: ignore[union-attr]
        assert ours[key].dtype == stock[key].dtype and ours[key].shape == stock[key].shape, key
        assert random or torch.equal(ours[key], stock[key]), key


# Not for given numbers what torch makes of them: orthogonal_ and sparse_, and a draw whose parts end up in two tensors,
# where each part has the numbers of its own place.
OTHER_NUMBERS = {"RWKV", "OrthogonalLSTM", "Sparse", "CastAfterInit", "FusedQKV"}


@pytest.mark.parametrize("name", sorted(MODELS.keys() - OTHER_NUMBERS))
def test_programs_equal_stock_torch(name: str) -> None:
    """With torch's random numbers and ours replaced by the same ones."""
    got, want = interpreted(plan_of(name)), eager(MODELS[name])
    assert got.keys() == want.keys()
    for key, tensor in got.items():
        assert torch.equal(tensor, want[key]), key
