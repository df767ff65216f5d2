"""A model's tensors as init code should see them: plain meta tensors of global shape, whatever holds them now.

`tensors_of` says what each module has, through FSDP1 flat parameters too. `stand_ins` swaps meta tensors of those
shapes into the modules, ties kept, for as long as init code runs, and puts everything back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from .errors import RecordError
from .locate import fsdp2
from .locate.frameworks import held_by_frameworks
from .locate.fsdp1 import entries, flat_parameter_of, handle_of
from .locate.held import Held
from .program import Ref
from .recorder import Recorder
from .recording import Kind, ModuleRecord, TensorRecord, is_lazy, own_tensors, record_of

# Set by transformers on what it has initialised; init code then does nothing.
_DONE_FLAG = "_is_hf_initialized"


@dataclass(eq=False)
class ModelTensor:
    """One name of a tensor. tied: equal for names of one tensor as the model holds it now. known: what a recording
    says about it. current: the registered tensor, if it is one of its own (not part of a flat parameter)."""

    module: nn.Module
    name: str
    kind: Kind
    persistent: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    tied: Any
    known: TensorRecord | None
    current: torch.Tensor | None
    requires_grad: bool = False

    @property
    def written_on_meta(self) -> bool:
        return self.known is not None and self.current is not None and self.known.written_since(self.current)


def _handles(model: nn.Module) -> list[Any]:
    """Those of a model's FSDP1 units."""
    handles = [handle for module in model.modules() if (handle := handle_of(module)) is not None]
    return list({id(one): one for one in handles}.values())


def flat_parameters(model: nn.Module) -> list[torch.Tensor]:
    """The FSDP1 flat parameters of a model."""
    return [flat_parameter_of(handle) for handle in _handles(model)]


def _in_flat_parameters(model: nn.Module) -> dict[tuple[int, str], tuple[Any, tuple[int, ...], Any]]:
    """(id of module, name) -> (tie key, global shape, flat parameter) of what FSDP1 has flattened."""
    found: dict[tuple[int, str], tuple[Any, tuple[int, ...], Any]] = {}
    for handle in _handles(model):
        for entry in entries(handle):
            first, attribute = entry.owners[0]
            key = ("flat", id(first), attribute)
            for module, name in entry.owners:
                found[id(module), name] = (key, entry.global_shape, flat_parameter_of(handle))
    return found


def held_elsewhere(model: nn.Module) -> tuple[dict[int, list[tuple[str, Held, Any]]], set[int]]:
    """What frameworks outside torch hold: id of module -> (name, parameter, tie key); and the ids of what they register
    in the place of it."""
    parameters = held_by_frameworks(model.modules())
    found: dict[int, list[tuple[str, Held, Any]]] = {}
    for one in parameters.tensors:
        first, first_name = one.holders[0]
        for module, name in one.holders:
            found.setdefault(id(module), []).append((name, one, ("held", id(first), first_name)))
    return found, parameters.hidden | {id(one.owner) for one in parameters.tensors}


def tensors_of(model: nn.Module) -> list[ModelTensor]:
    """Every parameter and buffer of every module, once for each module and name."""
    flattened = _in_flat_parameters(model)
    flat_ids = {id(flat) for flat in flat_parameters(model)}
    names_in_flat: dict[int, list[str]] = {}
    for module_id, name in flattened:
        names_in_flat.setdefault(module_id, []).append(name)
    held, hidden = held_elsewhere(model)
    found = []
    for module in model.modules():
        record = record_of(module)
        for name in names_in_flat.get(id(module), ()):
            tied, shape, flat = flattened[id(module), name]
            known = _known(record, name)
            found.append(
                ModelTensor(
                    module, name, "parameter", True, shape, flat.dtype, tied, known, None, bool(flat.requires_grad)
                )
            )
        for name, one, tied in held.get(id(module), ()):
            known = _known(record, name)
            if known is not None and known.ref.sizes != one.shape:
                known = None
            found.append(
                ModelTensor(module, name, "parameter", True, one.shape, one.dtype, tied, known, None, one.requires_grad)
            )
        for name, tensor, kind, persistent in own_tensors(module):
            if (id(module), name) in flattened or id(tensor) in flat_ids or id(tensor) in hidden:
                continue
            where = f"{type(module).__name__}.{name}"
            if is_lazy(tensor):
                raise RecordError(f"{where} is lazy and has no shape yet: run the model once first, on meta if need be")
            known = _known(record, name)
            if known is not None and known.ref.numel() and tuple(tensor.shape) == (0,):
                raise RecordError(
                    f"{where} was recorded with shape {list(known.ref.sizes)} and is empty now: it stands for a tensor "
                    "that a framework unknown to this library holds elsewhere. Record the model before, and fill what "
                    "holds the elements: Plan.fill_"
                )
            elif known is not None and known.ref.sizes != tuple(tensor.shape):
                known = None  # replaced since (a resized embedding): what was recorded is of another tensor
            found.append(
                ModelTensor(
                    module,
                    name,
                    kind,
                    persistent,
                    tuple(tensor.shape),
                    tensor.dtype,
                    same_elements_key(tensor),
                    known,
                    tensor,
                    tensor.requires_grad,
                )
            )
    return found


def _known(record: ModuleRecord | None, name: str) -> TensorRecord | None:
    return record.tensors.get(name) if record is not None else None


def is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


def same_elements_key(tensor: torch.Tensor) -> Any:
    """Equal for two registrations of the same elements."""
    if not is_plain(tensor):
        return id(tensor)
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return id(tensor)
    return storage._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


