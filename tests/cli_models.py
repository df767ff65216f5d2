"""Factories for test_cli.py: right ones, wrong ones, and right ones beside a sabotaged library."""

from __future__ import annotations

import ctypes
import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn


class Small(nn.Module):
    """A parameter that only the constructor sets, one of another dtype, a table, blocks of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 9) * 0.02)
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.norm = nn.BatchNorm1d(9)
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).tril())


def small() -> nn.Module:
    return Small()


def rank_dependent() -> nn.Module:
    model = small()
    model.register_buffer("rank", torch.full((3,), float(dist.get_rank())))
    return model


def rank_dependent_shape() -> nn.Module:
    return nn.Linear(3 + dist.get_rank(), 3)


def raises_on_rank_1() -> nn.Module:
    if dist.get_rank() == 1:
        raise KeyError("the cause")
    return small()


def waits_on_rank_1() -> nn.Module:
    if dist.get_rank() == 1:
        time.sleep(1000)
    return small()


def incomplete() -> nn.Module:
    model = small()
    model.extra = nn.Parameter(torch.empty(7))
    return model


def branches_on_random_numbers() -> nn.Module:
    return small() if torch.rand(1) < 2 else nn.Module()


def no_module() -> Any:
    return 5


five = 5

# What goes wrong in the library, in every process that imports this module. The seams that are patched are private:
# a change of theirs must come here too, or the tests of exit status 1 fail.
_sabotage = os.environ.get("SABOTAGE", "")
if _sabotage:
    from torch_shardinit import apply, plan
    from torch_shardinit.targets import Place

    _place_of, _apply_ = apply._place_of, plan.Plan.apply_

    def _at_zero(offset: Any, view: torch.Tensor, shape: tuple[int, ...]) -> Place:
        return Place(0, _place_of(offset, view, shape).steps)

    def _writes_zeros(pieces: Any, *_: Any) -> None:
        """Instead of apply.fill; for contiguous pieces of fp32."""
        for address, _, shape, *_ in pieces:
            ctypes.memset(address, 0, 4 * math.prod(shape))

    def _applies_and(what: Any) -> Any:
        def apply_(self: plan.Plan, *args: Any, **kwargs: Any) -> None:
            _apply_(self, *args, **kwargs)
            what()

        return apply_

    if _sabotage == "offset":
        apply._place_of = _at_zero
    elif _sabotage == "zeros":
        apply.fill = _writes_zeros
    elif _sabotage == "collective":
        plan.Plan.apply_ = _applies_and(lambda: dist.all_reduce(torch.ones(1)))
    elif _sabotage == "generator":
        plan.Plan.apply_ = _applies_and(lambda: torch.rand(1))
    else:
        raise ValueError(f"SABOTAGE must be one that is known, got {_sabotage!r}")
