"""Exact programs: straight() against an interpreter that works element by element."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_shardinit import region as rg
from torch_shardinit.program import Exact, Step, live_steps


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> rg.Box:
    spans = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        step = draw(st.integers(1, 3))
        count = draw(st.integers(1, (size - 1 - start) // step + 1))
        spans.append(rg.span(start, step, count))
    return tuple(spans)


@st.composite
def programs(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Step], rg.Box]:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    steps = []
    for number in range(draw(st.integers(0, 7))):
        region = draw(st.none() | boxes(shape))
        op = draw(st.sampled_from(["fill", "mul", "add"]))
        steps.append(Step(op, (float(number),), region))  # the number tells steps apart
    return shape, steps, draw(boxes(shape))


def chains(shape: tuple[int, ...], steps: list[Step]) -> np.ndarray:
    """Per element, the steps that make it, by brute force."""
    grid = np.empty(shape, dtype=object)
    for index in np.ndindex(*shape):
        chain: tuple[Step, ...] = ()
        for step in steps:
            inside = step.region is None or all(
                i in range(s.start, s.last + 1, s.step) for i, s in zip(index, step.region, strict=True)
            )
            if inside and step.overwrites:
                chain = (step,)
            elif inside and chain:
                chain = (*chain, step)
        grid[index] = chain
    return grid


@settings(max_examples=400, deadline=None)
@given(programs())
def test_straight_is_the_chain_of_each_element(case: tuple[tuple[int, ...], list[Step], rg.Box]) -> None:
    shape, steps, box = case
    want = chains(shape, steps)
    seen = np.zeros(shape, dtype=int)
    for piece, chain in Exact(tuple(steps)).straight(box):
        seen[rg.slices(piece)] += 1
        for index in itertools.product(*(range(s.start, s.last + 1, s.step) for s in piece)):
            assert want[index] == chain
    inside = np.zeros(shape, dtype=int)
    inside[rg.slices(box)] = 1
    assert (seen == inside).all(), "the pieces must be disjoint and together the box"


@settings(max_examples=300, deadline=None)
@given(programs())
def test_dead_steps_change_nothing(case: tuple[tuple[int, ...], list[Step], rg.Box]) -> None:
    shape, steps, _ = case
    kept = [steps[index] for index in live_steps(steps, shape)]
    assert (chains(shape, kept) == chains(shape, steps)).all()


@settings(max_examples=200, deadline=None)
@given(programs())
def test_unwritten_and_covers(case: tuple[tuple[int, ...], list[Step], rg.Box]) -> None:
    shape, steps, _ = case
    program = Exact(tuple(steps))
    want = np.array([not chain for chain in chains(shape, steps).reshape(-1)]).reshape(shape)
    got = np.zeros(shape, dtype=bool)
    for box in program.unwritten(shape):
        got[rg.slices(box)] = True
    assert (got == want).all()
    assert program.covers(shape) == (not want.any())


def test_pieces_follow_the_regions_and_not_the_size() -> None:
    shape = (1_000_000, 4096)
    row = (rg.Span(5, 1, 1), rg.Span(0, 1, 4096))
    program = Exact((Step("normal", (0.02, 0.0)), Step("fill", (0.0,), row)))
    pieces = program.straight(rg.full_box(shape))
    assert [box[0] for box, _ in pieces] == [rg.Span(0, 1, 5), rg.Span(5, 1, 1), rg.Span(6, 1, 999_994)]
    assert program.straight(rg.box_at((8, 0), (100, 4096))) == [
        (rg.box_at((8, 0), (100, 4096)), (Step("normal", (0.02, 0.0)),))
    ]


def test_dead_stores_are_removed() -> None:
    rows = (rg.Span(0, 1, 2), rg.Span(0, 1, 4))
    inner = (rg.Span(0, 1, 1), rg.Span(1, 1, 2))
    steps = (Step("uniform", (0.0, 1.0)), Step("mul", (2.0,)), Step("fill", (1.0,), inner), Step("normal", (1.0, 0.0)))
    assert Exact(steps).steps == steps[3:]
    region_steps = (Step("fill", (0.0,)), Step("mul", (2.0,), inner), Step("normal", (1.0, 0.0), rows))
    assert Exact(region_steps).steps == (region_steps[0], region_steps[2])
    halves = [Step("fill", (0.0,)), *(Step("fill", (1.0,), (rg.Span(at, 1, 2), rg.Span(0, 1, 4))) for at in (0, 2))]
    assert live_steps(halves, (4, 4)) == [1, 2]
    assert live_steps(halves) == [0, 1, 2], "without the shape the halves may not be all"


def test_equal_neighbours_are_one_piece() -> None:
    half = (rg.Span(0, 1, 2), rg.Span(0, 1, 4))
    program = Exact((Step("fill", (3.0,), half), Step("fill", (1.0,))))
    assert len(program.straight(rg.full_box((4, 4)))) == 1


def test_an_empty_box_has_no_pieces() -> None:
    assert Exact((Step("fill", (1.0,)),)).straight((rg.Span(0, 1, 0),)) == []


def test_describe() -> None:
    program = Exact((Step("trunc_normal", (0.02, 0.0, -2.0, 2.0)), Step("fill", (7.0,), (rg.Span(1, 1, 2),))))
    assert program.describe() == "trunc_normal(std=0.02, mean=0, a=-2, b=2); [1:3] fill(7)"


def test_error_step() -> None:
    with pytest.raises(ValueError, match=r"op must be one of .*, got 'pow'"):
        Step("pow", (2.0,))
    with pytest.raises(ValueError, match="normal takes 2 arguments, got"):
        Step("normal", (1.0,))
