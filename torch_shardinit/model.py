"""The calls most users need: a whole model, after wrapping or while FSDP1 wraps it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn

from .locate import fairscale
from .locate.fsdp1 import is_inside_unit
from .locate.names import join, walk_modules
from .plan import Plan
from .record import record
from .standins import same_elements_key
from .stream import resolve_seed

InitFn = Callable[[nn.Module], object]
Rename = Callable[[str], str]


def _registered(model: nn.Module) -> dict[int, tuple[torch.Tensor, list[tuple[nn.Module, str]]]]:
    """Each registered parameter, by identity, with every place where it is registered."""
    found: dict[int, tuple[torch.Tensor, list[tuple[nn.Module, str]]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (parameter, []))[1].append((module, name))
    return found


def materialise_(model: nn.Module, device: torch.device | str) -> None:
    """Gives every tensor on meta uninitialised memory on ``device``; tied parameters stay one parameter, and tensors
    that are the same elements of one storage share their memory.

    Module.to_empty would untie them, and reallocate what already has memory.
    """
    fairscale.materialise_(model, device)
    registered = _registered(model)
    ties = [places for _, places in registered.values() if len(places) > 1]
    fresh: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        key = same_elements_key(tensor)
        if key not in fresh:
            # The old tensor stays referenced, so that its id and storage are not used again.
            fresh[key] = tensor, torch.empty_like(tensor, device=device)
        return fresh[key][1]

    for parameter in model.parameters():
        if parameter.is_meta:
            parameter.grad = None  # of a run on meta: it has no values
    model._apply(allocate)
    for (first, name), *others in ties:
        for module, other_name in others:
            module._parameters[other_name] = first._parameters[name]
    for before, ((module, name), *_) in registered.values():
        now = module._parameters.get(name)
        if now is not None and now is not before:  # what frameworks and optimizers know parameters by
            for attribute, value in before.__dict__.items():
                now.__dict__.setdefault(attribute, value)


def init_model_(
    model: nn.Module,
    seed: int | None = None,
    *,
    init_fn: InitFn | None = None,
    rename: Rename | None = None,
    keep: Sequence[str] = (),
    device: torch.device | str | None = None,
) -> nn.Module:
    """Initialises a model in place, sharded or not, with the values that one process would give the unsharded model.

    Args:
        model: built inside recording(), or with an ``init_fn``; wrapped in any way (DDP, FSDP1, FSDP2, ...).
        seed: int in [-2^63, 2^64); None is the process default (manual_seed).
        init_fn: called with the model on meta stand-ins of global shape, after what recording() taped;
            ``reset_parameters`` is one.
        rename: from a name in ``model`` to the name in the whole model, where this is a part of it.
        keep: glob patterns of tensors to leave alone.
        device: where tensors on meta get their memory first; ties are kept.

    Returns:
        The model. No collective is issued, no torch generator read or moved.

    Raises:
        UninitializedError: nothing writes some tensors; it names all of them.
        RecordError: the init code does what can't be reproduced under sharding; it names the tensor and the line.
    """
    plan = record(model, init_fn, rename=rename)
    if device is not None:
        materialise_(model, device)
    plan.apply_(model, seed, rename=rename, keep=keep)
    return model


def _default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


class _UnitInit:
    """The callable that FSDP1 runs on each module of a unit, before it flattens the unit's parameters."""

    def __init__(
        self, model: nn.Module, plan: Plan | None, seed: int | None, rename: Rename | None, device: torch.device
    ) -> None:
        self.plan = plan
        self.seed = seed
        self.rename = rename
        self.device = device
        # FSDP passes modules without their names, so they are noted while the model is whole. Holding the modules keeps
        # their ids theirs.
        self.modules = [(name, module) for name, module in walk_modules(model)]
        self.names: dict[int, str] = {}
        for name, module in self.modules:
            self.names.setdefault(id(module), name)
        # From a meta tensor to its memory: a tied parameter is met in several modules and must stay one.
        self.memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, module: nn.Module) -> None:
        if id(module) not in self.names:
            raise ValueError(
                "param_init_fn: the module must be part of the model that it was made for, got a "
                f"{type(module).__name__}"
            )
        prefix = self.names[id(module)]
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for registry in registries:
            for attribute, tensor in list(registry.items()):
                if tensor is not None:
                    registry[attribute] = self._materialised(join(prefix, attribute), tensor)
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]

    def _materialised(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            # Memory of ours, met again through another unit, or a buffer that has been real from the start.
            if not isinstance(tensor, nn.Parameter) or any(tensor is memory for _, memory in self.memory.values()):
                return tensor
            raise ValueError(f"param_init_fn: every parameter must be on meta, got {name} on {tensor.device}")
        if id(tensor) not in self.memory:
            memory = torch.empty_like(tensor, device=self.device)
            if self.plan is not None:
                self.plan.fill_(self.rename(name) if self.rename else name, memory, seed=self.seed)
            if isinstance(tensor, nn.Parameter):
                memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
            self.memory[id(tensor)] = (tensor, memory)
        return self.memory[id(tensor)][1]


def param_init_fn(
    model: nn.Module,
    seed: int | None = None,
    *,
    init_fn: InitFn | None = None,
    rename: Rename | None = None,
    device: torch.device | str | None = None,
    fill: bool = True,
) -> Callable[[nn.Module], None]:
    """A ``param_init_fn`` for FullyShardedDataParallel that fills each unit as FSDP materialises it.

    FSDP materialises a unit whole on every rank. With ``fill=False`` it only allocates, ties kept: call init_model_ on
    the wrapped model then, which fills the flat shards in place and never holds a unit's values in full.

    Args:
        model: the whole model, all of it on meta but for parts that are FSDP units already.
        seed, init_fn, rename: as for init_model_.
        device: where the parameters get their memory; by default the current accelerator, else the CPU.
        fill: False allocates only; seed, init_fn and rename are then not looked at.

    Raises:
        ValueError: a parameter is not on meta, for FSDP would then never call the function.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and not is_inside_unit(parameter):
            raise ValueError(
                f"param_init_fn: every parameter must be on meta, or FSDP never calls the function, got {name} on "
                f"{parameter.device}. Build the model inside recording()."
            )
    where = torch.device(device) if device is not None else _default_device()
    if not fill:
        return _UnitInit(model, None, None, None, where)
    plan = record(model, init_fn, rename=rename)
    return _UnitInit(model, plan, resolve_seed(seed, warn_for="param_init_fn"), rename, where)
