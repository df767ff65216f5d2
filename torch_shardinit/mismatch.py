"""Replicas that differ: who is on which side, and the first element, found by digests of ever smaller parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from . import region
from .digest import add_sums, digest_parts
from .errors import ReplicaMismatchError
from .exchange import Exchange
from .holdings import Holding
from .merge import Tensor, show_ranks

_FAN_OUT = 64  # parts that a region is cut into at a time
_MOST_LOCATED = 16  # tensors whose first difference is looked for


@dataclass(frozen=True)
class Mismatch:
    """A tensor whose replicas differ.

    sides: global ranks that agree with each other, most first. first: the global coordinates of the first element that
    differs in the first region that does, None where it was not looked for. values: its bits on each side.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sides: tuple[tuple[int, ...], ...]
    first: tuple[int, ...] | None = None
    values: tuple[int, ...] = ()

    def __str__(self) -> str:
        sides = " | ".join(show_ranks(side) for side in self.sides)
        text = f"{self.name or 'the tensor'} ({self.dtype} {list(self.shape)}): ranks {sides}"
        if self.first is not None:
            shown = " | ".join(f"{value:#x}" for value in self.values)
            text += f"; first difference at {list(self.first)}, bits {shown}"
        return text


@dataclass
class _Search:
    """One region of one tensor, and the elements [low, high) of it, in the order of its boxes, where the first
    difference lies."""

    tensor: Tensor
    sides: list[list[int]]  # ranks of the group
    numel: int
    ours: Holding | None
    low: int = 0
    high: int = 0

    def bounds(self) -> list[int]:
        length = self.high - self.low
        return [self.low + length * k // _FAN_OUT for k in range(_FAN_OUT + 1)]


def _parts(one: Holding, low: int, high: int) -> list[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]]:
    """The elements [low, high) of a holding, in the order of its boxes."""
    found = []
    begin = 0
    for box, view in one.boxes():
        size = region.numel(box)
        first, stop = max(low - begin, 0), min(high - begin, size)
        if first < stop:
            for inner in region.boxes_of_run([s.size for s in box], first, stop - first):
                corner = tuple(s.start + t.start for s, t in zip(box, inner, strict=True))
                found.append((view[region.slices(inner)], corner, one.shape))
        begin += size
    return found


def _digests(search: _Search) -> np.ndarray:
    """Of the fan-out's parts, two u64 each; zeros where this rank holds none."""
    rows = np.zeros((_FAN_OUT, 2), np.uint64)
    if search.ours is None:
        return rows
    bounds = search.bounds()
    parts, owner = [], []
    for k in range(_FAN_OUT):
        for part in _parts(search.ours, bounds[k], bounds[k + 1]):
            parts.append(part)
            owner.append(k)
    sums: list[list[int]] = [[] for _ in range(_FAN_OUT)]
    for k, one in zip(owner, digest_parts(parts), strict=True):
        sums[k].append(one)
    for k in range(_FAN_OUT):
        total = add_sums(sums[k])
        rows[k] = total & (2**64 - 1), total >> 64
    return rows


def _element(search: _Search) -> np.ndarray:
    """The global index and the bits of the element at `low`: three u64."""
    row = np.zeros(3, np.uint64)
    if search.ours is not None:
        ((view, corner, shape),) = _parts(search.ours, search.low, search.low + 1)
        strides = region.row_major_strides(shape)
        raw = view.detach().reshape(1).cpu().view(torch.uint8).numpy().tobytes()
        bits = int.from_bytes(raw, "little")
        index = sum(start * stride for start, stride in zip(corner, strides, strict=True))
        row[:] = index, bits & (2**64 - 1), bits >> 64
    return row


def _coordinates(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for stride in region.row_major_strides(shape):
        at, index = divmod(index, stride)
        found.append(at)
    return tuple(found)


def _locate(exchange: Exchange, searches: list[_Search]) -> list[tuple[tuple[int, ...], tuple[int, ...]] | None]:
    """For each search its first element's coordinates and bits on each side; None if memory changed meanwhile."""
    lost = [False] * len(searches)
    while any(one.high - one.low > 1 for one in searches):
        found = exchange.gather(np.stack([_digests(one) for one in searches]))
        for number, one in enumerate(searches):
            if one.high - one.low <= 1:
                continue
            holders = [rank for side in one.sides for rank in side]
            differs = (found[holders, number] != found[holders[0], number]).any(axis=(0, 2))
            bounds = one.bounds()
            lost[number] = lost[number] or not differs.any()
            k = int(np.argmax(differs))
            while bounds[k] == bounds[k + 1]:  # only where nothing differed
                k += 1
            one.low, one.high = bounds[k], bounds[k + 1]
    elements = exchange.gather(np.stack([_element(one) for one in searches]))
    answers: list[tuple[tuple[int, ...], tuple[int, ...]] | None] = []
    for number, one in enumerate(searches):
        first = [elements[side[0], number] for side in one.sides]
        values = tuple(int(row[1]) | int(row[2]) << 64 for row in first)
        answers.append(None if lost[number] else (_coordinates(int(first[0][0]), one.tensor.shape), values))
    return answers


def _mismatches(exchange: Exchange, holdings: list[Holding], tensors: list[Tensor]) -> list[Mismatch]:
    """Of tensors whose replicas differ. Collective, on every rank."""
    own = {name: one for one in holdings for name in one.names}
    searches: list[_Search] = []
    for tensor in tensors:
        for one in tensor.regions():
            if len(one.ranks_of_sum) > 1:
                sides = sorted(one.ranks_of_sum.values(), key=lambda ranks: (-len(ranks), ranks))
                held = any(exchange.rank in side for side in sides)
                ours = own.get(tensor.name) if held else None
                searches.append(_Search(tensor, sides, one.numel, ours, 0, one.numel))
                break
    located = _locate(exchange, searches[:_MOST_LOCATED])
    found = []
    for number, search in enumerate(searches):
        answer = located[number] if number < len(located) else None
        shown = tuple(tuple(exchange.global_ranks(side)) for side in search.sides)
        first, values = answer or (None, ())
        found.append(Mismatch(search.tensor.name, search.tensor.dtype, search.tensor.shape, shown, first, values))
    return found


def raise_for_mismatches(exchange: Exchange, holdings: list[Holding], differing: list[Tensor], of: int) -> None:
    """Raises ReplicaMismatchError, on every rank, where the replicas of some of `of` tensors differ."""
    if not differing:
        return
    found = _mismatches(exchange, holdings, differing)
    shown = "\n".join(f"  {one}" for one in found[:_MOST_LOCATED])
    more = f"\n  and {len(found) - _MOST_LOCATED} more" if len(found) > _MOST_LOCATED else ""
    raise ReplicaMismatchError(
        f"{exchange.what}: ranks that hold the same elements must hold the same bits; {len(found)} of {of} "
        f"tensors differ (name: ranks that agree | ranks that agree with each other):\n{shown}{more}",
        tuple(found),
    )
