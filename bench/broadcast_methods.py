"""Ways from nothing to a sharded, initialised model: ours, and what people do today. Each gives the wrapped model on
this rank; `init` takes the time of what gives the values. On GPUs (NCCL) and on the CPU (gloo).
"""

from __future__ import annotations

import functools
import inspect
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.utils import _sync_params_and_buffers
from torch.nn.parallel import DistributedDataParallel

import torch_shardinit as shardinit
from torch_shardinit.model import materialise_, param_init_fn
from torch_shardinit.verify_layouts import Factory, blocks_of, build

BUCKET_BYTES = 250 * 2**20  # what torch's own FSDP and DDP use


@dataclass
class Job:
    """What a method gets. folder: where a checkpoint may go, seen by all ranks. seconds: by part of the work."""

    factory: Factory
    seed: int
    device: torch.device
    folder: str
    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, part: str) -> _Part:
        return _Part(self, part)


class _Part:
    """Adds the time of a `with` block to a part."""

    def __init__(self, job: Job, part: str) -> None:
        self.job, self.part = job, part

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self.job.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.started
        self.job.seconds[self.part] = self.job.seconds.get(self.part, 0.0) + seconds


def _wrap_fsdp1(model: nn.Module, device: torch.device, fn: Any = None, sync: bool = False) -> nn.Module:
    ids = {id(block) for block in blocks_of(model)}
    return FullyShardedDataParallel(
        model,
        use_orig_params=True,
        auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: id(module) in ids),
        param_init_fn=fn,
        sync_module_states=sync,
        device_id=device,
    )


def _wrap_fsdp2(model: nn.Module, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _wrap_ddp(model: nn.Module, device: torch.device, broadcast: bool) -> nn.Module:
    options: dict[str, Any] = {"device_ids": [device.index]} if device.type == "cuda" else {}
    if not broadcast and "init_sync" in inspect.signature(DistributedDataParallel).parameters:
        options["init_sync"] = False
    return DistributedDataParallel(model, **options)


def on_meta(factory: Factory) -> nn.Module:
    with torch.device("meta"):
        return factory()


def _rank_0_model(job: Job) -> nn.Module:
    """Initialised by torch on rank 0, without memory elsewhere."""
    if dist.get_rank() != 0:
        return on_meta(job.factory)
    torch.manual_seed(job.seed)
    return job.factory()


# ---- ours -----------------------------------------------------------------------------------------------------------


def ours_fsdp1(job: Job) -> nn.Module:
    model = build(job.factory)
    model = _wrap_fsdp1(model, job.device, param_init_fn(model, device=job.device, fill=False))
    with job.timed("init"):
        shardinit.init_model_(model, job.seed)
    return model


def ours_fsdp2(job: Job) -> nn.Module:
    model = _wrap_fsdp2(build(job.factory), job.device)
    with job.timed("init"):
        shardinit.init_model_(model, job.seed, device=job.device)
    return model


def ours_ddp(job: Job) -> nn.Module:
    model = build(job.factory)
    with job.timed("init"):
        shardinit.init_model_(model, job.seed, device=job.device)
    return _wrap_ddp(model, job.device, broadcast=False)


# ---- wrapping alone: the same without values ------------------------------------------------------------------------


def wrap_fsdp1(job: Job) -> nn.Module:
    model = on_meta(job.factory)
    return _wrap_fsdp1(model, job.device, param_init_fn(model, device=job.device, fill=False))


def wrap_fsdp2(job: Job) -> nn.Module:
    model = _wrap_fsdp2(on_meta(job.factory), job.device)
    materialise_(model, job.device)
    return model


def wrap_ddp(job: Job) -> nn.Module:
    model = on_meta(job.factory)
    materialise_(model, job.device)
    return _wrap_ddp(model, job.device, broadcast=False)


# ---- what people do today -------------------------------------------------------------------------------------------


def broadcast_fsdp1(job: Job) -> nn.Module:
    """FSDP1's sync_module_states=True. FSDP1 refuses that on the CPU: there the call that it is made of, before."""
    with job.timed("init"):
        model = _rank_0_model(job)
        materialise_(model, job.device)
        if job.device.type == "cuda":
            return _wrap_fsdp1(model.to(job.device), job.device, sync=True)
        states = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
        _sync_params_and_buffers(dist.group.WORLD, states, BUCKET_BYTES, 0)
    return _wrap_fsdp1(model, job.device)


def _unsaved(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state_dict leaves out; a model without them is not initialised."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def broadcast_fsdp2(job: Job) -> nn.Module:
    with job.timed("init"):
        whole = _rank_0_model(job)
        state = whole.state_dict() if dist.get_rank() == 0 else {}
    model = _wrap_fsdp2(on_meta(job.factory), job.device)
    materialise_(model, job.device)
    with job.timed("init"):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        source = dict(whole.named_buffers())
        for name, buffer in _unsaved(model).items():
            if dist.get_rank() == 0:
                buffer.copy_(source[name])
            dist.broadcast(buffer, src=0)
    return model


def broadcast_ddp(job: Job) -> nn.Module:
    """As everyone does it: each rank initialises, and the constructor replaces the values by rank 0's."""
    with job.timed("init"):
        torch.manual_seed(job.seed + dist.get_rank())
        return _wrap_ddp(job.factory().to(job.device), job.device, broadcast=True)


def full_fsdp2(job: Job) -> nn.Module:
    """Every rank draws the whole model from one seed and keeps its slices."""
    with job.timed("init"):
        torch.manual_seed(job.seed)
        model = job.factory()
    return _wrap_fsdp2(model, job.device)


def checkpoint_fsdp2(job: Job) -> nn.Module:
    """A seed checkpoint: rank 0 initialises and saves, every rank loads its shards."""
    with job.timed("init"):
        if dist.get_rank() == 0:
            torch.manual_seed(job.seed)
            whole = job.factory()
            shutil.rmtree(job.folder, ignore_errors=True)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
                dcp.save({**whole.state_dict(), **_unsaved(whole)}, checkpoint_id=job.folder, no_dist=True)
            del whole
        dist.barrier()
    model = _wrap_fsdp2(on_meta(job.factory), job.device)
    materialise_(model, job.device)
    with job.timed("init"):
        dcp.load({**model.state_dict(), **_unsaved(model)}, checkpoint_id=job.folder)
    return model


@dataclass(frozen=True)
class Method:
    """truth: whose unsharded model the result must equal, or None for no values at all."""

    layout: str
    name: str
    run: Callable[[Job], nn.Module]
    truth: str | None


METHODS = [
    Method("fsdp1", "wrapping alone", wrap_fsdp1, None),
    Method("fsdp1", "ours", ours_fsdp1, "ours"),
    Method("fsdp1", "rank 0, broadcast", broadcast_fsdp1, "torch"),
    Method("fsdp2", "wrapping alone", wrap_fsdp2, None),
    Method("fsdp2", "ours", ours_fsdp2, "ours"),
    Method("fsdp2", "rank 0, broadcast", broadcast_fsdp2, "torch"),
    Method("fsdp2", "full init, slice", full_fsdp2, "torch"),
    Method("fsdp2", "seed checkpoint", checkpoint_fsdp2, "torch"),
    Method("ddp", "wrapping alone", wrap_ddp, None),
    Method("ddp", "ours", ours_ddp, "ours"),
    Method("ddp", "rank 0, broadcast", broadcast_ddp, "torch"),
]
