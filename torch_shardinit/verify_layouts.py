"""The layouts that verify looks at: wrap an unmodified model, initialise it, gather it by the framework's own means."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

from .model import init_model_, materialise_, param_init_fn
from .recording import recording
from .verify_meter import InitMeter, fill_with_garbage

Factory = Callable[[], nn.Module]
_CPU = torch.device("cpu")


def build(factory: Factory) -> nn.Module:
    """The factory's model, recorded; nothing of it is allocated.

    Raises:
        TypeError: what it returns is no module.
    """
    with recording():
        model = factory()
    if not isinstance(model, nn.Module):
        raise TypeError(f"the factory must return a torch.nn.Module, got {type(model).__name__}")
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What users shard on its own: the members of the outermost ModuleLists and Sequentials that hold parameters."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            found += [block for block in child if any(True for _ in block.parameters())]
        else:
            found += blocks_of(child)
    return list(dict.fromkeys(found))


def _mesh_shape(world: int) -> tuple[int, int]:
    """(replicas, shards) of the two-dimensional meshes."""
    return (2, world // 2) if world >= 4 and world % 2 == 0 else (1, world)


def _fill_garbage_and_init(model: nn.Module, seed: int, meter: InitMeter) -> nn.Module:
    fill_with_garbage(model)
    with meter.around(model):
        init_model_(model, seed, device=_CPU)
    return model


def init_unsharded(factory: Factory, seed: int, meter: InitMeter) -> nn.Module:
    return _fill_garbage_and_init(build(factory), seed, meter)


def wrap_ddp(model: nn.Module) -> nn.Module:
    """DDP that does not broadcast rank 0's values, where this torch offers it: ours are equal without that."""
    offered = "init_sync" in inspect.signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {"init_sync": False} if offered else {}
    return DistributedDataParallel(model, **options)


def _init_ddp(factory: Factory, seed: int, meter: InitMeter) -> nn.Module:
    model = build(factory)
    materialise_(model, _CPU)  # DDP takes no parameters on meta
    return _fill_garbage_and_init(wrap_ddp(model), seed, meter)


def wrap_fsdp1(
    model: nn.Module, strategy: ShardingStrategy, use_orig_params: bool, fn: Callable[[nn.Module], None] | None
) -> nn.Module:
    blocks = {id(block) for block in blocks_of(model)}
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: id(module) in blocks)
    mesh = None
    if strategy is ShardingStrategy.HYBRID_SHARD:
        mesh = init_device_mesh("cpu", _mesh_shape(dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy is deprecated", FutureWarning)
        return FullyShardedDataParallel(
            model,
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
            auto_wrap_policy=policy,
            param_init_fn=fn,
            device_mesh=mesh,
            device_id=_CPU,
        )


def _init_fsdp1(
    factory: Factory,
    seed: int,
    meter: InitMeter,
    *,
    strategy: ShardingStrategy,
    use_orig_params: bool,
    fill_units: bool,
) -> nn.Module:
    """FSDP1 initialised unit by unit as it wraps them (fill_units), or allocated by it and initialised in place."""
    model = build(factory)
    if not fill_units:
        wrapped = wrap_fsdp1(model, strategy, use_orig_params, param_init_fn(model, device=_CPU, fill=False))
        return _fill_garbage_and_init(wrapped, seed, meter)
    with meter.around(nn.Module()):  # only the recording is evaluated here: the model gets no memory yet
        fill = param_init_fn(model, seed, device=_CPU)

    def metered(module: nn.Module) -> None:
        with meter.around(module):
            fill(module)

    return wrap_fsdp1(model, strategy, use_orig_params, metered)


def wrap_fsdp2(model: nn.Module, *, hybrid: bool = False) -> nn.Module:
    world = dist.get_world_size()
    if hybrid:
        mesh = init_device_mesh("cpu", _mesh_shape(world), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _init_fsdp2(factory: Factory, seed: int, meter: InitMeter, *, hybrid: bool) -> nn.Module:
    return _fill_garbage_and_init(wrap_fsdp2(build(factory), hybrid=hybrid), seed, meter)


@dataclass(frozen=True)
class Layout:
    """init_by: the call that gives the values. init: (factory, seed, meter) to the wrapped, initialised model."""

    name: str
    init_by: str
    init: Callable[[Factory, int, InitMeter], nn.Module]


def _fsdp1_layouts() -> Iterator[Layout]:
    strategies = {
        "full": ShardingStrategy.FULL_SHARD,
        "grad-op": ShardingStrategy.SHARD_GRAD_OP,
        "no-shard": ShardingStrategy.NO_SHARD,
        "hybrid": ShardingStrategy.HYBRID_SHARD,
    }
    for index, (name, strategy) in enumerate(strategies.items()):
        for use_orig_params in (False, True):
            # Alternating, so that each strategy and each use_orig_params goes both ways.
            fill_units = (index % 2 == 0) != use_orig_params
            yield Layout(
                f"fsdp1-{name}" + ("-orig" if use_orig_params else ""),
                "param_init_fn" if fill_units else "init_model_",
                functools.partial(
                    _init_fsdp1, strategy=strategy, use_orig_params=use_orig_params, fill_units=fill_units
                ),
            )


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("unsharded", "init_model_", init_unsharded),
        Layout("ddp", "init_model_", _init_ddp),
        *_fsdp1_layouts(),
        Layout("fsdp2", "init_model_", functools.partial(_init_fsdp2, hybrid=False)),
        Layout("fsdp2-hsdp", "init_model_", functools.partial(_init_fsdp2, hybrid=True)),
    )
}


def select_layouts(text: str | None) -> list[str]:
    """The names that a comma-separated list of names and glob patterns selects, in the order of the table.

    Raises:
        ValueError: a part selects none.
    """
    if text is None:
        return list(LAYOUTS)
    selected: set[str] = set()
    for pattern in text.split(","):
        found = fnmatch.filter(LAYOUTS, pattern.strip())
        if not found:
            raise ValueError(f"layouts must be names or patterns of {', '.join(LAYOUTS)}, got {pattern.strip()!r}")
        selected |= set(found)
    return [name for name in LAYOUTS if name in selected]


@contextlib.contextmanager
def _unsharded_state(model: nn.Module) -> Iterator[nn.Module]:
    """The module as its author wrote it, FSDP1's and DDP's part of unsharding done."""
    if isinstance(model, DistributedDataParallel):
        yield model.module
    elif any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            yield model
    else:
        yield model


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[dict[str, tuple[object, torch.Tensor]]]:
    """Every parameter and buffer in full, from the framework alone: name -> (its memory's identity, the whole tensor).
    Tied tensors come under each of their names, with equal identities. Every rank must take part."""
    with torch.no_grad(), _unsharded_state(model) as module:
        full: dict[int, tuple[object, torch.Tensor]] = {}
        found = {}
        named = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        for name, tensor in named:
            if id(tensor) not in full:
                local = getattr(tensor, "_local_tensor", tensor)
                memory = (local.data_ptr(), tuple(local.shape)) if local.numel() else id(tensor)
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
                full[id(tensor)] = (memory, whole)
            found[clean_tensor_name(name)] = full[id(tensor)]
        yield found
