"""The zoo under every layout: what a framework makes of the unsharded values, and what is filled in place."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from zoo import MODELS

import torch_shardinit as shardinit
from torch_shardinit.model import materialise_
from torch_shardinit.plan import Plan

SEED = 29
Sharding = Callable[[nn.Module], nn.Module]
Tensors = dict[str, torch.Tensor]


def recorded(name: str) -> nn.Module:
    with shardinit.recording():
        return MODELS[name]()


@functools.cache
def plan_of(name: str) -> Plan:
    return shardinit.record(recorded(name))


@functools.cache
def unsharded(name: str, seed: int = SEED) -> Tensors:
    """By the process that calls it first: the parent of ranks, with two threads; ranks have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return dict(tensors_of(shardinit.init_model_(recorded(name), seed, device="cpu")))
    finally:
        torch.set_num_threads(before)


def tensors_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, tensor.detach()) for name, tensor in named]


def with_values(name: str) -> nn.Module:
    """A real model, built by stock torch, that holds the unsharded values: the framework shards them."""
    model = MODELS[name]()
    values = unsharded(name)
    with torch.no_grad():
        for key, tensor in tensors_of(model):
            tensor.copy_(values[key])
    return model


def words(tensor: torch.Tensor) -> torch.Tensor:
    """What has no integer of its width as something that has."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor


def compare(ours: nn.Module, truth: nn.Module, what: str) -> int:
    """What both hold of every tensor on this rank, by bytes. Returns how many elements."""
    want, count = dict(tensors_of(truth)), 0
    for name, tensor in tensors_of(ours):
        other = want.pop(name)
        if isinstance(tensor, DTensor):
            assert isinstance(other, DTensor) and tensor.placements == other.placements
            tensor, other = tensor.to_local(), other.to_local()
        assert_bitwise_equal(patterns(words(tensor)), patterns(words(other)), f"{what} {name}")
        count += tensor.numel()
    assert not want
    return count


# ---- shardings ----------------------------------------------------------------------------------------------------


def units(model: nn.Module) -> list[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [unit for one in lists for unit in one if any(True for _ in unit.parameters())]


def shard_fsdp2(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for unit in units(model):
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# What a project would write; of the other models every Linear is cut by its rows (Colwise).
TP_PLANS: dict[str, dict[str, ParallelStyle]] = {
    "GPT2": {f"layers.*.{name}": ColwiseParallel() for name in ("c_attn", "c_fc")}
    | {"layers.*.c_proj": RowwiseParallel()},
    "Llama": {f"layers.*.{name}": ColwiseParallel() for name in ("wq", "wk", "wv", "w1")}
    | {"tok_embeddings": RowwiseParallel(), "layers.*.wo": RowwiseParallel(), "output": ColwiseParallel()},
    "T5": {f"layers.*.{name}": ColwiseParallel() for name in "qkv"}
    | {"layers.*.o": RowwiseParallel(), "shared": ColwiseParallel()},
    "BERT": {f"layers.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")}
    | {f"layers.*.{name}": RowwiseParallel() for name in ("dense", "down")},
    "DiT": {"layers.*.qkv": ColwiseParallel(), "layers.*.proj": RowwiseParallel()},
}


def shard_tp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 over tensor parallelism."""
    plan = TP_PLANS.get(type(model).__name__)
    if plan is None:
        linears = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and not hasattr(module, "parametrizations")
        ]
        plan = {name: ColwiseParallel() for name in linears}
    if plan:
        parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    return shard_fsdp2(model, mesh["dp"])


def shard_fsdp1(
    model: nn.Module, use_orig_params: bool, strategy: ShardingStrategy, param_init_fn: Sharding | None = None
) -> nn.Module:
    wrapped = {id(unit) for unit in units(model)}
    policy = CustomPolicy(lambda module: id(module) in wrapped)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        sharding_strategy=strategy,
        param_init_fn=param_init_fn,  # type: ignore[arg-type]
    )


# ---- what a rank does with one model ------------------------------------------------------------------------------


