"""record(): from a model and its init code to a Plan."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn as nn

from . import region as rg
from .derive import Deriver, Elsewhere, NotExact, ReadsUnwritten, Tangled, Term, locate
from .errors import RecordError
from .locate.names import is_wrapper_child, join, walk_modules
from .plan import Entry, Plan
from .program import Exact, Program, Ref, Unwritten
from .recorder import Recorder
from .recording import check_not_recording, hand_on_records, record_of, recording, taping
from .region import Box
from .slicing import DrawUse, Refused, Slicer, UnwrittenAtEnd, not_last
from .standins import ModelTensor, is_plain, stand_ins, tensors_of
from .tape import Node, Tape

__all__ = ["record", "recording", "reset_parameters"]

Rename = Callable[[str], str]
_END = sys.maxsize
_OUTSIDE = "nothing wrote it: its module was not built inside recording(), and the init code does not write it"


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
        return Plan(_Classifier(tape, named, ordinary).entries())


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


@dataclass(eq=False)
class _Named:
    """A tensor of the model with all its names. ref: None where no tape knows it."""

    names: list[str]
    first: ModelTensor
    ref: Ref | None
    persistent: bool = False
    num_registered: int = 0

    @property
    def name(self) -> str:
        return min(self.names)


def _named(
    model: nn.Module, tensors: Sequence[ModelTensor], refs: Sequence[Ref | None], rename: Rename | None
) -> list[_Named]:
    refs = _with_late_ties(tensors, refs)
    by_module: dict[int, list[tuple[ModelTensor, Ref | None]]] = {}
    for one, ref in zip(tensors, refs, strict=True):
        by_module.setdefault(id(one.module), []).append((one, ref))
    groups: dict[object, _Named] = {}
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
            group = groups.setdefault(key, _Named([], one, ref))
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


@dataclass
class _Found:
    program: Program
    terms: list[Term] = field(default_factory=list)
    draws: list[DrawUse] = field(default_factory=list)


class _Classifier:
    """Gives each tensor its program, or collects why it has none."""

    def __init__(self, tape: Tape, named: Sequence[_Named], ordinary: bool) -> None:
        self.tape, self.named, self.ordinary = tape, named, ordinary
        self.refs: dict[Ref, str] = {one.ref: one.name for one in named if one.ref is not None and one.ref.numel()}
        owners: dict[int, list[tuple[str, Ref]]] = {}
        for ref, name in self.refs.items():
            owners.setdefault(ref.storage, []).append((name, ref))
        self.owners = owners
        self.deriver = Deriver(tape)
        self.slicer = Slicer(tape, owners, self.deriver)
        self.problems: list[str] = []

    def entries(self) -> list[Entry]:
        for shared in self.owners.values():
            self._check_apart(shared)
        found = {one.name: self._find(one) for one in self.named}
        self._check_moved(found)
        self._check_foreign(found)
        self._check_ties(found)
        if self.problems:
            shown = "\n  ".join(self.problems[:12])
            more = f"\n  ... and {len(self.problems) - 12} more" if len(self.problems) > 12 else ""
            raise RecordError(f"{len(self.problems)} tensors cannot be recorded:\n  {shown}{more}")
        return [self._entry(one, found[one.name].program) for one in self.named]

    def _entry(self, one: _Named, program: Program) -> Entry:
        first = one.first
        shape, dtype = (one.ref.sizes, one.ref.dtype) if one.ref is not None else (first.shape, first.dtype)
        kept = self.ordinary and first.kind == "buffer" and isinstance(program, Unwritten)
        return Entry(one.name, tuple(sorted(one.names)), first.kind, shape, dtype, program, one.persistent, kept)

    def _check_apart(self, shared: list[tuple[str, Ref]]) -> None:
        for position, (name, ref) in enumerate(shared):
            for other_name, other in shared[:position]:
                if _overlap(ref, other):
                    self.problems.append(
                        f"{name} and {other_name}: two tensors that share elements without being the same "
                        "(a transposed tie?) are not supported yet"
                    )

    def _find(self, one: _Named) -> _Found:
        ref = one.ref
        if ref is None:
            return _Found(Unwritten(_OUTSIDE))
        if not ref.numel():
            return _Found(Exact(()))
        try:
            terms = self.deriver.derive(ref, _END, ref.storage)
        except ReadsUnwritten as error:
            return _Found(Unwritten(str(error)))
        except NotExact:
            return self._play(one.name, ref)
        program = Exact(tuple(term.step for term in terms))
        if not terms:
            return _Found(Unwritten())
        left = program.unwritten(ref.sizes)
        if left:
            spans = ", ".join(f"{s.start}:{s.last + 1}" for s in left[0])
            return _Found(Unwritten(f"nothing wrote some of its elements, [{spans}] for one"))
        return _Found(program, terms)

    def _play(self, name: str, ref: Ref) -> _Found:
        try:
            piece = self.slicer.slice([ref], _END)
        except ReadsUnwritten as error:
            return _Found(Unwritten(str(error)))
        except UnwrittenAtEnd:
            writers = [node for node, _ in self.tape.writers(ref.storage) if not node.info.is_empty]
            return _Found(Unwritten("nothing wrote some of its elements" if writers else "nothing wrote it"))
        except Refused as error:
            self.problems.append(f"{name}: {error}")
            return _Found(Unwritten("refused"))
        return _Found(piece.played, draws=piece.draws)

    def _check_moved(self, found: dict[str, _Found]) -> None:
        """A random element may end up in one place only. Tensors that the recording knows and the model does not have
        count too, so that a part of a model has the values that the whole has."""
        uses: dict[int, list[tuple[str, Term]]] = {}
        for name, one in found.items():
            for term in one.terms:
                if term.random:
                    uses.setdefault(term.node.index, []).append((name, term))
        for ref in self.tape.owners - self.refs.keys():
            try:
                terms = self.deriver.derive(ref, _END, ref.storage)
            except (NotExact, ReadsUnwritten):
                continue
            for term in terms:
                if term.random:
                    uses.setdefault(term.node.index, []).append(("", term))
        for several in uses.values():
            for position, (name, term) in enumerate(several):
                for other_name, other in several[:position]:
                    if term.taken is None or other.taken is None or rg.intersect(term.taken, other.taken) is not None:
                        self._refuse_copies(name, other_name, term)

    def _refuse_copies(self, name: str, other: str, term: Term) -> None:
        if not name and not other:
            return
        name, other = (name, other) if name else (other, name)
        second = "another tensor outside of this model" if not other else other if other != name else "itself, twice"
        self.problems.append(
            f"{name}: the random numbers of {term.node.info.label} at {term.node.line} also reach {second} (a copied "
            "layer?): not supported yet"
        )

    def _check_foreign(self, found: dict[str, _Found]) -> None:
        """A tensor that is computed from another's random numbers must use those which that one ends up with."""
        own = {
            name: [(t.node if t.random else None, t.step.region) for t in one.terms if t.step.overwrites]
            if one.terms
            else [(use.node, use.region) for use in one.draws if use.name == name]
            for name, one in found.items()
        }
        sizes = {name: ref.sizes for ref, name in self.refs.items()}
        for name, one in found.items():
            used: dict[str, list[tuple[Node | None, Box | None]]] = {}
            for use in one.draws:
                if use.name != name:
                    used.setdefault(use.name, []).append((use.node, use.region))
            for other, writes in used.items():
                drawn_again = not_last(writes, own[other], sizes[other])
                if drawn_again is not None:
                    self.problems.append(
                        f"{name}: it is computed from random numbers that {other} had at {drawn_again.line} and that "
                        "were drawn again since: not supported yet"
                    )

    def _check_ties(self, found: dict[str, _Found]) -> None:
        """A tied tensor draws by the least of its names: where a part of a model holds it, that must not be outside."""
        for one in self.named:
            if one.ref is None or one.num_registered >= self.tape.num_registered.get(one.ref, 0):
                continue
            terms, draws = found[one.name].terms, found[one.name].draws
            if any(term.random for term in terms) or any(use.name == one.name for use in draws):
                self.problems.append(
                    f"{one.name}: it was recorded under a name outside of this model too (a tie), and the least of all "
                    "names decides its values: record the whole model, and apply that Plan to its parts"
                )


def _overlap(a: Ref, b: Ref) -> bool:
    where = locate(a, b)
    if where is Elsewhere:
        return False
    if where is not Tangled or a.dtype != b.dtype:
        return True
    # Rare: views that interleave. Mark one, look at the other.
    end = 1 + max(
        ref.offset + sum((n - 1) * stride for n, stride in zip(ref.sizes, ref.strides, strict=True)) for ref in (a, b)
    )
    marks = torch.zeros(end, dtype=torch.bool)
    marks.as_strided(a.sizes, a.strides, a.offset).fill_(True)
    return bool(marks.as_strided(b.sizes, b.strides, b.offset).any())
