"""From tape to exact steps: what a view of a storage holds before some node, as a list of steps, where each of its
elements is a function of its own index alone.

Goes backwards from the last write to the one that overwrites all. A pure move (clone, cast, copy_, cat, stack) and a
unary step with a result of its own carry the steps of their source along, so that `Parameter(randn(d) * 0.02)` is the
same as a normal_ in place. An element's draw is keyed by where it ends up; that is only right where it ends up in one
place, so each term keeps which elements of its random node it takes (plan building compares them).
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import _native
from . import region as rg
from .errors import RecordError
from .eye import eye_step
from .nodes import FILLS, NotExact, arg_of, dirac_steps, draw_of
from .program import RANDOM, TRANSCENDENTAL, UNARY, Exact, Ref, Step, live_steps
from .region import Box
from .tape import Node, Tape


class ReadsUnwritten(Exception):
    """A step needs elements that nothing has written."""

    def __init__(self, node: Node) -> None:
        super().__init__(f"{node.info.name} at {node.line} reads elements that nothing wrote")
        self.node = node


class Term(NamedTuple):
    """A step, the node that made it, and, of a random one, which of the node's elements it takes (None: all)."""

    step: Step
    node: Node
    taken: Box | None = None

    @property
    def random(self) -> bool:
        return self.step.op in RANDOM


class Elsewhere:
    """`locate`: the view has no element of the tensor."""


class Tangled:
    """`locate`: which of the tensor's elements the view has is no box."""


def locate(ref: Ref, view: Ref) -> Box | type[Elsewhere] | type[Tangled] | None:
    """The elements of `ref` that `view`, of the same storage, has; None is all of them."""
    if view == ref:
        return None
    sizes = [ref.dtype.itemsize, view.dtype.itemsize]
    if not ref.numel() or not view.numel() or not _extents_meet(ref, view, *sizes):
        return Elsewhere
    if ref.dtype != view.dtype or rg.overlaps_itself(ref.sizes, ref.strides):
        return Tangled
    box = rg.box_of_view(ref.sizes, ref.strides, ref.offset, view.sizes, view.strides, view.offset)
    if box is not None:
        return None if box == rg.full_box(ref.sizes) else box
    if not rg.overlaps_itself(view.sizes, view.strides):
        around = rg.box_of_view(view.sizes, view.strides, view.offset, ref.sizes, ref.strides, ref.offset)
        if around is not None:
            return None
    return Tangled


def _extents_meet(a: Ref, b: Ref, a_itemsize: int, b_itemsize: int) -> bool:
    def extent(ref: Ref, itemsize: int) -> tuple[int, int]:
        last = ref.offset + sum((size - 1) * stride for size, stride in zip(ref.sizes, ref.strides, strict=True))
        return ref.offset * itemsize, (last + 1) * itemsize

    (a_low, a_high), (b_low, b_high) = extent(a, a_itemsize), extent(b, b_itemsize)
    return a_low < b_high and b_low < a_high


_EYES = frozenset({"eye"})  # an out= variant has the same name
_MOVES = frozenset({"clone", "_to_copy", "copy_", "cat", "stack"})
_UNARY = frozenset(UNARY) | {"rsub", "clamp_min", "clamp_max"}
# A table that a loop fills row by row is played: boxes would cost more.
_MAX_STEPS = 1024
# Nested temporaries, and all of them for one tensor.
_MAX_DEPTH = 64
_MAX_WORK = 2048


