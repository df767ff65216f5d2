"""What recording, locating, applying and a raw fill cost, counted and not timed: lines of our Python that run, and
calls of the native module. Limits are generous, but a loop over all tensors in another one is beyond them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from fake_world import run_places
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import torch_shardinit as shardinit
from torch_shardinit import _native
from torch_shardinit.locate import locate
from torch_shardinit.model import materialise_, param_init_fn
from torch_shardinit.region import row_major_strides

OURS = os.path.dirname(os.path.abspath(shardinit.__file__)) + os.sep
# Lines for one more tensor, at most; about half of that is run now.
LIMITS = {"recording": 1500, "record": 1000, "locate": 660, "apply": 300}
FEW, MANY = 60, 240  # tensors


def lines_of(call: Callable[[], object]) -> int:
    """How many lines of this package's Python run in a call; each round of a loop counts, on one line too."""
    count = 0

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class Net(nn.Module):
    """num_tensors random tensors, and a table that is played, in blocks of two."""

    def __init__(self, num_tensors: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 6, bias=False)) for _ in range(num_tensors // 2)
        )
        self.register_buffer("table", torch.arange(8).float().cos())
        for block in self.blocks:
            nn.init.trunc_normal_(block[0].weight, std=0.02)  # type: ignore[index]
            with torch.no_grad():
                block[1].weight.mul_(0.5)  # type: ignore[index]


def shard(model: Net, layout: str) -> nn.Module:
    if layout == "plain":
        pass
    elif layout == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        return FullyShardedDataParallel(
            model,
            use_orig_params=True,
            auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, nn.Sequential),
            param_init_fn=param_init_fn(model, device="cpu", fill=False),
            device_id=torch.device("cpu"),
        )
    materialise_(model, "cpu")
    return model


def native_calls(call: Callable[[], object]) -> tuple[int, int]:
    """(calls of the native fill, their pieces)."""
    calls: list[int] = []
    fill = _native.fill

    def counting(pieces: list[Any], num_threads: int) -> None:
        calls.append(len(pieces))
        fill(pieces, num_threads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "fill", counting)
        call()
    return len(calls), sum(calls)


def cost(num_tensors: int, layout: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    models: list[Net] = []

    def build() -> None:
        with shardinit.recording():
            models.append(Net(num_tensors))

    build()  # what is only done once
    found["recording"] = lines_of(build)
    model = models[-1]
    plan = shardinit.record(model)
    found["record"] = lines_of(lambda: shardinit.record(model))
    sharded = shard(model, layout)
    plan.apply_(sharded, 0)
    found["locate"] = lines_of(lambda: locate(sharded))
    found["apply"] = lines_of(lambda: plan.apply_(sharded, 0)) - found["locate"]
    found["native"] = native_calls(lambda: plan.apply_(sharded, 0))
    return found


def test_lines_are_counted() -> None:
    assert lines_of(lambda: None) == 0
    few, many = lines_of(lambda: row_major_strides((1,) * 10)), lines_of(lambda: row_major_strides((1,) * 110))
    assert many - few >= 100


@pytest.mark.parametrize("layout", ["plain", "fsdp2", "fsdp1"])
def test_cost_of_a_tensor_is_bounded_however_many_there_are(layout: str) -> None:
    few, many, more = (run_places(cost, [(1, 3)], num, layout)[0] for num in (FEW, MANY, 2 * MANY))
    for part, limit in LIMITS.items():
        first = (many[part] - few[part]) / (MANY - FEW)
        second = (more[part] - many[part]) / MANY
        assert first <= limit, f"{part}: {first:.0f} lines for one more tensor"
        assert second <= 1.15 * first, f"{part}: {first:.0f} lines for one more tensor, then {second:.0f}: not linear"
    for num_tensors, counts in ((FEW, few), (MANY, many), (2 * MANY, more)):
        calls, pieces = counts["native"]
        assert calls == 1, f"{num_tensors} tensors must be one batch, got {calls} native calls"
        # A rank may hold nothing of a tensor; what it holds is one piece, for all steps are on whole tensors.
        assert num_tensors / 3 <= pieces <= num_tensors


def test_a_raw_fill_runs_few_lines_and_one_native_call() -> None:
    tensor = torch.empty(64)

    def fill() -> None:
        shardinit.normal_(tensor, 0.02, seed=1, tensor_id="w", offset=3)

    fill()
    assert lines_of(fill) <= 160
    assert native_calls(fill) == (1, 1)
