"""Boxes: which elements of a tensor a piece of memory holds. Integers only, no torch.

A Box has one Span for each dimension of its owner, the whole (global) tensor. The owner of a 0-dim tensor has the
one Box (), of one element. A Box with a size of 0 anywhere is empty; functions that return `Box | None` never return
an empty one unless they say so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """The indices start, start + step, ..., size of them. step >= 1, and 1 where size <= 1, so that equal sets compare
    equal; make one with `span`."""

    start: int
    step: int
    size: int

    @property
    def last(self) -> int:
        return self.start + (self.size - 1) * self.step


Box = tuple[Span, ...]


def span(start: int, step: int, size: int) -> Span:
    """A Span in its normal form."""
    if step < 1 or size < 0:
        raise ValueError(f"a Span needs step >= 1 and size >= 0, got step {step} and size {size}")
    return Span(start, step if size > 1 else 1, size)


def full_box(shape: Sequence[int]) -> Box:
    return tuple(Span(0, 1, size) for size in shape)


def box_at(offset: Sequence[int], sizes: Sequence[int]) -> Box:
    """The box of `sizes` whose first element has the coordinates `offset`."""
    if len(offset) != len(sizes):
        raise ValueError(f"offset and sizes must have the same length, got {tuple(offset)} and {tuple(sizes)}")
    return tuple(span(start, 1, size) for start, size in zip(offset, sizes, strict=True))


def numel(box: Box) -> int:
    return math.prod(s.size for s in box)


def slices(box: Box) -> tuple[slice, ...]:
    """tensor[slices(box)] holds the elements of box, in order."""
    return tuple(slice(s.start, s.start + s.size * s.step, s.step) for s in box)


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def _intersect_span(a: Span, b: Span) -> Span | None:
    if not a.size or not b.size:
        return None
    gcd = math.gcd(a.step, b.step)
    distance, rest = divmod(b.start - a.start, gcd)
    if rest:
        return None
    # Chinese remainder theorem: a.start + k * a.step is a member of b's residue class for k = k0 mod b.step / gcd.
    modulus = b.step // gcd
    k0 = distance * pow(a.step // gcd, -1, modulus) % modulus if modulus > 1 else 0
    start, step = a.start + k0 * a.step, a.step * modulus
    low, high = max(a.start, b.start), min(a.last, b.last)
    if start < low:
        start += -(-(low - start) // step) * step
    return span(start, step, (high - start) // step + 1) if start <= high else None


def intersect(a: Box, b: Box) -> Box | None:
    """The elements in both boxes, or None where there are none."""
    both = []
    for x, y in zip(a, b, strict=True):
        common = _intersect_span(x, y)
        if common is None:
            return None
        both.append(common)
    return tuple(both)


def _subtract_span(a: Span, c: Span) -> list[Span]:
    """a without c, where c lies in a and is not empty."""
    (start, step, size) = _rel_span(c, a)
    before, after = start, a.size - 1 - (start + (size - 1) * step)
    found: list[tuple[int, int, int]] = []  # in a's own coordinates
    if size > 1 and step > 1:
        if size < step:  # fewer gaps between c's indices than residue classes beside c's
            found += [(start + i * step + 1, 1, step - 1) for i in range(size - 1)]
        else:
            # Residue classes run on into an end that is shorter than a step and holds no index of c's class.
            first, stop = start, start + (size - 1) * step + 1
            if before < step:
                first, before = 0, 0
            if after < step:
                stop, after = a.size, 0
            for residue in range(step):
                low = first + (residue - first) % step
                if residue != start % step and low < stop:
                    found.append((low, step, (stop - 1 - low) // step + 1))
    if before:
        found.append((0, 1, before))
    if after:
        found.append((a.size - after, 1, after))
    return sorted(span(a.start + i * a.step, k * a.step, n) for i, k, n in found)


def subtract(a: Box, b: Box) -> list[Box]:
    """Disjoint boxes that together hold the elements of a that are not in b."""
    common = intersect(a, b)
    if common is None:
        return [a] if numel(a) else []
    left = []
    for dim, (x, y) in enumerate(zip(a, common, strict=True)):
        left += [(*common[:dim], rest, *a[dim + 1 :]) for rest in _subtract_span(x, y)]
    return left


def boxes_of_run(shape: Sequence[int], start: int, length: int) -> list[Box]:
    """The row-major elements start .. start + length - 1 as boxes, in order: at most 2 * ndim - 1, and 1 in 0-dim."""
    total = math.prod(shape)
    if start < 0 or length < 0 or start + length > total:
        raise ValueError(f"a run must lie in [0, {total}), the elements of {tuple(shape)}, got {start} + {length}")
    if not length:
        return []
    return _boxes_of_run(tuple(shape), start, length)


def _boxes_of_run(shape: tuple[int, ...], start: int, length: int) -> list[Box]:
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    first, head_at = divmod(start, row)
    stop, tail = divmod(start + length, row)
    boxes: list[Box] = []
    if head_at:
        head = min(row - head_at, length)
        boxes += [(Span(first, 1, 1), *inner) for inner in _boxes_of_run(shape[1:], head_at, head)]
        if head == length:
            return boxes
        first += 1
    if stop > first:
        boxes.append((Span(first, 1, stop - first), *full_box(shape[1:])))
    if tail:
        boxes += [(Span(stop, 1, 1), *inner) for inner in _boxes_of_run(shape[1:], 0, tail)]
    return boxes


def grid_of_box(box: Box, shape: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """(row-major index of the box's first element, what one step along each dimension of the box adds to it)."""
    strides = row_major_strides(shape)
    if len(box) != len(strides):
        raise ValueError(f"a box needs one Span a dimension of its owner, got {len(box)} for shape {tuple(shape)}")
    first_global_index = sum(s.start * stride for s, stride in zip(box, strides, strict=True))
    return first_global_index, tuple(s.step * stride for s, stride in zip(box, strides, strict=True))


def _rel_span(inner: Span, outer: Span) -> Span:
    start, off_grid = divmod(inner.start - outer.start, outer.step)
    step, off_step = divmod(inner.step, outer.step) if inner.size > 1 else (1, 0)
    if inner.size and (off_grid or off_step or start < 0 or start + (inner.size - 1) * step >= outer.size):
        raise ValueError(f"the box must lie in its container, got {inner} in {outer}")
    return span(start, step, inner.size) if inner.size else Span(0, 1, 0)


def rel(box: Box, container: Box) -> tuple[slice, ...]:
    """Where `box` lies in a tensor that holds exactly `container`: tensor[rel(box, container)] is its elements.

    Slices and no Box, for torch takes a Span, being a tuple, for a list of indices.
    """
    return slices(tuple(_rel_span(inner, outer) for inner, outer in zip(box, container, strict=True)))


def _progressions(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]] | None:
    """The addresses of a view as (stride, count) progressions, smallest stride first, those that continue each other
    joined; None where they overlap or interleave (then the addresses are no box of anything)."""
    joined: list[tuple[int, int]] = []
    extent = 0
    for stride, count in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1):
        if stride <= extent:
            return None
        extent += stride * (count - 1)
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = (joined[-1][0], joined[-1][1] * count)
        else:
            joined.append((stride, count))
    return joined


