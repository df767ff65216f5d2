"""Plan.diff: one readable line for each difference, and none where Plans are equal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from recorded_models import Decoder, Zoo

import torch_shardinit as shardinit
from torch_shardinit.plan import Entry, Plan
from torch_shardinit.program import Exact, Program, Step, Unwritten
from torch_shardinit.region import full_box


def plan_of(make: Callable[[], nn.Module]) -> Plan:
    with shardinit.recording():
        model = make()
    return shardinit.record(model)


class Transformer(nn.Module):
    def __init__(self, layers: int = 3, std: float = 0.02, width: int = 4, theta: float = 1e4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"wo": nn.Linear(width, 6, bias=False)}) for _ in range(layers))
        for layer in self.layers:
            nn.init.normal_(layer["wo"].weight, std=std if layer is self.layers[-1] else 0.02)
        self.register_buffer("rotary", theta ** -(torch.arange(4.0) / 4))
        self.register_buffer("table", torch.tensor([1.0, 2.0, std]))


def test_the_line_that_people_want() -> None:
    before, after = plan_of(Transformer), plan_of(lambda: Transformer(std=0.01))
    (wo, table) = before.diff(after)
    assert wo == "layers.2.wo.weight: normal std 0.02 -> 0.01"
    assert table.startswith("table: a captured constant of 12 bytes has other values, ") and table.endswith(
        "bytes of it"
    )
    assert after.diff(before)[0] == "layers.2.wo.weight: normal std 0.01 -> 0.02"
    assert before.diff(before) == before.diff(plan_of(Transformer)) == []


def test_added_removed_and_reshaped() -> None:
    before, after = plan_of(Transformer), plan_of(lambda: Transformer(layers=4, width=5))
    assert before.diff(after) == [
        *(f"layers.{i}.wo.weight: shape 6x4 -> 6x5" for i in range(3)),
        "layers.3.wo.weight: added, 6x5 float32 exact normal(std=0.02, mean=0)",
    ]
    assert after.diff(before)[-1] == "layers.3.wo.weight: removed, 6x5 float32 exact normal(std=0.02, mean=0)"


def test_an_argument_of_a_played_operation() -> None:
    (line,) = plan_of(Transformer).diff(plan_of(lambda: Transformer(theta=5e5)))
    assert line == "rotary: operation 3, aten::pow.Scalar 10000.0 -> 500000.0, differs"


def exact(*steps: Step, drawn_as: str | None = None) -> Program:
    return Exact(steps, drawn_as)


NORMAL = Step("normal", (0.02, 0.0))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (exact(NORMAL), exact(Step("normal", (0.020000001, 1.0))), "normal std 0.02 -> 0.020000001, mean 0 -> 1"),
        (exact(Step("fill", (0.0,))), exact(Step("fill", (-0.0,))), "fill 0 -> -0"),
        (exact(NORMAL, Step("mul", (2.0,))), exact(NORMAL, Step("mul", (3.0,))), "mul 2 -> 3"),
        (exact(NORMAL), exact(NORMAL, Step("neg")), "normal(std=0.02, mean=0) -> normal(std=0.02, mean=0); neg()"),
        (
            exact(NORMAL),
            exact(NORMAL, drawn_as="b"),
            "normal(std=0.02, mean=0) -> normal(std=0.02, mean=0) (drawn as b)",
        ),
        (exact(NORMAL), Unwritten(), "exact normal(std=0.02, mean=0) -> unwritten nothing wrote it"),
        (exact(Step("uniform", (0.0, 1.0))), exact(NORMAL), "uniform(a=0, b=1) -> normal(std=0.02, mean=0)"),
    ],
)
def test_programs(old: Program, new: Program, line: str) -> None:
    plans = [Plan([Entry("a", ("a",), "parameter", (2, 2), torch.float32, one)]) for one in (old, new)]
    assert plans[0].diff(plans[1]) == [f"a: {line}"]


def test_regions_of_steps_are_shown() -> None:
    def plan(value: float) -> Plan:
        row = (full_box((2, 2))[0]._replace(size=1), full_box((2, 2))[1])
        steps = (NORMAL, Step("fill", (value,), row))
        return Plan([Entry("a", ("a",), "parameter", (2, 2), torch.float32, Exact(steps))])

    assert plan(0.0).diff(plan(1.0)) == ["a: [0, 0:2] fill 0 -> 1"]


def test_what_is_not_the_program() -> None:
    old = Entry("a", ("a",), "parameter", (2,), torch.float32, Exact((NORMAL,)))
    new = Entry("a", ("a", "b"), "buffer", (), torch.bfloat16, Exact((NORMAL,)), persistent=False)
    assert Plan([old]).diff(Plan([new], stream_version=9)) == [
        "stream version: 1 -> 9",
        "a: shape 2 -> scalar",
        "a: dtype float32 -> bfloat16",
        "a: kind parameter -> buffer",
        "a: names a -> a, b",
        "a: persistent True -> False",
    ]


def test_a_step_in_the_middle_of_many() -> None:
    def plan(middle: float) -> Plan:
        steps = [NORMAL, *(Step("mul", (middle if i == 9 else 2.0,)) for i in range(20))]
        other = [*steps[:-1], Step("neg" if middle == 2 else "mul", () if middle == 2 else (2.0,))]
        return Plan([Entry("a", ("a",), "parameter", (2,), torch.float32, Exact(tuple(other)))])

    assert plan(2.0).diff(plan(3.0)) == ["a: normal(std=0.02, mean=0); mul(2); mul(2); mul(2); mul(2); mul(2); ... 12 "
                                         "more; mul(2); mul(2); neg() -> normal(std=0.02, mean=0); mul(2); mul(2); "
                                         "mul(2); mul(2); mul(2); ... 12 more; mul(2); mul(2); mul(2)"]  # fmt: skip


def test_a_diff_is_empty_only_for_equal_plans() -> None:
    plans = [
        plan_of(make)
        for make in (
            Zoo,
            Decoder,
            lambda: Decoder(layers=1),
            Transformer,
            lambda: Transformer(std=0.3),
            lambda: Zoo().half(),
        )
    ]
    for a in plans:
        for b in plans:
            assert (a.diff(b) == []) == (a == b) == (a is b)
