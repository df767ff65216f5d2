"""Every function of region.py against plain index sets, counted out with numpy over small shapes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_shardinit import region
from torch_shardinit.region import Span, span

SETTINGS = settings(max_examples=300, deadline=None, derandomize=True)

spans = st.builds(span, st.integers(0, 9), st.integers(1, 6), st.integers(0, 7))
span_pairs = st.lists(st.tuples(spans, spans), min_size=0, max_size=3)
shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def indices(s: Span) -> list[int]:
    return [s.start + i * s.step for i in range(s.size)]


def members(box: region.Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*map(indices, box)))


def arange(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> region.Box:
    box = []
    for size in shape:
        start, step = draw(st.integers(0, size - 1)), draw(st.integers(1, 3))
        box.append(span(start, step, draw(st.integers(1, (size - 1 - start) // step + 1))))
    return tuple(box)


def test_span_has_a_normal_form() -> None:
    assert span(3, 5, 1) == Span(3, 1, 1) and span(3, 5, 0) == Span(3, 1, 0) and span(3, 5, 2) == Span(3, 5, 2)


@pytest.mark.parametrize("args", [(0, 0, 2), (0, -1, 2), (0, 1, -1)])
def test_error_span_out_of_range(args: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="step >= 1 and size >= 0"):
        span(*args)


def test_full_box_box_at_numel_slices() -> None:
    full = arange((4, 5, 6))
    box = region.box_at((1, 0, 2), (2, 5, 3))
    assert region.numel(box) == 30 and region.numel(()) == 1 and region.numel(region.box_at((1, 2), (0, 3))) == 0
    assert np.array_equal(full[region.slices(box)], full[1:3, 0:5, 2:5])
    assert np.array_equal(full[region.slices(region.full_box((4, 5, 6)))], full)
    assert np.array_equal(arange((7,))[region.slices((span(1, 3, 2),))], [1, 4])
    with pytest.raises(ValueError, match="same length"):
        region.box_at((1,), (2, 3))


@SETTINGS
@given(span_pairs)
def test_intersect(pairs: list[tuple[Span, Span]]) -> None:
    a, b = tuple(x for x, _ in pairs), tuple(y for _, y in pairs)
    common = region.intersect(a, b)
    expected = members(a) & members(b)
    assert (common is None) == (not expected)
    if common is not None:
        assert members(common) == expected
        assert all(s == span(*s) for s in common)


def test_intersect_of_every_small_pair() -> None:
    small = [span(*args) for args in itertools.product(range(4), range(1, 5), range(5))]
    for a, b in itertools.product(small, small):
        common = region.intersect((a,), (b,))
        assert (members(common) if common else set()) == members((a,)) & members((b,)), (a, b)


@SETTINGS
@given(span_pairs)
def test_subtract(pairs: list[tuple[Span, Span]]) -> None:
    a, b = tuple(x for x, _ in pairs), tuple(y for _, y in pairs)
    left = region.subtract(a, b)
    assert set().union(*map(members, left)) == members(a) - members(b)
    assert sum(map(region.numel, left)) == len(members(a) - members(b)), "the boxes must be disjoint"
    assert all(map(region.numel, left)) and all(s == span(*s) for box in left for s in box)


def test_subtract_leaves_few_boxes() -> None:
    n = region.full_box((12,))
    assert region.subtract(n, (span(3, 1, 4),)) == [(span(0, 1, 3),), (span(7, 1, 5),)]
    assert region.subtract(n, (span(0, 2, 6),)) == [(span(1, 2, 6),)]  # the odd ones
    assert region.subtract(n, (span(1, 10, 2),)) == [(span(0, 1, 1),), (span(2, 1, 9),)]
    assert region.subtract(n, (span(4, 2, 2),)) == [(span(0, 1, 4),), (span(5, 1, 1),), (span(7, 1, 5),)]
    assert len(region.subtract(region.full_box((12, 9)), region.box_at((2, 3), (4, 3)))) == 4
    assert region.subtract((), ()) == []
    # No more boxes than residue classes or gaps need, whichever are fewer, and the two ends.
    for start, step, size in itertools.product(range(6), range(2, 6), range(2, 6)):
        container = region.full_box((start + step * (size - 1) + 1 + 7,))
        taken = (span(start, step, size),)
        left = region.subtract(container, taken)
        assert len(left) <= min(size - 1, step - 1) + 2
        assert sorted(i for box in left for i in members(box)) == sorted(members(container) - members(taken))


@SETTINGS
@given(shapes, st.data())
def test_boxes_of_run(shape: tuple[int, ...], data: st.DataObject) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    length = data.draw(st.integers(0, total - start))
    boxes = region.boxes_of_run(shape, start, length)
    held = [arange(shape)[region.slices(box)].ravel() for box in boxes]
    assert np.array_equal(np.concatenate([*held, np.arange(0)]), np.arange(start, start + length)), "in order"
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_boxes_of_run_is_one_box_where_it_can_be() -> None:
    assert region.boxes_of_run((), 0, 1) == [()]
    assert region.boxes_of_run((), 0, 0) == [] and region.boxes_of_run((0, 3), 0, 0) == []
    assert region.boxes_of_run((4, 5), 5, 10) == [region.box_at((1, 0), (2, 5))]
    assert region.boxes_of_run((4, 5), 6, 3) == [region.box_at((1, 1), (1, 3))]
    assert region.boxes_of_run((4, 5, 6), 30, 12) == [region.box_at((1, 0, 0), (1, 2, 6))]
    assert len(region.boxes_of_run((4, 5, 6), 31, 58)) == 4  # ends in a row's middle on both sides
    assert len(region.boxes_of_run((4, 5, 6), 7, 106)) == 5


@pytest.mark.parametrize("run", [(-1, 2), (0, -1), (0, 21), (20, 1)])
def test_error_run_outside_the_tensor(run: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"must lie in \[0, 20\)"):
        region.boxes_of_run((4, 5), *run)


@SETTINGS
@given(shapes, st.data())
def test_grid_of_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    box = data.draw(boxes_in(shape))
    first, strides = region.grid_of_box(box, shape)
    assert len(strides) == len(shape)
    grid = np.full([s.size for s in box], first)
    for dim, stride in enumerate(strides):
        grid += (np.arange(box[dim].size) * stride).reshape([-1] + [1] * (len(shape) - dim - 1))
    assert np.array_equal(grid, arange(shape)[region.slices(box)])


def test_error_grid_of_box_wants_a_span_a_dimension() -> None:
    with pytest.raises(ValueError, match="one Span a dimension"):
        region.grid_of_box(region.full_box((2,)), (2, 3))


@SETTINGS
@given(shapes, st.data())
def test_rel(shape: tuple[int, ...], data: st.DataObject) -> None:
    container = data.draw(boxes_in(shape))
    inner = data.draw(boxes_in(tuple(s.size for s in container)))
    box = tuple(
        span(c.start + i.start * c.step, i.step * c.step, i.size) for c, i in zip(container, inner, strict=True)
    )
    held = arange(shape)[region.slices(container)]
    assert region.rel(box, container) == region.slices(inner)
    assert np.array_equal(held[region.rel(box, container)], arange(shape)[region.slices(box)])


@SETTINGS
@given(spans, spans)
def test_error_rel_outside_the_container(inner: Span, outer: Span) -> None:
    if set(indices(inner)) <= set(indices(outer)):
        (local,) = region.rel((inner,), (outer,))
        assert indices(outer)[local] == indices(inner)
    else:
        with pytest.raises(ValueError, match="must lie in its container"):
            region.rel((inner,), (outer,))


# --- box_of_view -------------------------------------------------------------------------------------------------


def set_as_box(owner: np.ndarray, addresses: list[int]) -> region.Box | None:
    """The same answer from the definition: the addresses' coordinates, if they are a product of evenly spaced sets."""
    if len(set(addresses)) != len(addresses) or not set(addresses) <= set(owner.ravel().tolist()):
        return None
    coordinates = np.argwhere(np.isin(owner, addresses))
    box = []
    for column in coordinates.T:
        values = np.unique(column)
        gaps = set(np.diff(values).tolist())
        if len(gaps) > 1:
            return None
        box.append(span(int(values[0]), gaps.pop() if gaps else 1, len(values)))
    return tuple(box) if region.numel(tuple(box)) == len(addresses) else None