def overlaps_itself(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor may have two elements at one address. Strides that interleave without meeting, sizes (2, 3)
    with strides (3, 2), count as overlapping: no ordinary view has them."""
    return 0 not in sizes and _progressions(sizes, strides) is None


def box_of_view(
    owner_shape: Sequence[int],
    owner_strides: Sequence[int],
    owner_offset: int,
    view_sizes: Sequence[int],
    view_strides: Sequence[int],
    view_offset: int,
) -> Box | None:
    """The set of the owner's elements that a view of the same storage addresses, or None where it is no box: a
    diagonal, a flat run that ends inside a row, an expanded view, a view that leaves the owner.

    The owner may have its dimensions in any order in memory (channels_last) and gaps between its rows; one that
    overlaps itself is a ValueError. Ndim and order of the view do not matter. Strides and offsets count elements.
    An empty view gives an empty box (None in a 0-dim owner, where no box is empty).
    """
    if overlaps_itself(owner_shape, owner_strides):
        raise ValueError(
            f"an owner must not overlap itself, got shape {tuple(owner_shape)} and strides {tuple(owner_strides)}"
        )
    if 0 in view_sizes:
        return tuple(Span(0, 1, 0) for _ in owner_shape) if len(owner_shape) else None
    progressions = _progressions(view_sizes, view_strides)
    if progressions is None or 0 in owner_shape:
        return None
    # Owner dimensions from the innermost in memory outwards, and the coordinates of the view's first element.
    dims = sorted((dim for dim, size in enumerate(owner_shape) if size > 1), key=lambda dim: owner_strides[dim])
    box = [Span(0, 1, 1)] * len(owner_shape)
    rest = view_offset - owner_offset
    for dim in reversed(dims):
        index, rest = divmod(rest, owner_strides[dim])
        if not 0 <= index < owner_shape[dim]:
            return None
        box[dim] = Span(index, 1, 1)
    if rest:
        return None
    level = 0  # dims[level:] are not yet walked along: each dimension takes one progression at most
    for stride, count in progressions:
        while count > 1:
            while level < len(dims) and level + 1 < len(dims) and owner_strides[dims[level + 1]] <= stride:
                level += 1
            if level == len(dims):
                return None
            dim = dims[level]
            step, off_step = divmod(stride, owner_strides[dim])
            if off_step or not step:
                return None
            start, taken = box[dim].start, count
            if start + (count - 1) * step >= owner_shape[dim]:
                # The progression runs into the next dimension: each of this one's rounds must be the same.
                if level + 1 == len(dims):
                    return None
                outer = owner_strides[dims[level + 1]]
                taken, off_round = divmod(outer, stride)
                if off_round or count % taken or start + (taken - 1) * step >= owner_shape[dim]:
                    return None
                stride = outer
            box[dim] = span(start, step, taken)
            count //= taken
            level += 1
    return tuple(box)