class _Maker:
    """Makes the stand-ins: one storage for each storage, one tensor for each tensor."""

    def __init__(self, recorder: Recorder, num_bytes: dict[int, int]) -> None:
        self.recorder, self.num_bytes = recorder, num_bytes
        self._storages: dict[Any, torch.UntypedStorage] = {}
        self._tensors: dict[Any, torch.Tensor] = {}

    def make(self, one: ModelTensor) -> torch.Tensor:
        key = one.known.ref if one.known is not None else one.tied
        key = (key, one.kind)
        if key not in self._tensors:
            self._tensors[key] = self._new(one)
        return self._tensors[key]

    def _new(self, one: ModelTensor) -> torch.Tensor:
        known = one.known.ref if one.known is not None else None
        if known is not None and known.numel():
            # Recorded tensors keep their layout: views of one storage stay views of one storage.
            storage = self._storage(known.storage, self.num_bytes[known.storage])
            self.recorder.writer.adopt(storage, known.storage)
            tensor = _viewed(storage, known)
        elif one.current is not None and is_plain(one.current) and one.current.numel():
            current = one.current.untyped_storage()
            storage = self._storage(("now", current._cdata), current.nbytes())
            place = Ref(0, int(one.current.storage_offset()), one.shape, one.current.stride(), one.dtype)
            tensor = _viewed(storage, place)
        else:
            tensor = torch.empty(one.shape, dtype=one.dtype, device="meta")
        if one.kind == "parameter":
            differentiable = tensor.is_floating_point() or tensor.is_complex()
            tensor = nn.Parameter(tensor, requires_grad=one.requires_grad and differentiable)
        if one.current is not None:  # attributes that init code looks at
            for name, value in one.current.__dict__.items():
                if name != _DONE_FLAG:
                    tensor.__dict__.setdefault(name, value)
        return tensor

    def _storage(self, key: Any, num_bytes: int) -> torch.UntypedStorage:
        if key not in self._storages:
            self._storages[key] = torch.UntypedStorage(num_bytes, device="meta")
        return self._storages[key]


def _viewed(storage: torch.UntypedStorage, ref: Ref) -> torch.Tensor:
    empty = torch.empty(0, dtype=ref.dtype, device="meta")
    return empty.set_(storage, ref.offset, ref.sizes, ref.strides)  # type: ignore[call-overload]


@contextlib.contextmanager
def stand_ins(
    model: nn.Module, tensors: list[ModelTensor], recorder: Recorder, num_bytes: dict[int, int]
) -> Iterator[dict[tuple[int, str], torch.Tensor]]:
    """Meta stand-ins in the model's modules: (id of module, name) -> stand-in. All that init code does to the modules
    themselves (attributes, registrations, flags) is undone at the end, and after an exception."""
    modules = list(model.modules())
    saved = [_save(module) for module in modules]
    classes = [type(module) for module in modules]
    undo_apply = _plain_apply(modules)
    maker = _Maker(recorder, num_bytes)
    made: dict[tuple[int, str], torch.Tensor] = {}
    try:
        for one in tensors:
            made[id(one.module), one.name] = maker.make(one)
        flat_ids = {id(flat) for flat in flat_parameters(model)} | held_elsewhere(model)[1]
        for module in modules:
            for name in [name for name, value in module._parameters.items() if id(value) in flat_ids]:
                del module._parameters[name]
            module.__dict__.pop(_DONE_FLAG, None)
        for one in tensors:
            registry: dict[str, Any] = one.module._parameters if one.kind == "parameter" else one.module._buffers
            one.module.__dict__.pop(one.name, None)  # FSDP1 leaves views there that would hide the parameter
            registry[one.name] = made[id(one.module), one.name]
        for module in modules:
            if (written := fsdp2.written_class(module)) is not type(module):
                module.__class__ = written
            if isinstance(module, nn.RNNBase):
                weights = [module._parameters.get(name) for name in module._flat_weights_names]
                module.__dict__["_flat_weights"] = weights
        yield made
    finally:
        undo_apply()
        for module, state, cls in zip(modules, saved, classes, strict=True):
            _restore(module, state)
            if type(module) is not cls:
                module.__class__ = cls


_REGISTRIES = ("_parameters", "_buffers", "_modules")


def _save(module: nn.Module) -> tuple[dict[str, Any], list[dict[str, Any]], set[str]]:
    return (
        dict(module.__dict__),
        [dict(module.__dict__[key]) for key in _REGISTRIES],
        set(module._non_persistent_buffers_set),
    )


def _restore(module: nn.Module, state: tuple[dict[str, Any], list[dict[str, Any]], set[str]]) -> None:
    attributes, registries, non_persistent = state
    module.__dict__.clear()
    module.__dict__.update(attributes)
    for key, before in zip(_REGISTRIES, registries, strict=True):
        registry = module.__dict__[key]
        registry.clear()
        registry.update(before)
    module._non_persistent_buffers_set.clear()
    module._non_persistent_buffers_set.update(non_persistent)


def _plain_apply(modules: list[nn.Module]) -> Any:
    """Module.apply of FSDP, torch's and FairScale's, gathers the real parameters first; on stand-ins it must be the
    ordinary one."""
    classes: set[Any] = {
        cls
        for module in modules
        for cls in type(module).__mro__
        if cls.__name__ == "FullyShardedDataParallel"
        and cls.__module__.startswith(("torch.", "fairscale."))
        and "apply" in vars(cls)
    }
    before = [(cls, vars(cls)["apply"]) for cls in classes]
    for cls in classes:
        cls.apply = nn.Module.apply

    def undo() -> None:
        for cls, apply in before:
            cls.apply = apply

    return undo
