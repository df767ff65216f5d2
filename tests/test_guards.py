"""The guards of the other tests see what they are to forbid."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from fake_world import run_ranks
from guards import local_init
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def forbidden() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,))
    dtensor = distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None)
    sharded = fully_shard(nn.Linear(4, 4), mesh=mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))

    def summon() -> None:
        with FullyShardedDataParallel.summon_full_params(flat):
            pass

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
        "broadcast": lambda: dist.broadcast(torch.ones(1), 0),
        "barrier": dist.barrier,
        "send": lambda: dist.send(torch.ones(1), 0),
        "objects": lambda: dist.all_gather_object([None, None], 1),
        "functional": lambda: dist._functional_collectives.all_reduce(torch.ones(2), "sum", mesh),
        "full_tensor": dtensor.full_tensor,
        "redistribute": lambda: dtensor.redistribute(mesh, [Replicate()]),
        "summon": summon,
        "forward of FSDP1": lambda: flat(torch.ones(1, 4)),
        "unshard of FSDP2": sharded.unshard,
        "forward of FSDP2": lambda: sharded(torch.ones(1, 4)),
    }
    messages = {}
    for name, call in calls.items():
        with pytest.raises(AssertionError) as caught, local_init():
            call()
        messages[name] = str(caught.value)
    return messages


def test_error_what_an_init_must_not_do() -> None:
    (messages,) = run_ranks(forbidden, [1], 2)
    assert len(messages) == 12
    assert all(message.startswith("an init must not ") for message in messages.values()), messages


def test_fresh_memory_is_seen_and_views_are_not() -> None:
    tensor = torch.zeros(4, 6)
    with local_init() as watch:
        tensor[1:3].t().add_(1)
        torch.empty(5, 5, device="meta")
        assert watch.fresh == []
        tensor + 1
        torch.empty(3)
    assert watch.fresh == [96, 12]
