"""Fingerprints and replica checks of models that FairScale's FSDP shards, on real gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from test_fairscale import WRAPPINGS, Net, recorded, units_of, wrap

import torch_shardinit as shardinit
from torch_shardinit.locate import locate
from torch_shardinit.verify_processes import run_gloo

SEED = 9


def unsharded() -> shardinit.Fingerprint:
    net = recorded()
    shardinit.init_model_(net, SEED, device="cpu")
    return shardinit.fingerprint(net, local_only=True)


def flip(model: nn.Module, name: str, at: int) -> None:
    """The lowest bit of one of the elements that this rank holds of a tensor."""
    held = next(piece.local for piece in locate(model).pieces if piece.name == name and piece.local.numel() > at)
    bits = held.view(torch.int32).view(-1)
    bits[at] = bits[at] ^ 1


def _sharded_worker(rank: int, world: int) -> str:
    want = unsharded()
    assert not want.partial and {"head.weight", "trunk.embedding.weight"} <= set(want.tensors)
    padded = 0
    for wrapping, flatten in WRAPPINGS:
        model: Any = wrapping(recorded(), flatten)
        shardinit.init_model_(model, SEED, device="cpu")
        name = f"{wrapping.__name__}, flatten={flatten}"
        assert all(parameter._is_sharded for unit in units_of(model) for parameter in unit.params)
        got = shardinit.fingerprint(model)
        assert got == want and got.digest == want.digest, f"{name}: {got.diff(want)}"
        local = shardinit.fingerprint(model, local_only=True)
        tables = {"trunk.blocks.0.table", "trunk.blocks.1.table"}
        assert local.partial and not tables & local.partial, name
        shardinit.check_replicas(model)

        # Padding behind the parameters counts for nothing.
        for padding in locate(model).padding:
            padded += padding.numel()
            padding.fill_(rank + 1)
        assert shardinit.fingerprint(model) == want, name

        # A bit of what one rank alone holds, then of a buffer that all of them hold.
        if rank == 1:
            flip(model, "trunk.blocks.1.b.weight", 3)
        assert list(shardinit.fingerprint(model).diff(want).changed) == ["trunk.blocks.1.b.weight"], name
        shardinit.check_replicas(model)
        if rank == 1:
            flip(model, "trunk.blocks.1.b.weight", 3)
            flip(model, "trunk.blocks.0.table", 2)
        for call in (shardinit.check_replicas, shardinit.fingerprint):
            with pytest.raises(shardinit.ReplicaMismatchError) as caught:
                call(model)
            (one,) = caught.value.mismatches
            assert (one.name, one.sides, one.first) == ("trunk.blocks.0.table", ((0,), (1,)), (2,)), name
    assert padded > 0 or rank == 0
    return want.digest


def _replicas_worker(rank: int, world: int) -> None:
    """Units whose process group is one rank are replicas of one another; each rank drew its own."""
    alone = [dist.new_group([one]) for one in range(world)][rank]
    torch.manual_seed(1000 + rank)
    stock = wrap(Net(), process_group=alone)
    names = {"head.weight", *(name for name, _ in Net().named_parameters())}  # which give a tied one its first name
    drawn = {name for name in names if "norm" not in name and name != "trunk.scale"}
    for call in (shardinit.check_replicas, shardinit.fingerprint):
        with pytest.raises(shardinit.ReplicaMismatchError, match=r"conv\.bias .*: ranks 0 \| 1; first diff") as caught:
            call(stock)
        assert {one.name for one in caught.value.mismatches} == drawn
        assert all(one.sides == ((0,), (1,)) for one in caught.value.mismatches)
    shardinit.check_replicas(stock, alone)  # nothing to compare with

    ours = wrap(recorded(), process_group=alone)
    shardinit.init_model_(ours, SEED, device="cpu")
    shardinit.check_replicas(ours)
    assert shardinit.fingerprint(ours) == unsharded()


def _worker(rank: int, world: int) -> str:
    digest = _sharded_worker(rank, world)
    _replicas_worker(rank, world)
    return digest


def test_one_fingerprint_and_the_replicas_that_differ() -> None:
    assert run_gloo(_worker, 2, limit=100, threads=1) == [unsharded().digest] * 2
