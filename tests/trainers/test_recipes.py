"""The recipe for Composer, whose newest version asks for an older torch: the calls that it makes, made here."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from common import assert_equal, assert_shards, gathered, values_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import torch_shardinit as shardinit
from torch_shardinit.verify_processes import run_gloo

SEED = 47


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.scale = nn.Parameter(torch.full((6,), 0.5))
        nn.init.orthogonal_(self.blocks[1].weight)


def _recorded() -> tuple[Net, Any]:
    """As docs/trainers.md says."""
    with shardinit.recording():
        model = Net()
    plan = shardinit.record(model)
    names = {id(module): name for name, module in model.named_modules()}

    def param_init_fn(module: nn.Module) -> None:
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            plan.fill_(f"{names[id(module)]}.{name}".lstrip("."), tensor, seed=SEED)

    return model, param_init_fn


def _empty(module: nn.Module) -> bool:
    """What Composer does first, with what a module has on meta."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    has_meta = any(tensor.is_meta for tensor in own)
    if has_meta:
        module.to_empty(device="cpu", recurse=False)
    return has_meta


def _worker(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    whole = values_of(shardinit.init_model_(_recorded()[0], SEED, device="cpu"))

    model, param_init_fn = _recorded()

    def of_fsdp1(module: nn.Module) -> None:
        if _empty(module):
            param_init_fn(module)

    sharded = FullyShardedDataParallel(model, param_init_fn=of_fsdp1, device_id=torch.device("cpu"))
    assert_shards(sharded, whole, "FSDP1")

    model, param_init_fn = _recorded()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in reversed(list(model.modules())):
        if _empty(module):
            param_init_fn(module)
    assert_equal(gathered(model), whole, "FSDP2")


def test_composer_fills_each_module_after_to_empty() -> None:
    run_gloo(_worker, 2, limit=100, threads=1)
