"""recording(): the context in which a model is built, and what it leaves on the model's modules."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.nn.modules import module as nn_module
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils._python_dispatch import _disable_current_modes

from . import other_generators
from .errors import RecordError
from .locate import deepspeed, megatron, torchrec
from .locate.dtensor import is_dtensor
from .locate.plain import is_plain
from .modes import DispatchMode, FunctionMode
from .program import Ref
from .recorder import Recorder
from .tape import Tape, Writer, drop_dead_numbers, keep_number

ATTRIBUTE = "_shardinit_record"
Kind = Literal["parameter", "buffer"]
_active = threading.local()


@dataclass(frozen=True)
class TensorRecord:
    ref: Ref
    kind: Kind
    persistent: bool
    tensor: weakref.ref[torch.Tensor] | None = None
    version: int = 0  # of the tensor at the end

    def written_since(self, current: torch.Tensor) -> bool:
        """Whether code wrote to the recorded tensor on meta, where nobody can see what."""
        same = self.tensor is not None and self.tensor() is current
        return same and current.is_meta and not current.is_inference() and current._version != self.version


class ModuleRecord:
    """What a recording knows of one module's own parameters and buffers. A module carries it in its __dict__ under any
    wrapper; a copied module carries the same one, a pickled one none."""

    __slots__ = ("tapes", "tensors")

    def __init__(self, tapes: tuple[Tape, ...], tensors: dict[str, TensorRecord]) -> None:
        self.tapes, self.tensors = tapes, tensors

    def __copy__(self) -> ModuleRecord:
        return self

    def __deepcopy__(self, memo: Any) -> ModuleRecord:
        return self

    def __reduce__(self) -> Any:
        return _no_record, ()


def _no_record() -> None:
    """What a pickled record comes back as: a tape is for the process that made it."""


def record_of(module: nn.Module) -> ModuleRecord | None:
    return module.__dict__.get(ATTRIBUTE)


def is_recording() -> bool:
    return getattr(_active, "recorder", None) is not None


def hand_on_records(model: nn.Module) -> None:
    """Sharding by TorchRec makes new modules for the tables of a collection: they get the records of the old ones."""
    for module, record in torchrec.carried_records(model.modules()):
        module.__dict__.setdefault(ATTRIBUTE, record)


def check_not_recording() -> None:
    if is_recording():
        raise RecordError("a recording must not be started inside another one")


@contextlib.contextmanager
def taping(recorder: Recorder) -> Iterator[None]:
    """The two modes, with the generators of torch, Python and NumPy put back at the end. Not to be nested."""
    check_not_recording()
    generator_state = torch.get_rng_state()
    with other_generators.refused() as recorder.other_generators:
        _active.recorder = recorder
        try:
            with torchrec.tables_reset_on_meta(is_recording), DispatchMode(recorder), FunctionMode(recorder):
                yield
        finally:
            _active.recorder = None
            torch.set_rng_state(generator_state)


_watchers: list[_Seen] = []
_watchers_lock = threading.Lock()
_set_state = nn.Module.__setstate__


def _noting_set_state(module: nn.Module, state: Any) -> None:
    _set_state(module, state)
    for seen in [*_watchers]:
        seen.note(module)


@contextlib.contextmanager
def _watching_copies(seen: _Seen) -> Iterator[None]:
    """copy.deepcopy registers nothing, but calls __setstate__. One patch for the recordings of all threads, which may
    end in any order."""
    global _set_state
    with _watchers_lock:
        if not _watchers:
            _set_state = nn.Module.__setstate__
            nn.Module.__setstate__ = _noting_set_state  # type: ignore[method-assign]
        _watchers.append(seen)
    try:
        yield
    finally:
        with _watchers_lock:
            _watchers.remove(seen)
            if not _watchers:
                nn.Module.__setstate__ = _set_state  # type: ignore[method-assign]


class _Seen:
    """The modules that registered something while a recording was on; weakly held, so that those which construction
    threw away do not count as holders of tensors."""

    def __init__(self) -> None:
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._thread = threading.get_ident()  # torch's hooks are the process's, a recording is a thread's

    def note(self, module: nn.Module, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        known = self._modules.get(id(module))
        if known is None or known() is not module:
            self._modules[id(module)] = weakref.ref(module)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        handles = [
            nn_module.register_module_parameter_registration_hook(self.note),
            nn_module.register_module_buffer_registration_hook(self.note),
            nn_module.register_module_module_registration_hook(self.note),
        ]
        with _watching_copies(self):
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def _walk(self) -> dict[int, nn.Module]:
        """Every seen module that still lives, and their children: copied modules are seen only as children."""
        found: dict[int, nn.Module] = {}
        todo = [module for reference in self._modules.values() if (module := reference()) is not None]
        while todo:
            module = todo.pop()
            if id(module) not in found:
                found[id(module)] = module
                todo += [child for child in module._modules.values() if child is not None]
        return found

    def modules(self) -> list[nn.Module]:
        found = self._walk()
        children = {id(child) for module in found.values() for child in module._modules.values()}
        if len(found.keys() - children) > 1:
            # Several trees: some may be garbage that only a cycle keeps, which must not depend on the collector's mood.
            del found
            gc.collect()
            found = self._walk()
        return list(found.values())


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, Kind, bool]]:
    """(name, tensor, kind, persistent) of what a module itself registers."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter, "parameter", True
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, buffer, "buffer", name not in module._non_persistent_buffers_set


