"""Pipeline stages: whatever is split off, by torch's pipelining or by hand, has the bits of the whole model."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from guards import local_init
from torch.distributed.pipelining import SplitPoint, pipeline

import torch_shardinit as shardinit


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("table", torch.arange(6.0).cos())
        nn.init.trunc_normal_(self.linear.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * self.scale + self.table


class Model(nn.Module):
    """Four blocks, in a container whose keys stay when members are taken out."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=2)
        self.blocks = nn.ModuleDict({str(index): Block() for index in range(4)})
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) if self.embedding is not None else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.head is not None else x


def recorded(tied: bool = False) -> Model:
    with shardinit.recording():
        return Model(tied)


@functools.cache
def whole(tied: bool = False) -> dict[str, torch.Tensor]:
    model = shardinit.init_model_(recorded(tied), 5, device="cpu")
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}


def assert_part_of_whole(stage: nn.Module, rename: Callable[[str], str] = str, tied: bool = False) -> set[str]:
    found = set()
    for name, tensor in [*stage.named_parameters(remove_duplicate=False), *stage.named_buffers()]:
        assert_bitwise_equal(patterns(tensor), patterns(whole(tied)[rename(name)]), name)
        found.add(rename(name))
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("starts", [(), (2,), (1, 3), (1, 2, 3)])
def test_stages_of_torch_pipelining(starts: tuple[int, ...], tied: bool) -> None:
    """pipeline() traces the model and makes new modules, with the old names; it copies a tied parameter."""
    model = recorded(tied)
    plan = shardinit.record(model)
    split = {f"blocks.{start}": SplitPoint.BEGINNING for start in starts}
    pipe = pipeline(model, (torch.zeros(2, 3, dtype=torch.long, device="meta"),), split_spec=split)
    assert pipe.num_stages == len(starts) + 1
    names: set[str] = set()
    for index in reversed(range(pipe.num_stages)):
        stage = pipe.get_stage_module(index).to_empty(device="cpu")
        with local_init(), warnings.catch_warnings():
            if not tied:  # else the first stage has both ends of the tie, apart, and we say so
                warnings.simplefilter("error")
            plan.apply_(stage, 5)
        names |= assert_part_of_whole(stage, tied=tied)
    assert names == set(whole(tied))


def pruned(keep: range, first: bool, last: bool) -> Model:
    """A stage as torchtitan makes it: a copy of the whole on meta, less what other stages hold."""
    stage = copy.deepcopy(recorded())
    for index in set(range(4)) - set(keep):
        del stage.blocks[str(index)]
    if not first:
        stage.embedding = None  # type: ignore[assignment]
    if not last:
        stage.norm, stage.head = None, None  # type: ignore[assignment]
    return stage


def test_stages_pruned_from_a_copy() -> None:
    names: set[str] = set()
    for keep, first, last in [(range(3, 4), False, True), (range(0, 1), True, False), (range(1, 3), False, False)]:
        stage = pruned(keep, first, last)
        with local_init():
            shardinit.init_model_(stage, 5, device="cpu")
        names |= assert_part_of_whole(stage)
    assert names == set(whole())


class Stage(nn.Module):
    """A stage with numbers of its own: blocks.0 is the whole model's blocks.{start}."""

    def __init__(self, start: int, size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(size))
        self.start = start

    def name_in_whole(self, name: str) -> str:
        container, index, rest = name.split(".", 2)
        return f"{container}.{self.start + int(index)}.{rest}"


@pytest.mark.parametrize(("start", "size"), [(0, 4), (1, 2), (3, 1)])
def test_stages_numbered_on_their_own(start: int, size: int) -> None:
    """By its own recording, and, built without one, by the Plan of the whole."""
    with shardinit.recording():
        stage = Stage(start, size)
    with local_init():
        shardinit.init_model_(stage, 5, rename=stage.name_in_whole, device="cpu")
    assert len(assert_part_of_whole(stage, stage.name_in_whole)) == 4 * size

    stage = Stage(start, size)
    with local_init():
        shardinit.record(recorded()).apply_(stage, 5, rename=stage.name_in_whole)
    assert len(assert_part_of_whole(stage, stage.name_in_whole)) == 4 * size


def test_without_rename_another_block_is_filled() -> None:
    with shardinit.recording():
        stage = Stage(2, 1)
    shardinit.init_model_(stage, 5, device="cpu")
    with pytest.raises(AssertionError, match="elements differ"):
        assert_part_of_whole(stage, stage.name_in_whole)


def test_error_a_tie_to_another_stage() -> None:
    """A stage that holds one end of a tie can't tell the whole's name for it; the Plan of the whole can."""
    model = recorded(tied=True)
    last = copy.deepcopy(model)
    last.embedding = None  # type: ignore[assignment]
    with pytest.raises(shardinit.RecordError, match="record the whole model, and apply that Plan to its parts"):
        shardinit.init_model_(last, 5, device="cpu")
    shardinit.record(model).apply_(last.to_empty(device="cpu"), 5)
    assert "head.weight" in assert_part_of_whole(last, tied=True)
