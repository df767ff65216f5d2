"""What a recording says about one tensor: its program.

Exact: a list of steps, each a function of the element's own index, run in place on any shard by our own kernels.
Played: other operations, evaluated once at full size on the CPU; each rank keeps its part (play.py evaluates it).
Unwritten: nothing wrote the tensor, or not all of it, or a step read elements that nothing had written.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import region as rg
from .region import Box

# Number of arguments. Overwriting steps do not look at what was there; the others are one rounding each, in fp32
# (fp64 for fp64 tensors): x + s, x - s, x * s, x / s, min(max(x, lo), hi), -x, and the functions of elementary.h.
OVERWRITING = {
    "uniform": 2,
    "normal": 2,
    "trunc_normal": 4,
    "exponential": 1,
    "log_normal": 2,
    "cauchy": 2,
    "geometric": 1,
    "bernoulli": 1,
    "random": 2,
    "fill": 1,
    "eye": 2,
}
UNARY = {"add": 1, "sub": 1, "mul": 1, "div": 1, "clamp": 2, "neg": 0, "exp": 0, "log": 0, "sqrt": 0, "erfinv": 0}
RANDOM = frozenset(OVERWRITING) - {"fill", "eye"}
# Those of ours that need not be torch's to the last bit.
TRANSCENDENTAL = frozenset({"exp", "log", "erfinv"})
STEP_ARGS = {
    "uniform": ("a", "b"),
    "normal": ("std", "mean"),
    "trunc_normal": ("std", "mean", "a", "b"),
    "exponential": ("lambd",),
    "log_normal": ("mean", "std"),
    "cauchy": ("median", "sigma"),
    "geometric": ("p",),
    "bernoulli": ("p",),
    "random": ("low", "high"),
    "clamp": ("lo", "hi"),
}

# Above this many steps the search for dead ones looks only at whole-tensor and equal regions: it is quadratic.
_MAX_PAIRWISE_STEPS = 256


@dataclass(frozen=True)
class Step:
    """One operation on `region` of the tensor, a box in the tensor's own shape; None is the whole tensor.

    args: of draws as in draws.check_draw; "fill" (value,); "eye" (dim, dim), 1 where the region's own indices along the
    two dimensions are equal, else 0; "add", "sub", "mul", "div" (s,); "clamp" (lo, hi), infinite where absent; "neg",
    "exp", "log", "sqrt", "erfinv" ().
    """

    op: str
    args: tuple[float, ...] = field(default=(), compare=False)
    region: Box | None = None
    bits: bytes = field(init=False, repr=False)  # of args: steps are equal where these are, for -0.0 == 0.0

    def __post_init__(self) -> None:
        num_args = OVERWRITING.get(self.op, UNARY.get(self.op))
        if num_args is None:
            raise ValueError(f"Step: op must be one of {[*OVERWRITING, *UNARY]}, got {self.op!r}")
        if len(self.args) != num_args:
            raise ValueError(f"Step: {self.op} takes {num_args} arguments, got {self.args}")
        object.__setattr__(self, "bits", struct.pack(f"<{num_args}d", *self.args))

    @property
    def overwrites(self) -> bool:
        return self.op in OVERWRITING

    def __str__(self) -> str:
        names = STEP_ARGS.get(self.op)
        numbers = [f"{value:g}" for value in self.args]
        shown = [f"{n}={v}" for n, v in zip(names, numbers, strict=True)] if names else numbers
        return f"{show_box(self.region)}{self.op}({', '.join(shown)})"


def show_box(box: Box | None) -> str:
    if box is None:
        return ""

    def show(span: rg.Span) -> str:
        if span.size == 1:
            return str(span.start)
        return f"{span.start}:{span.last + 1}" + (f":{span.step}" if span.step != 1 else "")

    return f"[{', '.join(map(show, box))}] "


def live_steps(steps: Sequence[Step], shape: Sequence[int] | None = None) -> list[int]:
    """Which steps still matter: those whose region no later overwriting steps cover between them. `shape`, where
    known, lets partial steps together cover a whole-tensor one."""
    full = None if shape is None else rg.full_box(shape)
    covers: list[Box] = []
    equal: set[Box] = set()
    live: list[int] = []
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        box = full if step.region is None else step.region
        if box is not None:
            if box in equal:
                continue
            left = [box]
            if len(steps) <= _MAX_PAIRWISE_STEPS:
                for cover in covers:
                    left = [rest for piece in left for rest in rg.subtract(piece, cover)]
                    if not left:
                        break
            if not left or not rg.numel(box):
                continue
        live.append(index)
        if step.overwrites:
            if step.region is None:
                break
            covers.append(step.region)
            equal.add(step.region)
    return live[::-1]


@dataclass(frozen=True)
class Exact:
    """Steps in the order in which they happen; dead ones are removed on construction.

    drawn_as: the name under which the random steps draw, where that is another tensor's: copies of one tensor."""

    steps: tuple[Step, ...]
    drawn_as: str | None = None

    def __post_init__(self) -> None:
        kept = live_steps(self.steps)
        if len(kept) != len(self.steps):
            object.__setattr__(self, "steps", tuple(self.steps[index] for index in kept))

    def straight(self, box: Box, limit: int | None = None) -> list[tuple[Box, tuple[Step, ...]]]:
        """`box` as disjoint boxes, each with the steps that make all of its elements: one overwriting step, then the
        unary ones that come after it there. The chain is empty where nothing wrote.

        Going backwards, a box is cut only where a step that matters to it ends, so their number follows the regions
        of the steps and never the size of the tensor. More boxes than `limit` are a ValueError.
        """
        done: list[tuple[Box, tuple[Step, ...]]] = []
        todo: list[tuple[Box, tuple[Step, ...]]] = [(box, ())] if rg.numel(box) else []
        for step in reversed(self.steps):
            rest: list[tuple[Box, tuple[Step, ...]]] = []
            for piece, chain in todo:
                common = piece if step.region is None else rg.intersect(piece, step.region)
                if common is None:
                    rest.append((piece, chain))
                    continue
                (done if step.overwrites else rest).append((common, (step, *chain)))
                if common != piece:
                    rest += [(left, chain) for left in rg.subtract(piece, common)]
            todo = rest
            if limit is not None and len(todo) + len(done) > limit:
                raise ValueError(f"the steps must cut the tensor into at most {limit} boxes")
            if not todo:
                break
        # Unary steps over elements that nothing wrote make no value: such a box has no chain.
        return _merge(done + [(piece, ()) for piece, _ in todo])

    def unwritten(self, shape: Sequence[int]) -> list[Box]:
        """The elements of a tensor of this shape that no step writes."""
        return [box for box, chain in self.straight(rg.full_box(shape)) if not chain]

    def covers(self, shape: Sequence[int]) -> bool:
        return not self.unwritten(shape)

    @property
    def is_random(self) -> bool:
        return any(step.op in RANDOM for step in self.steps)

    def describe(self) -> str:
        """The steps; the middle of many is left out."""
        shown = list(map(str, self.steps))
        if len(shown) > 12:
            shown = [*shown[:6], f"... {len(shown) - 9} more", *shown[-3:]]
        return "; ".join(shown) + (f" (drawn as {self.drawn_as})" if self.drawn_as is not None else "")