def is_lazy(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, UninitializedTensorMixin)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Build the model inside this, and run its init code there too where the constructor does not.

    Nothing is allocated: tensors are on meta, except those made with an explicit device="cpu" and empty ones. Every
    operation is taped, and the model's modules carry the tape through any wrapping, to `record` and `init_model_`.
    torch's generator is where it was when this ends. After an exception nothing stays behind.

    Raises:
        RecordError: recordings are nested; or init code needs values that a recording does not have (of random
            numbers, or of memory that nothing wrote), or works on sharded tensors: the message names the line.
    """
    seen, recorder = _Seen(), Recorder()
    with deepspeed.partitioning_later(seen.modules) as partitioning, megatron.wholes_on_meta() as wholes:
        with taping(recorder), seen.watching():
            yield
            if megatron.is_used():
                modules = seen.modules()
                modules += _written_again(recorder.writer, modules)
                wholes.complete(modules, recorder.writer, functools.partial(_constant_now, recorder))
    modules = seen.modules()
    _attach(recorder, modules, wholes)
    partitioning.carry_out(modules)


# The modules that carry a record, by id.
_recorded: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def _written_again(writer: Writer, seen: list[nn.Module]) -> list[nn.Module]:
    """Modules of earlier recordings, not seen in this one, that have tensors which this one wrote."""
    ids, found = {id(module) for module in seen}, []
    for module in [*_recorded.values()]:
        record = record_of(module)
        if id(module) in ids or record is None:
            continue
        for name, tensor, _, _ in own_tensors(module):
            number = None if is_lazy(tensor) or name not in record.tensors else writer.known_number(tensor)
            if number is None or not any(not node.info.is_empty for node, _ in writer.tape.writers(number)):
                continue
            if number != record.tensors[name].ref.storage:
                raise RecordError(
                    f"{type(module).__name__}.{name} was recorded, then got memory or was replaced, and was now "
                    "written inside another recording(): give such code as init_fn, to init_model_(..., init_fn=...)"
                )
            found.append(module)
            break
    return found


def _was_sharded_before(writer: Writer, tensor: torch.Tensor) -> bool:
    """Whether a DTensor is none of this recording's: no operation of it has met the local tensor's memory."""
    if not is_dtensor(tensor):
        return False
    local = tensor._local_tensor  # type: ignore[attr-defined]
    number = writer.known_number(local)
    return is_plain(local) and (number is None or not writer.tape.writers(number))


def _constant_now(recorder: Recorder, tensor: torch.Tensor, what: str) -> float:
    """The one value that all elements of a recorded tensor have."""
    try:
        (values,) = recorder.values([tensor], what)
    except RecordError as error:
        raise RecordError(f"{error}. Give such code as init_fn, which sees the whole") from error
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        flat = values.reshape(-1)
        if not bool((flat == flat[0]).all()):
            raise RecordError(f"{what}, got different values. Give such code as init_fn, which sees the whole")
        return flat[0].item()


def _attach(recorder: Recorder, modules: list[nn.Module], wholes: megatron.Wholes) -> None:
    writer, records = recorder.writer, []
    for module in [*modules, *_written_again(writer, modules)]:
        tensors = {}
        earlier = record_of(module)
        for name, tensor, kind, persistent in own_tensors(module):
            if is_lazy(tensor) or tensor.layout is not torch.strided:
                continue
            if _was_sharded_before(writer, tensor):  # an adapter was put around a module that is sharded
                if earlier is not None and name in earlier.tensors:
                    tensors[name] = earlier.tensors[name]
                continue
            if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                raise RecordError(
                    f"{type(module).__name__}.{name} is a {type(tensor).__name__} at the end of the recording: only "
                    "plain tensors can be recorded; shard the model after recording()"
                )
            if tensor.is_conj() or tensor.is_neg():
                raise RecordError(
                    f"{type(module).__name__}.{name} is a lazily conjugated or negated view, which cannot be recorded; "
                    "use torch.conj_physical or torch.neg"
                )
            if tensor.device.type != "meta":
                writer.capture(tensor)
            tensors[name] = TensorRecord(
                writer.ref(wholes.of(tensor)),
                kind,
                persistent,
                weakref.ref(tensor),
                0 if tensor.is_inference() else tensor._version,
            )
        if tensors:
            records.append((module, tensors))
    tape = writer.finish()
    tape.num_registered = dict(Counter(one.ref for _, tensors in records for one in tensors.values()))
    tape.owners = set(tape.num_registered)
    drop_dead_numbers()
    for module, tensors in records:
        before = record_of(module)  # built in an earlier recording
        tapes = {id(one): one for one in (*(before.tapes if before else ()), *writer.earlier.values(), tape)}
        module.__dict__[ATTRIBUTE] = ModuleRecord(tuple(tapes.values()), tensors)
        _recorded[id(module)] = module
        for name, tensor, _, _ in own_tensors(module):
            if name in tensors and is_plain(tensor):
                keep_number(tensor, tensors[name].ref.storage, tuple(tapes.values()))
    torchrec.note_collections(modules, record_of)
