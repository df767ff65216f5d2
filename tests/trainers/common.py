"""What the tests of trainers share: comparison by bytes with the unsharded model, and an init that must stay local."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns

from torch_shardinit import region
from torch_shardinit.locate import boxes_of_piece, locate
from torch_shardinit.verify_meter import InitMeter, check_counter

# No test may reach for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a plain model, copied."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """The same of a model whose sharded parameters are DTensors, put together by torch."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: getattr(tensor, "full_tensor", lambda t=tensor: t)().detach() for name, tensor in named}


def assert_equal(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], what: str = "") -> None:
    assert got.keys() == want.keys(), (what, got.keys() ^ want.keys())
    for name, tensor in want.items():
        assert_bitwise_equal(patterns(got[name]), patterns(tensor), f"{what}: {name}")


def assert_shards(model: nn.Module, truth: Mapping[str, torch.Tensor], what: str = "") -> int:
    """The elements that this rank holds, by our own map, are those of `truth`. Returns their number."""
    names, count = set(), 0
    for piece in locate(model).pieces:
        held, at = piece.local.reshape(-1), 0
        want = truth[next(name for name in piece.aliases if name in truth)]
        for box in boxes_of_piece(piece):
            whole = want[region.slices(box)].reshape(-1)
            assert_bitwise_equal(patterns(held[at : at + whole.numel()]), patterns(whole), f"{what}: {piece.name}")
            at += whole.numel()
        assert at == held.numel()
        names.update(piece.aliases)
        count += at
    assert names >= set(truth), (what, set(truth) - names)
    return count


@contextlib.contextmanager
def local_init(model: nn.Module) -> Iterator[InitMeter]:
    """An init that sends nothing and leaves torch's generator alone."""
    check_counter()
    meter = InitMeter()
    with meter.around(model):
        yield meter
    assert meter.collectives.counts == (0, 0), meter.collectives.calls
    assert not meter.moved_generator


def differing(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name in want if not torch.equal(got[name], want[name])]


def same_on_all_ranks(tensor: torch.Tensor) -> bool:
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, patterns(tensor).tobytes())
    return all(one == found[0] for one in found)