def _joined(a: Box, b: Box) -> Box | None:
    """The union of two disjoint boxes where it is a box that continues along one dimension."""
    differing = [dim for dim in range(len(a)) if a[dim] != b[dim]]
    if len(differing) != 1:
        return None
    dim = differing[0]
    low, high = sorted((a[dim], b[dim]))
    step = low.step if low.size > 1 else high.step if high.size > 1 else high.start - low.start
    if (high.size > 1 and high.step != step) or high.start != low.last + step:
        return None
    return (*a[:dim], rg.span(low.start, step, low.size + high.size), *a[dim + 1 :])


def _merge(pieces: list[tuple[Box, tuple[Step, ...]]]) -> list[tuple[Box, tuple[Step, ...]]]:
    """Boxes with equal chains joined where two make one; cuts that later steps made needless close again."""
    if len(pieces) > _MAX_PAIRWISE_STEPS:
        return pieces
    merged: list[tuple[Box, tuple[Step, ...]]] = []
    for box, chain in pieces:
        again = True
        while again:
            again = False
            for index, (other, other_chain) in enumerate(merged):
                both = _joined(box, other) if other_chain == chain else None
                if both is not None:
                    box, again = both, True
                    del merged[index]
                    break
        merged.append((box, chain))
    return sorted(merged, key=lambda piece: [span.start for span in piece[0]])