class Deriver:
    """forerunners: storage -> that of the tensor at the end which it counts as."""

    def __init__(self, tape: Tape, forerunners: Mapping[int, int] | None = None) -> None:
        self.tape = tape
        self.owned = {ref.storage for ref in tape.owners}
        self._homes = forerunners or {}
        self._depth = self._work = 0

    def derive(self, ref: Ref, before: int, own: int) -> list[Term]:
        """`_derive`, within limits: `x = x * 0.9` in a long loop, or a tree of cats, is played."""
        if not self._depth:
            self._work = 0
        self._depth, self._work = self._depth + 1, self._work + 1
        try:
            if self._depth > _MAX_DEPTH or self._work > _MAX_WORK:
                raise NotExact(None, "too many operations")
            terms = self._derive(ref, before, own)
        finally:
            self._depth -= 1
        if not self._depth and _longest_chain(terms, ref.sizes) > _native.MAX_UNARY:
            raise NotExact(None, f"more than {_native.MAX_UNARY} steps on one element")
        return terms

    def _derive(self, ref: Ref, before: int, own: int) -> list[Term]:
        """What `ref` holds before node number `before`, dead terms removed. own: the storage of the tensor in question;
        random numbers of other tensors' storages are not its own.

        Raises NotExact, ReadsUnwritten."""
        if not ref.dtype.is_floating_point:
            raise NotExact(None, f"dtype {ref.dtype}")
        parts: list[list[Term]] = []
        num_terms = 0
        writers = self.tape.writers(ref.storage)
        stop = bisect.bisect_left(writers, before, key=lambda entry: entry[0].index)
        for node, view in reversed(writers[:stop] if stop < len(writers) else writers):
            where = locate(ref, view)
            if where is Elsewhere:
                continue
            if where is Tangled:
                raise NotExact(node, f"{node.info.name} on a view that is no box of the tensor")
            if node.info.is_empty:
                break
            terms, overwrites = self._of_node(node, view, ref, where, own)  # type: ignore[arg-type]
            parts.append(terms)
            num_terms += len(terms)
            if num_terms > _MAX_STEPS:
                raise NotExact(node, f"more than {_MAX_STEPS} steps")
            if overwrites and where is None:
                break
        else:
            constant = self.tape.constant(ref.storage, before)
            if constant is not None:
                raise_for = writers[0][0] if writers else None
                step = Step("fill", (self._uniform_constant(constant.data, ref, raise_for),))
                parts.append([Term(step, _NOWHERE)])
        terms = [term for part in reversed(parts) for term in part]
        _check_reads(terms, ref.sizes)
        terms = [terms[index] for index in live_steps([term.step for term in terms], ref.sizes)]
        _check_functions(terms, ref.sizes)
        return terms

    def _home(self, storage: int) -> int | None:
        """The tensor at the end, by its storage, in whose place the numbers of a storage are drawn."""
        return storage if storage in self.owned else self._homes.get(storage)

    @staticmethod
    def _uniform_constant(data: torch.Tensor, ref: Ref, node: Node | None) -> float:
        values = torch.empty(0, dtype=ref.dtype).set_(data.untyped_storage(), ref.offset, ref.sizes, ref.strides)  # type: ignore[call-overload]
        first = values.reshape(-1)[0]
        if not bool(torch.isfinite(first.float())) or not bool((values == first).all()):
            raise NotExact(node, "a constant")
        if not first and values.numel() > 1 and bool((torch.signbit(values) != torch.signbit(first)).any()):
            raise NotExact(node, "a constant")
        return float(first.double())

    def _of_node(self, node: Node, view: Ref, ref: Ref, where: Box | None, own: int) -> tuple[list[Term], bool]:
        """(the node's terms in ref's coordinates, whether they hide what was there)."""
        name = node.info.name
        if name in FILLS:
            value = self._scalar(FILLS[name](node), node)
            return [Term(Step("fill", (value,), where), node)], True
        if not node.info.deterministic:
            draw = draw_of(node)
            if draw is None:
                raise NotExact(node, f"{node.info.label} is no draw of the stream")
            # Where ref is a part of what the node filled, it takes that part of the draws.
            taken = locate(view, ref) if where is None else None
            return [Term(Step(*draw, where), node, taken if isinstance(taken, tuple) else None)], True
        if name in _EYES:
            dims = (len(view.sizes) - 2, len(view.sizes) - 1)
            eye = eye_step(view, dims, ref, where) if where is not None or view.numel() == ref.numel() else None
            if eye is None:
                raise NotExact(node, f"{node.info.label} on dimensions that the tensor has not")
            return [Term(eye, node)], True
        if name == "dirac_" and where is None and view == ref:
            return [Term(step, node) for step in dirac_steps(node, ref)], True
        if name in _MOVES:
            return [term for pair in _moves(node, view) for term in self._moved(*pair, node, ref, own)], True
        base = name.removesuffix("_").removeprefix("special_")
        if base not in _UNARY:
            raise NotExact(node, f"{node.info.label} is no exact step")
        steps = [Term(Step(op, args, where), node) for op, args in self._unary_steps(node, base)]
        if name.endswith("_"):
            return steps, False
        source = node.args[0]
        if not isinstance(source, Ref) or source.sizes != view.sizes or not source.dtype.is_floating_point:
            raise NotExact(node, f"{node.info.label} broadcasts or promotes")
        return self._moved(source, view, node, ref, own) + steps, True

    def _unary_steps(self, node: Node, base: str) -> list[tuple[str, tuple[float, ...]]]:
        """A unary node as steps; 0-dim constants count as numbers."""
        if not UNARY.get(base, 1):
            return [(base, ())]
        infinity = float("inf")
        if base.startswith("clamp"):
            low = arg_of(node, 1, "min", default=None) if base != "clamp_max" else None
            high = arg_of(node, 1 if base == "clamp_max" else 2, "max", default=None) if base != "clamp_min" else None
            bounds = (
                -infinity if low is None else self._scalar(low, node),
                infinity if high is None else self._scalar(high, node),
            )
            return [("clamp", bounds)]
        value = self._scalar(arg_of(node, 1, "other"), node)
        if base in ("add", "sub", "rsub") and arg_of(node, 2, "alpha", default=1) != 1:
            raise NotExact(node, f"{node.info.label} with alpha != 1")
        if base == "div" and node.kwargs.get("rounding_mode") is not None:
            raise NotExact(node, f"{node.info.label} with a rounding_mode")
        # s - x is -x + s to the last bit, signs of zero included.
        return [("neg", ()), ("add", (value,))] if base == "rsub" else [(base, (value,))]

    def _scalar(self, value: Any, node: Node) -> float:
        if isinstance(value, (bool, int, float)):
            return float(value)
        if isinstance(value, Ref) and not value.sizes and not value.dtype.is_complex:
            from .play import values_now

            try:
                return float(values_now(self.tape, [value], node.index, node.info.label)[0].item())
            except RecordError as error:
                raise NotExact(node, f"{node.info.label} by a tensor that is no constant") from error
        raise NotExact(node, f"{node.info.label} by something that is no number")

    def _moved(self, source: Ref, target: Ref, node: Node, ref: Ref, own: int) -> list[Term]:
        """The terms of `source`, as they hold in ref once it was copied to `target`, a view of ref's storage."""
        if not source.numel():
            return []
        padding = len(target.sizes) - len(source.sizes)
        sizes = (1,) * padding + source.sizes
        strides = (0,) * padding + source.strides
        repeats = sizes != target.sizes or any(
            stride == 0 and size > 1 for size, stride in zip(sizes, strides, strict=True)
        )
        if repeats:
            kept = [(n, stride) for n, stride in zip(source.sizes, source.strides, strict=True) if n > 1 and stride]
            core_sizes, core_strides = tuple(n for n, _ in kept), tuple(stride for _, stride in kept)
            source = Ref(source.storage, source.offset, core_sizes, core_strides, source.dtype)
        elif sizes != source.sizes:
            source = Ref(source.storage, source.offset, sizes, strides, source.dtype)
        terms = self.derive(source, node.index, own)
        if repeats and any(term.step.op == "eye" for term in terms):
            raise NotExact(node, f"{node.info.name} puts an element to several places")
        if any(term.random for term in terms) and self._home(source.storage) not in (None, self._home(own)):
            raise NotExact(node, f"{node.info.name} from another tensor's random numbers")
        if repeats and any(term.random or term.step.region is not None for term in terms):
            raise NotExact(node, f"{node.info.name} puts an element to several places")
        if _left(terms, source.sizes):
            raise ReadsUnwritten(node)
        if source.dtype != ref.dtype:
            terms = _cast(terms, source.dtype, ref.dtype, node)
        placed = []
        for term in terms:
            where = locate(ref, target if repeats else target.sub_view(term.step.region))
            if where is Elsewhere:
                continue
            if where is Tangled:
                raise NotExact(node, f"{node.info.name} to a view that is no box of the tensor")
            step: Step | None = Step(term.step.op, term.step.args, where)  # type: ignore[arg-type]
            if term.step.op == "eye":
                dims = (int(term.step.args[0]), int(term.step.args[1]))
                step = eye_step(target.sub_view(term.step.region), dims, ref, where)  # type: ignore[arg-type]
            if step is None or (step.op == "eye" and where is None and target.numel() != ref.numel()):
                raise NotExact(node, f"{node.info.name} of a part of an identity matrix")
            placed.append(term._replace(step=step))
        return placed