def check_dtensors(name: str, shard: Sharding, what: str) -> int:
    """The Plan of the whole, through JSON, on the sharded model."""
    truth, ours = shard(with_values(name)), shard(recorded(name))
    materialise_(ours, "cpu")
    Plan.from_json(plan_of(name).to_json()).apply_(ours, SEED)
    return compare(ours, truth, what)


def check_init_fn(name: str, shard: Sharding) -> int:
    """The model's own init code on the sharded model, with and without a recording of its construction."""
    truth, ours = shard(with_values(name)), shard(recorded(name))
    init_fn: Callable[[nn.Module], object] = type(ours).init_weights  # type: ignore[attr-defined]
    shardinit.init_model_(ours, SEED, init_fn=init_fn, device="cpu")
    compare(ours, truth, "init_fn after the recording")
    plan = shardinit.record(shard(MODELS[name]()), init_fn)
    unwritten = {entry.name for entry in plan.entries.values() if entry.program_class in ("unwritten", "kept")}
    assert len(unwritten) < len(plan.entries)
    alone = shard(MODELS[name]())
    plan.apply_(alone, SEED, keep=sorted(unwritten))
    want = dict(tensors_of(truth))
    count = 0
    for key, tensor in tensors_of(alone):
        entry = plan.lookup(key)
        if entry is not None and entry.name not in unwritten:
            other = want[key]
            assert isinstance(tensor, DTensor) == isinstance(other, DTensor)
            if isinstance(tensor, DTensor):
                tensor, other = tensor.to_local(), other.to_local()  # type: ignore[attr-defined]
            assert_bitwise_equal(patterns(words(tensor)), patterns(words(other)), f"init_fn alone {key}")
            count += tensor.numel()
    return count


def check_fsdp1(name: str, use_orig_params: bool, strategy: ShardingStrategy) -> int:
    """Filled as FSDP materialises, then in place in the flat shards."""
    what = f"fsdp1 {strategy.name}, use_orig_params={use_orig_params}"
    truth = shard_fsdp1(with_values(name), use_orig_params, strategy)
    model = recorded(name)
    init_fn = shardinit.param_init_fn(model, SEED, device="cpu")
    compare(shard_fsdp1(model, use_orig_params, strategy, init_fn), truth, f"{what}, param_init_fn")
    model = recorded(name)
    allocate = shardinit.param_init_fn(model, fill=False, device="cpu")
    ours = shard_fsdp1(model, use_orig_params, strategy, allocate)
    plan_of(name).apply_(ours, SEED)
    return compare(ours, truth, what)


def check_layouts(name: str, world: int) -> dict[str, int]:
    """Every layout of one model that a world of this size has; layout -> how many elements this rank held."""
    held: dict[str, int] = {}
    flat = init_device_mesh("cpu", (world,))
    held["fsdp2"] = check_dtensors(name, lambda model: shard_fsdp2(model, flat), "fsdp2")
    if world == 8:
        hybrid = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        held["hsdp"] = check_dtensors(name, lambda model: shard_fsdp2(model, hybrid), "hsdp")
        mixed = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        held["fsdp2 + tp"] = check_dtensors(name, lambda model: shard_tp(model, mixed), "fsdp2 + tp")
    if world == 3:
        held["init_fn"] = check_init_fn(name, lambda model: shard_fsdp2(model, flat))
    if world in (2, 3):
        # Without the original parameters FSDP1 wants all of a unit frozen, or none.
        is_mixed = len({parameter.requires_grad for parameter in MODELS[name]().parameters()}) > 1
        strategies = [ShardingStrategy.FULL_SHARD]
        strategies += [ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD] if world == 2 else []
        for strategy in strategies:
            for use_orig_params in (True,) if is_mixed else (False, True):
                layout = f"fsdp1 {strategy.name} {use_orig_params}"
                held[layout] = check_fsdp1(name, use_orig_params, strategy)
    return held


def check_all(world: int) -> dict[str, dict[str, int]]:
    """Every model, one after the other: a process a model would take far longer."""
    held = {}
    for name in MODELS:
        try:
            held[name] = check_layouts(name, world)
        except Exception as error:
            raise AssertionError(f"model {name} in a world of {world}") from error
    return held
