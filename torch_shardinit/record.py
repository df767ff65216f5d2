"""record(): from a model and its init code to a Plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn as nn

from .classify import Classifier, Named
from .errors import RecordError
from .locate.names import is_wrapper_child, join, walk_modules
from .plan import Plan
from .program import Ref
from .recorder import Recorder
from .recording import check_not_recording, hand_on_records, record_of, recording, taping
from .standins import ModelTensor, is_plain, stand_ins, tensors_of
from .tape import Tape

__all__ = ["record", "recording", "reset_parameters"]

Rename = Callable[[str], str]


def reset_parameters(model: nn.Module) -> None:
    """An init_fn: calls each module's reset_parameters, else its _reset_parameters, children first.

    These are torch's defaults for each module, which are not what every constructor leaves: prefer recording().
    """
    done: set[int] = set()

    def reset(module: nn.Module) -> None:
        if id(module) in done:
            return
        done.add(id(module))
        for child in module.children():
            reset(child)
        if any(is_wrapper_child(module, name) for name in module._modules):
            return  # what a wrapper has of that name is not the model's
        # From the class: wrappers pass unknown attributes on to what they wrap.
        for name in ("reset_parameters", "_reset_parameters"):
            if callable(getattr(type(module), name, None)):
                getattr(module, name)()
                return

    reset(model)


def record(
    model: nn.Module, init_fn: Callable[[nn.Module], object] | None = None, *, rename: Rename | None = None
) -> Plan:
    """The Plan of a model: the tape that it carries from recording(), then `init_fn(model)`.

    Args:
        model: built inside recording(), or any model if init_fn is given; wrapped and sharded in any way.
        init_fn: called with the model, whose parameters and buffers are meta stand-ins of global shape meanwhile; what
            it changes on the modules is undone. It writes over what recording() taped.
        rename: from a name in `model` to the name in the whole model, where this is a part of it.

    Raises:
        RecordError: there is nothing to record; init code did what cannot be reproduced (the message names the tensor,
            the operation and the line); or init_fn wrote nothing.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"record: model must be a torch.nn.Module, got {type(model).__name__}")
    check_not_recording()
    hand_on_records(model)
    tensors = tensors_of(model)
    records = [found for module in model.modules() if (found := record_of(module)) is not None]
    tapes = list({id(tape): tape for found in records for tape in found.tapes}.values())
    if not tapes and init_fn is None and tensors:
        raise RecordError(
            "the model was not built inside recording(), so what its constructor wrote is unknown. Build it in "
            "`with shardinit.recording():`, or give its init code: record(model, init_fn), with reset_parameters for "
            "torch's defaults"
        )
    written = [one.name for one in tensors if one.written_on_meta]
    if written:
        warnings.warn(
            f"{len(written)} tensors were written on meta after recording() had ended ({', '.join(written[:8])}): that "
            "left no trace and counts for nothing. Run init code inside recording(), or give it as init_fn",
            stacklevel=2,
        )
    tape = Tape.merged(tapes)
    refs = [one.known.ref if one.known is not None else None for one in tensors]
    if init_fn is not None:
        after, new_refs = _run_init(model, init_fn, tensors, tape.num_bytes)
        tape = Tape.merged([*tapes, after])
        tape.owners = (tape.owners - {ref for ref in refs if ref is not None}) | set(new_refs)
        refs = [*new_refs]
    named = _named(model, tensors, refs, rename)
    ordinary = all(one.current is not None and is_plain(one.current) and not one.current.is_meta for one in tensors)
    with torch.device("cpu"):  # whatever the default device is
        return Plan(Classifier(tape, named, ordinary).entries())


def _run_init(
    model: nn.Module, init_fn: Callable[[nn.Module], object], tensors: Sequence[ModelTensor], num_bytes: dict[int, int]
) -> tuple[Tape, list[Ref]]:
    """The tape of init_fn on stand-ins, and where each tensor is at the end."""
    recorder = Recorder()
    writer = recorder.writer
    with stand_ins(model, list(tensors), recorder, num_bytes) as made:
        before = {key: writer.ref(tensor) for key, tensor in made.items()}
        with taping(recorder):
            init_fn(model)
        refs = []
        for one in tensors:
            key = (id(one.module), one.name)
            registry = one.module._parameters if one.kind == "parameter" else one.module._buffers
            tensor = registry.get(one.name)
            if tensor is None:  # unregistered: nobody will see what becomes of it
                tensor = made[key]
            if not is_plain(tensor):
                kind = type(tensor).__name__
                raise RecordError(f"init code made {one.name} a {kind}: only plain tensors can be recorded")
            if tensor.device.type != "meta":
                writer.capture(tensor)
            refs.append(writer.ref(tensor))
        tape = writer.finish()
    storages = {ref.storage for ref in refs}
    moved = any(ref != before[id(one.module), one.name] for one, ref in zip(tensors, refs, strict=True))
    if tensors and not moved and not any(ref.storage in storages for node in tape.nodes for ref in node.results()):
        raise RecordError(
            "init_fn wrote no parameter or buffer of the model. Usual causes: a flag says that it was initialised "
            "already (transformers: _is_hf_initialized); it looks at a device or at is_meta and returns early; it "
            "writes through torch.from_numpy, NumPy or another copy; it initialises another model"
        )
    return tape, refs


def _named(
    model: nn.Module, tensors: Sequence[ModelTensor], refs: Sequence[Ref | None], rename: Rename | None
) -> list[Named]:
    refs = _with_late_ties(tensors, refs)
    by_module: dict[int, list[tuple[ModelTensor, Ref | None]]] = {}
    for one, ref in zip(tensors, refs, strict=True):
        by_module.setdefault(id(one.module), []).append((one, ref))
    groups: dict[object, Named] = {}
    counted: set[tuple[int, str]] = set()
    for prefix, module in walk_modules(model):
        for one, ref in by_module.get(id(module), ()):
            name = join(prefix, one.name)
            name = rename(name) if rename is not None else name
            if not isinstance(name, str):
                raise TypeError(f"rename must return a str, got {name!r}")
            # Tensors without elements share no memory, so they are told apart by where they are registered.
            empty = ref is not None and not ref.numel()
            key: object = ("current", one.tied) if ref is None or empty else ref
            group = groups.setdefault(key, Named([], one, ref))
            if name not in group.names:
                group.names.append(name)
            group.persistent |= one.persistent
            if (id(module), one.name) not in counted:
                counted.add((id(module), one.name))
                group.num_registered += 1
    return list(groups.values())


def _with_late_ties(tensors: Sequence[ModelTensor], refs: Sequence[Ref | None]) -> list[Ref | None]:
    """Names that were tied after they had been recorded as several tensors get the one that the model kept."""
    result = list(refs)
    by_tie: dict[object, list[int]] = {}
    for index, one in enumerate(tensors):
        by_tie.setdefault(one.tied, []).append(index)
    for indices in by_tie.values():
        found = {refs[index] for index in indices}
        if len(indices) == 1 or len(found) == 1:
            continue
        kept = {
            refs[index]
            for index in indices
            if (known := tensors[index].known) is not None
            and known.tensor is not None
            and tensors[index].current is not None
            and known.tensor() is tensors[index].current
        }
        if len(kept) != 1:
            one = tensors[indices[0]]
            raise RecordError(
                f"{type(one.module).__name__}.{one.name} shares its memory with another parameter now, but was "
                "recorded as a tensor of its own: tie parameters inside recording()"
            )
        for index in indices:
            result[index] = next(iter(kept))
    return result