@dataclass(frozen=True)
class Unwritten:
    """Nothing wrote the tensor, or only part of it, or a step needed elements that nothing had written."""

    reason: str = "nothing wrote it"

    def describe(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Ref:
    """A view of a storage, as plain numbers; offset and strides count elements of dtype."""

    storage: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def numel(self) -> int:
        return math.prod(self.sizes)

    def sub_view(self, box: Box | None) -> Ref:
        """The view of a box of this view."""
        if box is None:
            return self
        offset = self.offset + sum(s.start * stride for s, stride in zip(box, self.strides, strict=True))
        strides = tuple(s.step * stride for s, stride in zip(box, self.strides, strict=True))
        return Ref(self.storage, offset, tuple(s.size for s in box), strides, self.dtype)


@dataclass(frozen=True, eq=False)
class PlayedOp:
    """A torch operator by its schema name; tensors among the arguments are Refs. `fresh` are the results that have
    storages of their own."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    fresh: tuple[tuple[int, Ref], ...]  # (which of the results, where it goes)
    default_dtype: torch.dtype = torch.float32  # when it was recorded: the dtype of int / int, say

    def _identity(self) -> Any:
        return self.op, _typed(self.args), _typed(self.kwargs), self.fresh, self.default_dtype

    def __eq__(self, other: object) -> bool:
        return self._identity() == other._identity() if isinstance(other, PlayedOp) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity())


def _typed(value: Any) -> Any:
    """Equal where two arguments are the same for an operator: 1, 1.0 and True are not, nor are 0.0 and -0.0; NaN is."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_typed, value))
    if isinstance(value, float):
        return float, struct.pack("<d", value)
    if isinstance(value, complex):
        return complex, struct.pack("<dd", value.real, value.imag)
    return type(value), value


@dataclass(frozen=True)
class PlayedExact:
    """A named tensor in a state that an exact program gives: `view` is all of it.

    draw: 0 for a tensor's own draws; others are those of random temporaries, which draw by their own indices."""

    name: str
    view: Ref
    program: Exact
    draw: int = 0

    @property
    def is_random(self) -> bool:
        return self.program.is_random

    def describe(self) -> str:
        return f"<{self.name}>: {self.program.describe()}"


@dataclass(frozen=True)
class PlayedDraw:
    """A random operation on `view` that is no function of one element's index: composite.py runs it.

    It draws by the elements' indices in `owner`, of which the view holds the box `region` (None: all of it). name, draw
    as in PlayedExact; a temporary is its own owner."""

    op: str
    args: tuple[float, ...]
    name: str
    owner: Ref
    view: Ref
    region: Box | None = None
    draw: int = 0

    @property
    def is_random(self) -> bool:
        return True

    def describe(self) -> str:
        numbers = ", ".join(f"{name}={value:g}" for name, value in zip(COMPOSITE[self.op], self.args, strict=True))
        return f"<{self.name}>: {show_box(self.region)}{self.op}({numbers})"


# The operations of a PlayedDraw, with the names of their arguments.
COMPOSITE = {
    "orthogonal_": ("gain",),
    "sparse_": ("sparsity", "std"),
    "bernoulli": ("p",),
    "random": ("low", "high"),
    "permutation": (),
    "geometric": ("p",),
}
# Those whose elements depend on each other.
MIXING = frozenset({"orthogonal_", "sparse_", "permutation"})
# Those that any real dtype takes, not only those of the stream.
ANY_DTYPE = frozenset({"bernoulli", "random", "permutation", "geometric"})
PlayedItem = PlayedOp | PlayedExact | PlayedDraw


@dataclass(frozen=True, eq=False)
class Played:
    """A backward slice of the tape, in order, with storages numbered from 0.

    out: where the tensor is when all is done. num_bytes: of each storage. constants: the initial contents of some,
    as 1-D uint8 tensors. check_unwritten: some element may never have been written, which only two runs over
    different garbage can tell.
    """

    ops: tuple[PlayedItem, ...]
    out: Ref
    num_bytes: tuple[int, ...]
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    check_unwritten: bool = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Played):
            return NotImplemented
        return (
            (self.ops, self.out, self.num_bytes, self.check_unwritten)
            == (other.ops, other.out, other.num_bytes, other.check_unwritten)
            and self.constants.keys() == other.constants.keys()
            and all(torch.equal(data, other.constants[key]) for key, data in self.constants.items())
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def depends_on(self) -> tuple[str, ...]:
        """Canonical names of the tensors whose random numbers this one uses; may hold its own."""
        return tuple(sorted({op.name for op in self.ops if not isinstance(op, PlayedOp) and op.is_random}))

    def describe(self) -> str:
        """The operators in order of first use, with the tensors that it is computed from."""
        shown: dict[str, None] = {}
        for op in self.ops:
            shown[op.op.split("::")[-1].split(".")[0] if isinstance(op, PlayedOp) else op.describe()] = None
        names = list(shown) or ["constant"]
        return ", ".join(names[:8]) + (f", ... {len(names) - 8} more" if len(names) > 8 else "")

    def evaluate(self, seed: int, id_of: Callable[[str, int], int]) -> torch.Tensor:
        """The whole tensor on the CPU, in the dtype in which it was recorded. id_of: the stream's id of a name and
        draw."""
        from .play import evaluate

        return evaluate(self, seed, id_of)


Program = Exact | Played | Unwritten
