"""What playing tensors costs in memory: one tensor at a time, with the temporaries that are alive at once."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

import torch_shardinit as shardinit
from torch_shardinit.model import materialise_
from torch_shardinit.program import Played
from torch_shardinit.verify_meter import InitMeter

P = nn.Parameter
ROWS = 2048
MIB = ROWS * 5120 * 4 / 2**20  # 40: above what malloc may keep for itself
NUM_TENSORS = 4


def empty() -> torch.Tensor:
    return torch.empty(ROWS, 5120)


def in_place() -> torch.Tensor:
    return empty().normal_().sin_().mul_(0.5)


def table() -> torch.Tensor:
    return torch.arange(ROWS * 5120.0).view(ROWS, 5120).cos_()


def with_a_temporary() -> torch.Tensor:
    return empty().copy_(torch.randn(ROWS, 5120).sin_())


def chain() -> torch.Tensor:
    """Each temporary is dropped when the next one has been made from it."""
    x = torch.randn(ROWS, 5120)
    for _ in range(6):
        x = x.sin()
    return x


def sum_of_two() -> torch.Tensor:
    return torch.randn(ROWS, 5120).sin_() + torch.rand(ROWS, 5120)


# How many tensors' worth of memory a program may hold at once.
CASES: list[tuple[Callable[[], torch.Tensor], int]] = [
    (in_place, 1),
    (table, 1),
    (with_a_temporary, 2),
    (chain, 2),
    (sum_of_two, 3),
]


class Model(nn.Module):
    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        for index in range(NUM_TENSORS):
            self.register_parameter(f"w{index}", P(make()))


def least_mib(model: nn.Module, work: Callable[[], object]) -> float:
    """The least peak of three runs: what else the process and the kernel do (pages that come back) only adds to one."""
    peaks = []
    for _ in range(3):
        gc.collect()
        meter = InitMeter()
        with meter.around(model):
            work()
        if meter.extra_bytes is None:
            pytest.skip("the peak of resident memory can't be reset here")
        peaks.append(meter.extra_bytes / 2**20)
    return min(peaks)


def peak_mib(plan: shardinit.Plan, model: nn.Module) -> float:
    materialise_(model, "cpu")
    for parameter in model.parameters():
        parameter.data.fill_(1)  # touched, so that it counts before
    return least_mib(model, lambda: plan.apply_(model, 3))


@pytest.mark.parametrize(("make", "alive"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_one_tensor_at_a_time(make: Callable[[], torch.Tensor], alive: int) -> None:
    with shardinit.recording():
        model = Model(make)
    plan = shardinit.record(model)
    assert all(isinstance(entry.program, Played) for entry in plan.entries.values())
    used = peak_mib(plan, model)
    assert (alive - 0.5) * MIB < used < (alive + 0.25) * MIB, f"{used:.0f} MiB, one tensor is {MIB:.0f}"


def test_a_tensor_that_others_are_computed_from_is_made_anew_for_each() -> None:
    """Not kept between them: two tensors at once, whatever their number."""

    def build() -> nn.Module:
        model = nn.Module()
        model.source = P(empty().normal_())
        for index in range(NUM_TENSORS):
            model.register_parameter(f"w{index}", P(model.source.detach().sin()))
        return model

    with shardinit.recording():
        model = build()
    plan = shardinit.record(model)
    assert plan.lookup("w1").program.depends_on == ("source",)  # type: ignore[union-attr]
    used = peak_mib(plan, model)
    assert 1.5 * MIB < used < 2.25 * MIB, f"{used:.0f} MiB, one tensor is {MIB:.0f}"


def test_a_shard_of_a_played_tensor_costs_the_tensor() -> None:
    with shardinit.recording():
        model = Model(with_a_temporary)
    plan = shardinit.record(model)
    shard = nn.Module()
    shard.part = torch.zeros(8, 5120)

    def fill() -> None:
        for index in range(NUM_TENSORS):
            plan.fill_(f"w{index}", shard.part, offset=(16, 0), seed=3)

    assert 1.5 * MIB < least_mib(shard, fill) < 2.25 * MIB
