"""Backward slices of the tape: what must be played to know some views, and whether that can be done.

A slice holds the nodes that still matter (a write over a whole storage hides what came before). Where it meets a named
tensor in a state that an exact program with random numbers gives, that program is put in instead of the nodes before:
the stream makes the draws, keyed by that tensor's name. Any other random node that the stream knows is a temporary: it
draws by its own indices, under a name that the caller finds when all slices are known.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import native
from . import region as rg
from .coverage import Coverage
from .derive import Deriver, Elsewhere, NotExact, ReadsUnwritten, Tangled, Term, locate
from .draws import DTYPE_CODES
from .errors import RecordError
from .nodes import composite_of, dirac_steps, draw_of
from .program import (
    ANY_DTYPE,
    COMPOSITE,
    MIXING,
    Exact,
    Played,
    PlayedDraw,
    PlayedExact,
    PlayedItem,
    PlayedOp,
    Ref,
    Step,
)
from .region import Box
from .tape import Node, Tape


@dataclass
class _Cut:
    """The exact state of an owner before node number `before`."""

    before: int
    name: str
    view: Ref
    terms: list[Term]


@dataclass
class _Drawn:
    """A random node. name: of the owner whose draw it is; None for a temporary, which is its own owner."""

    node: Node
    op: str
    args: tuple[float, ...]
    name: str | None
    owner: Ref
    view: Ref
    region: Box | None


@dataclass(frozen=True)
class DrawUse:
    """A random node that a slice draws from, as elements `region` of the owner `name`."""

    name: str
    node: Node
    region: Box | None


@dataclass
class Slice:
    """temporaries: by the index of their operation in `played`, which has no name for them yet. drawn_again: nodes that
    draw for elements for which a later node of the slice draws too, with values of both used."""

    played: Played
    outs: list[Ref]
    draws: list[DrawUse] = field(default_factory=list)
    temporaries: dict[int, Node] = field(default_factory=dict)
    drawn_again: list[Node] = field(default_factory=list)


class Refused(RecordError):
    """A slice that cannot be played, because of `node`."""

    def __init__(self, node: Node, why: str) -> None:
        self.where = f"{_shown(node)} at {node.line}"
        super().__init__(f"{self.where}: {why}")


_Item = Node | _Cut | _Drawn


def _time(item: _Item) -> float:
    if isinstance(item, _Cut):
        return item.before - 0.5
    return (item.node if isinstance(item, _Drawn) else item).index


class Slicer:
    """owners: the named tensors of each storage. None: every random node is refused.

    forced: the numbers of random nodes that are temporaries wherever they draw. forerunners: see forerunners.py."""

    def __init__(self, tape: Tape, owners: Mapping[int, Sequence[tuple[str, Ref]]] | None, deriver: Deriver) -> None:
        self.tape, self.owners, self.deriver = tape, owners or {}, deriver
        self.has_names = owners is not None
        self.forced: set[int] = set()
        self.forerunners: Mapping[int, tuple[str, Ref]] = {}
        # storage -> (node, time): no exact state at `time`, because of that node, so none in between either.
        self._no_state: dict[int, tuple[int, int]] = {}

    def slice(self, targets: Sequence[Ref], before: int) -> Slice:
        """What gives `targets` as they are before node number `before`. Raises Refused, ReadsUnwritten."""
        self._no_state.clear()
        items, draws, outside = self._collect(targets, before)
        piece = _emit(self.tape, items, targets, before, draws, outside)
        piece.drawn_again = _drawn_again(items, draws)
        return piece

    def _collect(self, targets: Sequence[Ref], before: int) -> tuple[list[_Item], list[DrawUse], set[int]]:
        """The items in order, the draws, and the storages of which contents from before the tape are used."""
        items: list[_Item] = []
        outside: set[int] = set()
        draws: list[DrawUse] = []
        live: set[int] = set()
        own = {ref.storage for ref in targets}
        heap: list[tuple[int, int]] = []  # (-node number, entry of `queued`)
        queued: dict[int, Node] = {}

        def demand(storage: int, time: int) -> None:
            if storage in live:
                return
            cut = self._cut(storage, time, own=storage in own)
            if cut is not None:
                items.append(cut)
                draws.extend(DrawUse(cut.name, t.node, t.step.region) for t in cut.terms if t.random)
                return
            live.add(storage)
            writers = self.tape.writers(storage)
            position = bisect.bisect_left(writers, time, key=lambda entry: entry[0].index)
            if position:
                node = writers[position - 1][0]
                if node.index not in queued:
                    queued[node.index] = node
                    heapq.heappush(heap, (-node.index, node.index))
            else:
                outside.add(storage)

        for ref in targets:
            demand(ref.storage, before)
        while heap:
            node = queued[heapq.heappop(heap)[1]]
            if node.info.deterministic and not node.info.label.startswith("init::"):
                items.append(node)
            else:
                item = self._draw(node)
                items.append(item)
                if isinstance(item, _Drawn) and item.name is not None:
                    draws.append(DrawUse(item.name, node, item.region))
            for view in node.results():
                if view.storage in live:
                    live.discard(view.storage)
                    if not self._hides(node, view):
                        demand(view.storage, node.index)
            for ref in node.reads:
                demand(ref.storage, node.index)
        return sorted(items, key=_time), draws, outside

    def _hides(self, node: Node, view: Ref) -> bool:
        """Whether nothing of the storage is left after this write."""
        if any(ref is view for _, ref in node.fresh):
            return True
        whole = self.tape.num_bytes.get(view.storage) == view.numel() * view.dtype.itemsize
        return node.info.overwrites and whole and not rg.overlaps_itself(view.sizes, view.strides)

    def _owner(self, storage: int) -> tuple[str, Ref] | None:
        """The one named tensor that is all of this storage, or to which all of it goes."""
        found = self.owners.get(storage, ())
        return found[0] if len(found) == 1 else self.forerunners.get(storage) if not found else None

    def _cut(self, storage: int, time: int, *, own: bool) -> _Cut | None:
        """The exact state of a named tensor; of another one than the target only if it holds random numbers."""
        owner = self._owner(storage)
        because, since = self._no_state.get(storage, (0, -1))
        if because < time <= since:
            return None
        if owner is None or self.tape.num_bytes.get(storage) != owner[1].numel() * owner[1].dtype.itemsize:
            return None
        try:
            terms = self.deriver.derive(owner[1], time, storage)
        except (NotExact, ReadsUnwritten) as error:
            if error.node is not None:
                self._no_state[storage] = error.node.index, time
            return None
        if not own and not any(term.random for term in terms):
            return None
        if self.forced:
            forced = [term.node.index for term in terms if term.random and term.node.index in self.forced]
            if forced:
                self._no_state[storage] = max(forced), time
                return None
        if not Exact(tuple(term.step for term in terms)).covers(owner[1].sizes):
            self._no_state[storage] = -1, time  # what is unwritten now was so before
            return None
        return _Cut(time, owner[0], owner[1], terms)

    def _draw(self, node: Node) -> _Cut | _Drawn:
        """A random node, or an init function that is none."""
        (view,) = node.results() if len(node.writes) + len(node.fresh) == 1 else (None,)
        if node.info.name == "dirac_" and view is not None:
            return _Cut(node.index + 1, "", view, [Term(step, node) for step in dirac_steps(node, view)])
        draw = draw_of(node) or composite_of(node)
        if draw is None or view is None:
            raise Refused(node, "not supported yet")
        if not self.has_names:
            raise Refused(node, "random numbers")
        if native.dtype_name(view.dtype) not in DTYPE_CODES and draw[0] not in ANY_DTYPE:
            raise Refused(node, f"random numbers of dtype {view.dtype} are not supported yet")
        owner = self._owner(view.storage)
        if owner is None and view.storage in self.deriver.owned and view.storage not in self.owners:
            raise Refused(
                node,
                "it draws for a tensor outside of this model (the original of a copied layer, held elsewhere?), which "
                "has no name here: record a model that holds it too, or let go of it before recording() ends",
            )
        if owner is None or node.index in self.forced:
            return _Drawn(node, *draw, None, view, view, None)
        region = locate(owner[1], view)
        # A view that is no box of the owner, or holds more than it (None too), draws by its own indices.
        if region is Elsewhere or region is Tangled or (region is None and view.numel() != owner[1].numel()):
            return _Drawn(node, *draw, None, view, view, None)
        return _Drawn(node, *draw, owner[0], owner[1], view, region)  # type: ignore[arg-type]


def _shown(node: Node) -> str:
    return f"torch.nn.init.{node.info.name}" if node.info.label.startswith("init::") else node.info.label


def _drawn_again(items: Sequence[_Item], draws: Sequence[DrawUse]) -> list[Node]:
    """Two draws of one element are the same numbers in the stream: the earlier nodes, where values of both are used."""
    first: dict[tuple[str, int], DrawUse] = {}
    by_owner: dict[str, list[DrawUse]] = {}
    for use in draws:
        if (use.name, use.node.index) not in first:
            first[use.name, use.node.index] = use
            by_owner.setdefault(use.name, []).append(use)
    found: dict[int, Node] = {}
    for uses in by_owner.values():
        uses.sort(key=lambda use: use.node.index)
        for position, later in enumerate(uses):
            for earlier in uses[:position]:
                apart = (
                    earlier.region is not None
                    and later.region is not None
                    and rg.intersect(earlier.region, later.region) is None
                )
                mixed = earlier.node.info.name in MIXING and _is_left(earlier.region, later.region)
                if not apart and (mixed or _escapes(items, earlier.node, later.node)):
                    found[earlier.node.index] = earlier.node
    return [*found.values()]


def _is_left(earlier: Box | None, later: Box | None) -> bool:
    """Whether a later write leaves something of an earlier one."""
    return later is not None and (earlier is None or bool(rg.subtract(earlier, later)))


def _escapes(items: Sequence[_Item], earlier: Node, later: Node) -> bool:
    """Whether something between two draws on a tensor carries values of the first to other elements: of another
    storage, or of the same one (cumsum_, `w[2:] += w[:2]`)."""
    for item in items:
        if isinstance(item, Node) and earlier.index < item.index <= later.index:
            written = set(item.results())
            if any(ref not in written for ref in item.reads) or (item.reads and not item.info.pointwise):
                return True
    return False


_Writes = Sequence[tuple[Node | None, Box | None]]


def not_last(used: _Writes, own: _Writes, sizes: tuple[int, ...]) -> Node | None:
    """A node of `used` whose numbers `own`, what a tensor ends up with, has not, or that another draw replaced."""
    nodes = {id(node) for node, _ in own}
    gone = next((node for node, _ in used if id(node) not in nodes), None)
    if gone is not None or [node for node, _ in used] == [node for node, _ in own if node is not None]:
        return gone
    last = _last_writes(own, sizes)
    for node, box in _last_writes(used, sizes):
        if any(n is not None and n is not node and rg.intersect(box, b) is not None for n, b in last):
            return node
    return None


def _last_writes(writes: _Writes, sizes: tuple[int, ...]) -> list[tuple[Node | None, Box]]:
    """Which node wrote which elements last."""
    left, found = [rg.full_box(sizes)], []
    for node, region in reversed(writes):
        rest: list[Box] = []
        for piece in left:
            common = piece if region is None else rg.intersect(piece, region)
            if common is None:
                rest.append(piece)
                continue
            found.append((node, common))
            rest += rg.subtract(piece, common)
        left = rest
    return found


def _emit(
    tape: Tape, items: Sequence[_Item], targets: Sequence[Ref], before: int, draws: list[DrawUse], outside: set[int]
) -> Slice:
    numbers: dict[int, int] = {}
    num_bytes: list[int] = []
    constants: dict[int, Any] = {}
    coverage = Coverage()
    ops: list[PlayedItem] = []
    temporaries: dict[int, Node] = {}

    def local(ref: Ref, time: float, *, made_here: bool = False) -> Ref:
        number = numbers.get(ref.storage)
        if number is None:
            number = numbers[ref.storage] = len(numbers)
            num_bytes.append(tape.num_bytes[ref.storage])
            constant = tape.constant(ref.storage, int(time)) if ref.storage in outside else None
            if constant is not None:
                constants[number] = constant.data
            elif not made_here:
                coverage.born(ref, num_bytes[number])
        return Ref(number, ref.offset, ref.sizes, ref.strides, ref.dtype)

    for item in items:
        if isinstance(item, _Cut):
            program = Exact(tuple(term.step for term in item.terms))
            ops.append(PlayedExact(item.name, local(item.view, item.before), program))
            for term in item.terms:
                coverage.written(item.view.sub_view(term.step.region))
            continue
        if isinstance(item, _Drawn):
            if item.name is None:
                temporaries[len(ops)] = item.node
            name, index = item.name or "", item.node.index
            made_here = any(ref is item.view for _, ref in item.node.fresh)
            owner = local(item.owner, index, made_here=made_here)
            view = local(item.view, index, made_here=made_here)
            if item.op in COMPOSITE:
                ops.append(PlayedDraw(item.op, item.args, name, owner, view, item.region))
            else:
                ops.append(PlayedExact(name, owner, Exact((Step(item.op, item.args, item.region),))))
            coverage.written(item.view)
            continue
        if item.info.is_empty:
            for _, ref in item.fresh:
                coverage.born(ref, num_bytes[local(ref, item.index, made_here=True).storage])
            continue
        mutated = set(item.writes)
        for ref in item.reads:
            local(ref, item.index)
            if not (item.info.scatters and ref in mutated) and coverage.reads_unwritten(ref):
                raise ReadsUnwritten(item)
        fresh = tuple((index, local(ref, item.index, made_here=True)) for index, ref in item.fresh)
        translate: Callable[[Ref], Ref] = lambda ref, time=item.index: local(ref, time)  # type: ignore[misc] # noqa: E731
        args = map_refs(translate, item.args)
        kwargs = tuple((key, map_refs(translate, value)) for key, value in item.kwargs.items())
        for ref in item.writes:
            coverage.written(ref, sure=not item.info.scatters)
        ops.append(PlayedOp(item.info.label, args, kwargs, fresh, item.default_dtype))
    outs = [local(ref, before) for ref in targets]
    for ref in targets:
        if coverage.reads_unwritten(ref):
            raise UnwrittenAtEnd
    played = Played(tuple(ops), outs[0], tuple(num_bytes), constants, coverage.check_unwritten)
    return Slice(played, outs, draws, temporaries)


class UnwrittenAtEnd(Exception):
    """Some elements of the target itself were never written."""


def map_refs(function: Callable[[Ref], Any], value: Any) -> Any:
    if isinstance(value, Ref):
        return function(value)
    if isinstance(value, (list, tuple)):
        return tuple(map_refs(function, item) for item in value)
    return value
