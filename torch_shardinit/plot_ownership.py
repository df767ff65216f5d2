"""Which rank owns which part of each tensor of a Plan, for a picture: integers only, no processes and no model.

What an init really fills is found by locate/, on the wrapped model; here a layout is only described. A tensor's parts
are boxes in its matrix form, (first dimension, all others), which is how they are drawn.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from . import region as rg
from .locate.dtensor import ShardOrder, box_of_shard_order
from .plan import Entry, Plan

DEFAULT_LAYOUT, DEFAULT_WORLD = "fsdp2", 8
MAX_WORLD = 1024
LAYOUT_HELP = (
    "ddp; fsdp1 (flat parameters: a unit for each member of a numbered list of modules, the rest in the root); fsdp2; "
    "hsdp (two replicas); tp:PATTERN=DIM,... (tensor parallelism: the first pattern that fits a parameter's name says "
    "the dimension on which it is sharded; others are replicated)"
)


@dataclass(frozen=True)
class Part:
    """Elements that each of `ranks` holds: a box of the tensor's matrix form."""

    ranks: tuple[int, ...]
    box: rg.Box

    @property
    def num_elements(self) -> int:
        return rg.numel(self.box)


PartsOf = Callable[[Entry], list[Part]]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(first dimension, product of the others); one row of one column for a scalar."""
    return (shape[0], math.prod(shape[1:])) if len(shape) else (1, 1)


def unit_of(name: str) -> str:
    """The FSDP1 unit of a parameter: the name up to its first number, that of a list's member; "" is the root."""
    parts = name.split(".")
    for position, part in enumerate(parts[:-1]):
        if part.isdecimal():
            return ".".join(parts[: position + 1])
    return ""