def _moves(node: Node, view: Ref) -> list[tuple[Ref, Ref]]:
    """(source, the part of `view` that it goes to) of a move."""
    if node.info.name in ("cat", "stack"):
        sources, dim = node.args[0], arg_of(node, 1, "dim", default=0)
        dim %= len(view.sizes)
        pairs, start = [], 0
        for source in sources:
            if source.sizes == (0,) and len(view.sizes) > 1:  # torch.cat lets an old-style empty tensor through
                continue
            box = list(rg.full_box(view.sizes))
            box[dim] = rg.span(start, 1, source.sizes[dim] if node.info.name == "cat" else 1)
            start += box[dim].size
            part = view.sub_view(tuple(box))
            if node.info.name == "stack":
                part = Ref(
                    part.storage,
                    part.offset,
                    part.sizes[:dim] + part.sizes[dim + 1 :],
                    part.strides[:dim] + part.strides[dim + 1 :],
                    part.dtype,
                )
            pairs.append((source, part))
        return pairs
    source = arg_of(node, 1 if node.info.name == "copy_" else 0, "src", "self")
    return [(source, view)]


def _cast(terms: list[Term], source: torch.dtype, target: torch.dtype, node: Node) -> list[Term]:
    """Exact steps are rounded once, to the dtype at the end. That is the rule for random numbers; for constants a cast
    on the way must not change what torch gives."""
    if any(term.random for term in terms):
        return terms
    from_wider = source == torch.float64
    if not (source == torch.float32 and target != torch.float64) and any(not t.step.overwrites for t in terms):
        raise NotExact(node, f"arithmetic before a cast from {source} to {target}")
    if from_wider:
        return terms

    def rounded(step: Step) -> Step:
        value = float(torch.tensor(step.args[0], dtype=torch.float64).to(source).double())
        return Step(step.op, (value,), step.region)

    return [term._replace(step=rounded(term.step)) if term.step.op == "fill" else term for term in terms]


