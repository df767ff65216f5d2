"""One rank of a world of any size: torch's fake process group runs the real sharding code of FSDP1 and FSDP2 without
communication. Each rank is a forked process of its own, since device meshes remember the rank of the process, and so
that its memory is that of this model alone. The parent must not have computed anything: a child that is forked after
OpenMP has started its threads has none."""

from __future__ import annotations

import functools
import multiprocessing
import sys
import traceback
import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # here, so that no child has to: it takes longer than a case
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_shardinit.model import param_init_fn

CPU = torch.device("cpu")


def _child(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...], threads: int) -> None:
    try:
        torch.set_num_threads(threads)
        answer = (True, function(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
    pipe.close()


def run_alone(function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> Any:
    """function(*args) in a forked process. RuntimeError: it failed, or took longer than ``timeout`` seconds."""
    sys.stdout.flush()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, function, args, torch.get_num_threads()), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise RuntimeError(f"{function.__name__}{args} must end within {timeout:g} s")
        ok, answer = ours.recv()
    except EOFError:
        ok, answer = False, "it died without an answer (out of memory?)"
    finally:
        process.kill()
        process.join()
    if not ok:
        raise RuntimeError(f"{function.__name__}{args}: {answer}")
    return answer


def join_fake_world(rank: int, world: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def shard_fsdp2(model: nn.Module, blocks: list[nn.Module]) -> nn.Module:
    """fully_shard on each block and the root; the model stays on meta."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _flatten_without_copying(
    flatten: Callable[..., torch.Tensor], handle: FlatParamHandle, tensors: list[torch.Tensor], aligned_numel: int
) -> torch.Tensor:
    """What FSDP1 flattens holds no values yet: memory of that size will do, and its pages are never touched."""
    kinds = [torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad) for tensor in tensors]
    flat = flatten(handle, kinds, aligned_numel)
    return torch.empty(flat.shape, dtype=flat.dtype)


def shard_fsdp1(model: nn.Module, blocks: list[nn.Module]) -> nn.Module:
    """FULL_SHARD with use_orig_params, a unit a block; the local flat shards have memory, not yet values.

    FSDP1 itself copies each unit whole while it wraps, which for a large model takes minutes of page faults on a CPU.
    That copy alone is left out: sizes, padding and the shards are its own."""
    ids = {id(block) for block in blocks}
    flatten = functools.partialmethod(
        lambda handle, tensors, aligned, original: _flatten_without_copying(original, handle, tensors, aligned),
        original=FlatParamHandle.flatten_tensors,
    )
    with unittest.mock.patch.object(FlatParamHandle, "flatten_tensors", flatten):
        return FullyShardedDataParallel(
            model,
            use_orig_params=True,
            auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: id(module) in ids),
            param_init_fn=param_init_fn(model, device=CPU, fill=False),
            device_id=CPU,
        )


SHARDERS: dict[str, Callable[[nn.Module, list[nn.Module]], nn.Module]] = {"fsdp2": shard_fsdp2, "fsdp1": shard_fsdp1}
