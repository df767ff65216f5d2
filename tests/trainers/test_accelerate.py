"""Accelerate. Its choice of FSDP needs an accelerator: on CPUs the functions behind it are called by themselves."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn as nn
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from common import assert_equal, assert_shards, differing, gathered, local_init, values_of
from test_fabric import TOKENS, Net
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import torch_shardinit as shardinit
from torch_shardinit.verify_processes import run_gloo

SEED = 43


def recorded() -> Net:
    with shardinit.recording():
        return Net()


def _train(accelerator: Accelerator, model: Any, optimizer: Any, whole: nn.Module) -> None:
    """A step, which the optimizer must take on the parameters that the model computes with."""
    loss = model(TOKENS)
    assert torch.allclose(loss, whole(TOKENS), rtol=1e-5)
    accelerator.backward(loss)
    optimizer.step()


def _worker(rank: int, world: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(ACCELERATE_USE_CPU="true", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # the group is there already
    torch.manual_seed(1000 + rank)
    accelerator = Accelerator(cpu=True)
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    whole = shardinit.init_model_(recorded(), SEED, device="cpu")
    truth = values_of(whole)

    # DDP, as prepare makes it here.
    model: Any = shardinit.init_model_(recorded(), SEED, device=accelerator.device)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert_equal(values_of(model.module), truth, "DDP")
    shardinit.check_replicas(model)
    _train(accelerator, model, optimizer, whole)
    assert differing(values_of(model.module), truth)

    # FSDP2: prepare keeps a model that is sharded already, and maps an optimizer by the memory of its shards.
    model = recorded()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with local_init(model):
        shardinit.init_model_(model, SEED, device=accelerator.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True, cpu_ram_efficient_loading=False)
    accelerator.state.fsdp_plugin = plugin
    kept = model
    model, optimizer = accelerator._prepare_fsdp2(model, optimizer)
    assert model is kept
    assert_equal(gathered(model), truth, "FSDP2")
    _train(accelerator, model, optimizer, whole)
    assert len(differing(gathered(model), truth)) == len(dict(model.named_parameters(remove_duplicate=False)))

    # FSDP1: the plugin hands its param_init_fn to torch.
    model = recorded()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        param_init_fn=shardinit.param_init_fn(model, SEED, device=accelerator.device),
        sync_module_states=False,
        cpu_ram_efficient_loading=False,
    )
    assert plugin.param_init_fn is not None and not plugin.sync_module_states
    sharded = FullyShardedDataParallel(model, param_init_fn=plugin.param_init_fn, device_id=torch.device("cpu"))
    assert_shards(sharded, truth, "FSDP1")


def test_ddp_and_the_ways_to_fsdp() -> None:
    run_gloo(_worker, 2, limit=100, threads=1)