def _left(terms: Sequence[Term], sizes: Sequence[int]) -> list[Box]:
    """The elements that no overwriting term wrote."""
    left = [rg.full_box(sizes)]
    for term in terms:
        if term.step.overwrites:
            if term.step.region is None:
                return []
            left = [rest for piece in left for rest in rg.subtract(piece, term.step.region)]
    return left


def _longest_chain(terms: Sequence[Term], sizes: Sequence[int]) -> int:
    """The kernels' steps after the draw, for the element that has most."""

    def count(steps: Sequence[Step]) -> int:
        return sum(0 if step.overwrites else 2 if step.op == "clamp" else 1 for step in steps)

    steps = tuple(term.step for term in terms)
    if count(steps) <= _native.MAX_UNARY:
        return count(steps)
    return max((count(chain) for _, chain in Exact(steps).straight(rg.full_box(sizes))), default=0)


def _check_reads(terms: Sequence[Term], sizes: Sequence[int]) -> None:
    left = [rg.full_box(sizes)]
    for term in terms:
        region = term.step.region
        if not left:
            return
        if term.step.overwrites:
            left = [] if region is None else [rest for piece in left for rest in rg.subtract(piece, region)]
        elif any(region is None or rg.intersect(piece, region) is not None for piece in left):
            raise ReadsUnwritten(term.node)


def _check_functions(terms: Sequence[Term], sizes: Sequence[int]) -> None:
    """Of a constant torch's own exp, log and erfinv are wanted; ours may differ in the last bit."""
    function = next((term for term in terms if term.step.op in TRANSCENDENTAL), None)
    if function is None:
        return
    for _, chain in Exact(tuple(term.step for term in terms)).straight(rg.full_box(sizes)):
        if chain and chain[0].op not in RANDOM and any(step.op in TRANSCENDENTAL for step in chain):
            raise NotExact(function.node, f"{function.node.info.label} of a constant")


# The node of a constant from outside: there is none.
_NOWHERE: Any = None