@st.composite
def owners(draw: st.DrawFn) -> np.ndarray:
    """A tensor whose value at each element is its address: dense in any dimension order, now and then with gaps."""
    few_long, many_short = st.lists(st.integers(1, 12), max_size=2), st.lists(st.integers(1, 4), max_size=4)
    shape = draw(st.one_of(few_long, many_short))
    order = draw(st.permutations(range(len(shape))))
    gap = draw(st.sampled_from([0, 0, 0, 1, 2]))
    stored = [shape[dim] for dim in order]
    buffer = np.arange(7 + math.prod(stored[:-1]) * ((stored[-1] if stored else 1) + gap))
    inner = np.lib.stride_tricks.as_strided(
        buffer[3:],
        stored,
        [8 * s for s in region.row_major_strides([*stored[:-1], stored[-1] + gap] if stored else [])],
    )
    return inner.transpose(np.argsort(order)) if stored else inner


def check_view(owner: np.ndarray, sizes: list[int], strides: list[int], offset: int) -> region.Box | None:
    addresses = [
        offset + sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, sizes))
    ]
    owner_strides = [s // 8 for s in owner.strides]
    got = region.box_of_view(owner.shape, owner_strides, int(owner.ravel()[0]), sizes, strides, offset)
    if addresses:
        assert got == set_as_box(owner, addresses), (owner.shape, owner_strides, sizes, strides, offset)
    return got


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(owners(), st.data())
def test_box_of_view_any_strides(owner: np.ndarray, data: st.DataObject) -> None:
    """Arbitrary sizes and strides: a box exactly where the definition says so, and that box."""
    ndim = data.draw(st.integers(0, 3))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim))
    steps = [abs(s) // 8 for s in owner.strides] or [1]
    stride = st.one_of(st.integers(0, 8), st.sampled_from([*steps, *(2 * s for s in steps)]))
    strides = data.draw(st.lists(stride, min_size=ndim, max_size=ndim))
    check_view(owner, sizes, strides, int(owner.ravel()[0]) + data.draw(st.integers(-2, 12)))


@settings(max_examples=600, deadline=None, derandomize=True)
@given(owners(), st.data())
def test_box_of_view_slices_transposes_reshapes(owner: np.ndarray, data: st.DataObject) -> None:
    """Chains of the views that init code makes; a slice of the owner's own dimensions must be found."""
    view, sliced_only = owner, True
    for _ in range(data.draw(st.integers(0, 4))):
        kind = data.draw(st.sampled_from(["slice", "select", "transpose", "unsqueeze", "flatten", "split"]))
        if kind == "unsqueeze":
            view = view[..., None] if data.draw(st.booleans()) else view[None]
        elif not view.ndim:
            continue
        else:
            dim = data.draw(st.integers(0, view.ndim - 1))
            index: list = [slice(None)] * view.ndim
            if kind == "slice":
                start, step = data.draw(st.integers(0, view.shape[dim] - 1)), data.draw(st.integers(1, 3))
                index[dim] = slice(start, data.draw(st.integers(start + 1, view.shape[dim])), step)
                view = view[tuple(index)]
            elif kind == "select":
                index[dim] = data.draw(st.integers(0, view.shape[dim] - 1))
                view = view[(*index, ...)]  # the ellipsis keeps a 0-dim view a view
            elif kind == "transpose":
                view = view.swapaxes(dim, data.draw(st.integers(0, view.ndim - 1)))
            else:
                shape = [-1] if kind == "flatten" else [*view.shape[:dim], -1, 2, *view.shape[dim + 1 :]]
                try:
                    view, sliced_only = np.reshape(view, shape, copy=False), False
                except ValueError:
                    continue  # no view has that shape
    sizes, strides = list(view.shape), [s // 8 for s in view.strides]
    got = check_view(owner, sizes, strides, int(view.ravel()[0]))
    assert got is not None or not sliced_only


def test_box_of_view_named_cases() -> None:
    def box(owner: tuple, view: tuple) -> region.Box | None:
        return region.box_of_view(*owner, *view)

    row_major = ((4, 6), (6, 1), 0)
    assert box(row_major, ((24,), (1,), 0)) == region.full_box((4, 6))  # view(-1)
    assert box(row_major, ((12,), (2,), 1)) == (span(0, 1, 4), span(1, 2, 3))  # view(-1)[1::2]
    assert box(row_major, ((6, 4), (1, 6), 0)) == region.full_box((4, 6))  # .t()
    assert box(row_major, ((2, 2, 3), (12, 6, 2), 0)) == (span(0, 1, 4), span(0, 2, 3))  # rows split in two
    assert box(row_major, ((6,), (1,), 12)) == region.box_at((2, 0), (1, 6))  # [2]
    assert box(row_major, ((7,), (1,), 12)) is None  # a flat run that is no box
    assert box(row_major, ((4,), (7,), 0)) is None  # the diagonal
    assert box(row_major, ((4, 6), (0, 1), 0)) is None  # expanded
    assert box(row_major, ((5, 6), (6, 1), 0)) is None  # leaves the owner
    assert box(((12,), (1,), 0), ((2, 3), (6, 1), 0)) is None  # two runs in one dimension
    assert box(row_major, ((2, 0), (6, 1), 0)) == (Span(0, 1, 0), Span(0, 1, 0))  # empty
    channels_last = ((2, 3, 4, 5), (60, 1, 15, 3), 7)
    assert box(channels_last, ((120,), (1,), 7)) == region.full_box((2, 3, 4, 5))
    assert box(channels_last, ((60,), (1,), 67)) == region.box_at((1, 0, 0, 0), (1, 3, 4, 5))
    assert box(channels_last, ((2, 4, 5), (60, 15, 3), 8)) == region.box_at((0, 1, 0, 0), (2, 1, 4, 5))
    assert box(((), (), 3), ((1, 1), (5, 5), 3)) == () and box(((), (), 3), ((), (), 2)) is None
    assert box(((), (), 0), ((0,), (1,), 0)) is None and box(((0, 3), (3, 1), 0), ((1,), (1,), 0)) is None


def test_error_owner_overlaps_itself() -> None:
    with pytest.raises(ValueError, match="must not overlap itself"):
        region.box_of_view((3, 4), (0, 1), 0, (4,), (1,), 0)


def test_overlaps_itself_sees_every_overlap() -> None:
    """It may call strides that interleave an overlap; it must never miss one."""
    for sizes in itertools.product((1, 2, 3), repeat=3):
        for strides in itertools.product(range(7), repeat=3):
            addresses = [sum(map(math.prod, zip(at, strides, strict=True))) for at in np.ndindex(*sizes)]
            if len(set(addresses)) < len(addresses):
                assert region.overlaps_itself(sizes, strides), (sizes, strides)
    for shape in itertools.permutations((2, 3, 4)):
        for dims in itertools.permutations(range(3)):
            view = np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), shape, region.row_major_strides(shape))
            assert not region.overlaps_itself(view.transpose(dims).shape, view.transpose(dims).strides)
    assert not region.overlaps_itself((3, 0), (0, 0)) and not region.overlaps_itself((), ())
