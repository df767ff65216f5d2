"""From a tape and the names of a model's tensors to their programs.

Each tensor is looked at by itself first: exact steps, else a slice of the tape. Then the draws are settled between
them. A random node that ends up in several tensors, or in one but through other operations than moves, or whose numbers
were overwritten where they were drawn and live on elsewhere, is a temporary: it draws by its own indices, under the
least name that it reaches. Tensors that are copies of one (deepcopy) stay exact and draw under the least of their
names.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from . import region as rg
from .derive import Deriver, Elsewhere, NotExact, ReadsUnwritten, Tangled, Term, locate
from .errors import RecordError
from .forerunners import forerunners
from .lost_fills import lost_fills
from .plan import Entry
from .program import Exact, Played, Program, Ref, Unwritten
from .region import Box
from .slicing import DrawUse, Refused, Slicer, UnwrittenAtEnd, not_last
from .standins import ModelTensor
from .tape import Node, Tape

_END = sys.maxsize
_OUTSIDE = "nothing wrote it: its module was not built inside recording(), and the init code does not write it"


@dataclass(eq=False)
class Named:
    """A tensor of the model with all its names. ref: None where no tape knows it."""

    names: list[str]
    first: ModelTensor
    ref: Ref | None
    persistent: bool = False
    num_registered: int = 0

    @property
    def name(self) -> str:
        return min(self.names)


@dataclass
class _Found:
    """temporaries: as in a Slice. copy_of: the tensor under whose name an exact program draws."""

    program: Program
    terms: list[Term] = field(default_factory=list)
    draws: list[DrawUse] = field(default_factory=list)
    temporaries: dict[int, Node] = field(default_factory=dict)
    drawn_again: list[Node] = field(default_factory=list)
    copy_of: str | None = None

    def random_nodes(self) -> set[int]:
        return {term.node.index for term in self.terms if term.random} | {use.node.index for use in self.draws}


class Classifier:
    """Gives each tensor its program, or collects why it has none."""

    def __init__(self, tape: Tape, named: Sequence[Named], ordinary: bool) -> None:
        self.tape, self.named, self.ordinary = tape, named, ordinary
        self.refs: dict[Ref, str] = {one.ref: one.name for one in named if one.ref is not None and one.ref.numel()}
        owners: dict[int, list[tuple[str, Ref]]] = {}
        for ref, name in self.refs.items():
            owners.setdefault(ref.storage, []).append((name, ref))
        self.owners = owners
        before = forerunners(tape)
        self.deriver = Deriver(tape, {storage: owner.storage for storage, (owner, _) in before.items()})
        self.slicer = Slicer(tape, owners, self.deriver)
        self.slicer.forerunners = {
            storage: (self.refs[owner], source) for storage, (owner, source) in before.items() if owner in self.refs
        }
        self.problems: list[str] = []
        self.found: dict[str, _Found] = {}

    def entries(self) -> list[Entry]:
        for shared in self.owners.values():
            self._check_apart(shared)
        self.found = {one.name: self._find(one) for one in self.named}
        by_name = {one.name: one for one in self.named}
        while True:
            more = self._shared_nodes() - self.slicer.forced
            if not more:
                break
            self.slicer.forced |= more
            for name, one in self.found.items():
                ref = by_name[name].ref
                if ref is not None and one.random_nodes() & more:
                    self.found[name] = self._play(name, ref)
        self._check_lost_fills()
        keys = self._name_temporaries()
        self._check_ties(keys)
        if self.problems:
            problems = list(dict.fromkeys(self.problems))
            shown = "\n  ".join(problems[:12])
            rest = f"\n  ... and {len(problems) - 12} more" if len(problems) > 12 else ""
            raise RecordError(f"{len(problems)} tensors cannot be recorded:\n  {shown}{rest}")
        return [self._entry(one, self.found[one.name].program) for one in self.named]

    def _check_lost_fills(self) -> None:
        """An init function that hit a computed weight. In a package's code, which works like that on one process too,
        it is a warning."""
        named: dict[int, set[str]] = {}
        for ref, name in self.refs.items():
            named.setdefault(ref.storage, set()).add(name)
        kept = {ref.storage for ref in self.tape.owners} | self.slicer.forerunners.keys()
        for lost in lost_fills(self.tape, named, kept):
            if lost.in_package:
                warnings.warn(f"without effect: {lost.describe()}", stacklevel=4)
            else:
                self.problems.append(lost.describe())

    def _entry(self, one: Named, program: Program) -> Entry:
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

    def _find(self, one: Named) -> _Found:
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
        return _Found(piece.played, draws=piece.draws, temporaries=piece.temporaries, drawn_again=piece.drawn_again)

    def _shared_nodes(self) -> set[int]:
        """The random nodes that must be temporaries; sets copy_of where tensors are copies instead."""
        temporaries = {node.index for one in self.found.values() for node in one.temporaries.values()}
        shared = {node.index for one in self.found.values() for node in one.drawn_again}
        moved: dict[int, list[tuple[str, Term]]] = {}
        drawn: dict[int, set[str]] = {}
        for name, one in self.found.items():
            one.copy_of = None
            for term in one.terms:
                if term.random:
                    moved.setdefault(term.node.index, []).append((name, term))
            for use in one.draws:
                drawn.setdefault(use.node.index, set()).add(use.name)
        for name, term in self._moved_outside():
            moved.setdefault(term.node.index, []).append((name, term))
        for node in moved.keys() | drawn.keys():
            if node in temporaries or self._is_shared(moved.get(node, []), drawn.get(node, set())):
                shared.add(node)
        return shared | self._overwritten_draws()

    def _moved_outside(self) -> list[tuple[str, Term]]:
        """The random numbers that tensors hold which the recording knows and the model does not have, so that a part of
        a model has the values that the whole has. They have no name here."""
        found = []
        for ref in self.tape.owners - self.refs.keys():
            try:
                terms = self.deriver.derive(ref, _END, ref.storage)
            except (NotExact, ReadsUnwritten):
                continue
            found += [("", term) for term in terms if term.random]
        return found

    def _is_shared(self, moved: list[tuple[str, Term]], drawn: set[str]) -> bool:
        """Whether a node that moves to `moved` and is drawn under the names `drawn` in slices has no one place."""
        overlapping: set[str] = set()
        twice = False
        for position, (name, term) in enumerate(moved):
            for other_name, other in moved[:position]:
                if name == other_name == "":
                    continue
                if term.taken is None or other.taken is None or rg.intersect(term.taken, other.taken) is not None:
                    twice |= name == other_name
                    overlapping |= {name, other_name}
        if "" in overlapping:
            self._refuse_outside(max(overlapping), moved[0][1].node)
            return False
        names = {name for name, _ in moved if name} | drawn
        if len(names) == 1 or not (overlapping or drawn - {name for name, _ in moved}):
            return twice
        least = min(names)
        if twice or not self._are_copies(names) or drawn - {least}:
            return True
        for name in names - {least}:
            self.found[name].copy_of = least
        return False

    def _are_copies(self, names: set[str]) -> bool:
        shapes = {self.found[name].terms and ref.sizes for ref, name in self.refs.items() if name in names}
        random = [
            [(term.node.index, term.step, term.taken) for term in self.found[name].terms if term.random]
            for name in names
        ]
        return len(shapes) == 1 and all(one and one == random[0] for one in random)

    def _overwritten_draws(self) -> set[int]:
        """Draws on a tensor that it has not kept and from which another one is computed."""
        own: dict[str, list[tuple[Node | None, Box | None]]] = {
            name: [(t.node if t.random else None, t.step.region) for t in one.terms if t.step.overwrites]
            if one.terms
            else [(use.node, use.region) for use in one.draws if use.name == name]
            for name, one in self.found.items()
        }
        sizes = {name: ref.sizes for ref, name in self.refs.items()}
        gone = set()
        for name, one in self.found.items():
            used: dict[str, list[tuple[Node | None, Box | None]]] = {}
            for use in one.draws:
                if use.name != name:
                    used.setdefault(use.name, []).append((use.node, use.region))
            for other, writes in used.items():
                node = not_last(writes, own[other], sizes[other])
                if node is not None:
                    gone.add(node.index)
        return gone

    def _name_temporaries(self) -> set[str]:
        """Gives the temporaries their names and draws, and copies theirs; returns all names that were given."""
        reached: dict[int, set[str]] = {}
        for name, one in self.found.items():
            for node in one.temporaries.values():
                reached.setdefault(node.index, set()).add(name)
        self._check_outside(reached)
        draws: dict[int, tuple[str, int]] = {}
        count: dict[str, int] = {}
        for index in sorted(reached):
            least = min(reached[index])
            count[least] = count.get(least, 0) + 1
            draws[index] = least, count[least]
        for one in self.found.values():
            if one.copy_of is not None and isinstance(one.program, Exact):
                one.program = replace(one.program, drawn_as=one.copy_of)
            if one.temporaries:
                assert isinstance(one.program, Played)
                ops = list(one.program.ops)
                for position, node in one.temporaries.items():
                    name, draw = draws[node.index]
                    ops[position] = replace(ops[position], name=name, draw=draw)  # type: ignore[arg-type, call-arg]
                one.program = replace(one.program, ops=tuple(ops))
        return set(count) | {one.copy_of for one in self.found.values() if one.copy_of is not None}

    def _check_outside(self, reached: dict[int, set[str]]) -> None:
        """Numbers of temporaries must not reach a tensor that the recording knows and the model does not have."""
        outside = [ref for ref in self.tape.owners - self.refs.keys() if ref.numel()]
        mine = {index: min(names) for index, names in reached.items()}
        owned = {ref.storage for ref in self.tape.owners}
        for name, one in self.found.items():
            for term in one.terms:
                if term.random and all(ref.storage not in owned for ref in term.node.results()):
                    mine.setdefault(term.node.index, name)
        if not outside or not mine:
            return
        theirs = {term.node.index: term.node for _, term in self._moved_outside() if term.node.index in reached}
        owners = {storage: list(shared) for storage, shared in self.owners.items()}
        for number, ref in enumerate(outside):
            owners.setdefault(ref.storage, []).append((f"\0{number}", ref))
        slicer = Slicer(self.tape, owners, self.deriver)
        slicer.forced, slicer.forerunners = self.slicer.forced, self.slicer.forerunners
        for ref in outside:
            try:
                nodes = slicer.slice([ref], _END).temporaries.values()
            except (Refused, ReadsUnwritten, UnwrittenAtEnd):
                continue  # the whole cannot be recorded either, so there is nothing to agree with
            theirs.update((node.index, node) for node in nodes)
        for index in mine.keys() & theirs.keys():
            self._refuse_outside(mine[index], theirs[index])

    def _refuse_outside(self, name: str, node: Node) -> None:
        self.problems.append(
            f"{name}: the random numbers of {node.info.label} at {node.line} also reach another tensor outside of this "
            "model (a copied layer?), so that their name is unknown here: record the whole, and apply that Plan to its "
            "parts; or let go of the other tensor before recording() ends"
        )

    def _check_ties(self, keys: set[str]) -> None:
        """A tied tensor draws by the least of its names: where a part of a model holds it, that must not be outside."""
        for one in self.named:
            if one.ref is None or one.num_registered >= self.tape.num_registered.get(one.ref, 0):
                continue
            found = self.found[one.name]
            own = any(term.random for term in found.terms) or any(use.name == one.name for use in found.draws)
            if own or one.name in keys:
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