def layout(text: str, world: int, plan: Plan, parameters: Sequence[str]) -> PartsOf:
    """What gives an entry's parts in the layout that `text` names (LAYOUT_HELP).

    Args:
        world: ranks, 1 to MAX_WORLD.
        parameters: the names of the model's parameters in the order of named_parameters(): that of flat parameters.

    Returns:
        A function from an entry to its parts. Together they hold every element once. Buffers are every rank's, as are
        scalars, which FSDP2 refuses.

    Raises:
        ValueError: text names no layout, or world does not fit it.
    """
    if not 1 <= world <= MAX_WORLD:
        raise ValueError(f"--world must be in [1, {MAX_WORLD}], got {world}")
    if text == "fsdp1":
        return _flat(world, plan, parameters)
    shard_dim: Callable[[Entry], int | None]
    replicas = 1
    if text == "ddp":
        shard_dim = _never
    elif text == "fsdp2":
        shard_dim = _first
    elif text == "hsdp":
        if world % 2:
            raise ValueError(f"--world must be even for the two replicas of hsdp, got {world}")
        shard_dim, replicas = _first, 2
    elif text.startswith("tp:"):
        shard_dim = _by_pattern(text)
    else:
        raise ValueError(f"--layout must be ddp, fsdp1, fsdp2, hsdp or tp:PATTERN=DIM,..., got {text!r}")
    return lambda entry: _chunks(entry, shard_dim(entry), replicas, world // replicas)


def _never(entry: Entry) -> int | None:
    return None


def _first(entry: Entry) -> int | None:
    return 0 if entry.kind == "parameter" and entry.shape else None


def _by_pattern(text: str) -> Callable[[Entry], int | None]:
    rules: list[tuple[str, int]] = []
    for rule in text.removeprefix("tp:").split(","):
        pattern, equals, number = rule.rpartition("=")
        if not (equals and pattern and number.isdecimal()):
            raise ValueError(f"--layout tp: must be followed by PATTERN=DIM,..., got {rule!r}")
        rules.append((pattern, int(number)))

    def dim_of(entry: Entry) -> int | None:
        if entry.kind != "parameter":
            return None
        for pattern, dim in rules:
            if any(fnmatch.fnmatchcase(alias, pattern) for alias in entry.aliases):
                if dim >= len(entry.shape):
                    raise ValueError(
                        f"--layout: {pattern}={dim} must name a dimension of {entry.name}, "
                        f"got one of shape {list(entry.shape)}"
                    )
                return dim
        return None

    return dim_of


def _chunks(entry: Entry, dim: int | None, replicas: int, num_shards: int) -> list[Part]:
    """Shards on one dimension, of a (replicas, num_shards) mesh."""
    rows, columns = matrix_shape(entry.shape)
    if dim is None:
        return _parts([(tuple(range(replicas * num_shards)), rg.full_box((rows, columns)))])
    order: ShardOrder = [(dim, (1,))]
    found = []
    for shard in range(num_shards):
        ranks = tuple(replica * num_shards + shard for replica in range(replicas))
        sizes, offset = box_of_shard_order(entry.shape, order, (replicas, num_shards), (0, shard))
        if dim == 0:
            found.append((ranks, rg.box_at((offset[0], 0), (sizes[0], columns))))
        elif dim == 1:
            inner = math.prod(entry.shape[2:])
            found.append((ranks, rg.box_at((0, offset[1] * inner), (rows, sizes[1] * inner))))
        else:  # comes back in every step of the dimensions before it
            inner, period = math.prod(entry.shape[dim + 1 :]), math.prod(entry.shape[dim:])
            for first in range(0, columns, period):
                found.append((ranks, rg.box_at((0, first + offset[dim] * inner), (rows, sizes[dim] * inner))))
    return _parts(found)


def _parts(found: Sequence[tuple[tuple[int, ...], rg.Box]]) -> list[Part]:
    return [Part(ranks, box) for ranks, box in found if rg.numel(box)]


def _flat(world: int, plan: Plan, parameters: Sequence[str]) -> PartsOf:
    """FSDP1: each unit's parameters one behind the other, cut into `world` equal runs, the last ones padded."""
    starts: dict[str, tuple[str, int]] = {}
    totals: dict[str, int] = {}
    for name in parameters:
        entry, unit = plan.lookup(name), unit_of(name)
        if entry is None or entry.name in starts:  # tied: the first of its names counts
            continue
        starts[entry.name] = unit, totals.get(unit, 0)
        totals[unit] = totals.get(unit, 0) + math.prod(entry.shape)

    def parts_of(entry: Entry) -> list[Part]:
        shape, size = matrix_shape(entry.shape), math.prod(entry.shape)
        if entry.name not in starts:
            return _chunks(entry, None, 1, world)
        unit, start = starts[entry.name]
        length = -(-totals[unit] // world)
        found = []
        for rank in range(world):
            low, high = (min(max(length * index - start, 0), size) for index in (rank, rank + 1))
            found += [((rank,), box) for box in rg.boxes_of_run(shape, low, high - low)]
        return _parts(found)

    return parts_of


def bytes_by_rank(plan: Plan, parts_of: PartsOf, world: int) -> list[int]:
    """What each rank holds of the whole Plan; replicated tensors count on each rank that has them."""
    held = [0] * world
    for entry in plan.entries.values():
        for part in parts_of(entry):
            for rank in part.ranks:
                held[rank] += part.num_elements * entry.dtype.itemsize
    return held


@dataclass(frozen=True)
class Group:
    """Tensors of one shape, dtype and program whose names differ in their numbers only."""

    label: str
    entries: tuple[Entry, ...]

    @property
    def first(self) -> Entry:
        return self.entries[0]

    @property
    def num_elements(self) -> int:
        return len(self.entries) * math.prod(self.first.shape)


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def groups(plan: Plan, parts_of: PartsOf | None = None) -> list[Group]:
    """The Plan's tensors in groups, the largest first; of tensors whose names are alike but whose programs are not
    (an init that depends on the depth), all but the largest group come last. With parts_of, tensors of one group have
    the same owners too."""
    found: dict[object, list[Entry]] = {}
    for entry in plan.entries.values():
        # A random program reads as those of its fellows but for the name under which it draws.
        text = entry.program.describe().replace(entry.name, "*").split(" (drawn as")[0]
        owners = None if parts_of is None else tuple(parts_of(entry))
        found.setdefault((_pattern(entry.name), entry.shape, entry.dtype, text, owners), []).append(entry)
    by_pattern: dict[str, list[Group]] = {}
    for entries in found.values():
        pattern = _pattern(entries[0].name)
        label = f"{pattern} x {len(entries)}" if len(entries) > 1 else entries[0].name
        by_pattern.setdefault(pattern, []).append(Group(label, tuple(entries)))
    ranked: list[tuple[int, int, Group]] = []
    for same in by_pattern.values():
        same.sort(key=lambda group: -group.num_elements)
        ranked += [(place, -group.num_elements, group) for place, group in enumerate(same)]
    return [group for _, _, group in sorted(ranked, key=lambda one: (min(one[0], 1), one[1]))]


def num_elements(entries: Mapping[str, Entry]) -> int:
    """Elements of all tensors together."""
    return sum(math.prod(entry.shape) for entry in entries.values())
