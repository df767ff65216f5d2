"""parallelize_module: each style's shards, a vocabulary that does not divide, and one padded so that it does."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from fake_world import run_world
from guards import local_init
from sharded_nets import compare
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import torch_shardinit as shardinit

VOCABULARY = 11


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(6), Attention()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)


class Model(nn.Module):
    def __init__(self, rows: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, 6, padding_idx=1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.RMSNorm(6), nn.Linear(6, rows, bias=False)
        self.register_buffer("scale", torch.arange(6.0).exp())
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.normal_(self.embedding.weight, std=0.02)
        with torch.no_grad():
            self.embedding.weight[1].zero_()
            # A vocabulary padded to a multiple of the ranks: the rows beyond it are no token's.
            self.embedding.weight[VOCABULARY:].zero_()
            self.head.weight[VOCABULARY:].zero_()


PLAN: dict[str, ParallelStyle] = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm": SequenceParallel(),
    "blocks.*.attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "blocks.*.attention.qkv": ColwiseParallel(),
    "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


@functools.cache
def recorded(rows: int = VOCABULARY) -> Model:
    with shardinit.recording():
        return Model(rows)


def shard(model: nn.Module, tp: DeviceMesh, dp: DeviceMesh | None = None) -> nn.Module:
    parallelize_module(model, tp, PLAN, src_data_rank=None)
    for module in [*model.blocks, model] if dp is not None else []:  # type: ignore[misc]
        fully_shard(module, mesh=dp)
    return model


def parallel(mesh_shape: tuple[int, ...], rows: int = VOCABULARY) -> dict[str, torch.Tensor]:
    """The model sharded on meta and initialised, against torch's sharding of the whole. Returns two tensors' shards."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[-len(mesh_shape) :])
    tp, dp = (mesh["tp"], mesh["dp"]) if len(mesh_shape) == 2 else (mesh, None)
    truth = shard(shardinit.init_model_(copy.deepcopy(recorded(rows)), 7, device="cpu"), tp, dp)
    ours = shard(copy.deepcopy(recorded(rows)), tp, dp)
    assert ours.blocks[0].up.weight.is_meta  # type: ignore[union-attr]
    with local_init():
        shardinit.init_model_(ours, 7, device="cpu")
    with local_init() as watch:
        shardinit.init_model_(ours, 7)
    assert watch.fresh == [], "no tensor in full"
    assert compare(ours, truth) >= 50
    kinds = {name: tuple(p.placements) for name, p in ours.named_parameters() if isinstance(p, DTensor) and dp is None}
    if dp is None:
        assert kinds["embedding.weight"] == kinds["head.weight"] == kinds["blocks.0.up.bias"] == (Shard(0),)
        assert kinds["blocks.1.down.weight"] == (Shard(1),) and kinds["norm.weight"] == (Replicate(),)
    return {name: getattr(ours, name).weight.to_local().detach() for name in ("embedding", "head")}


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_every_style(world: int) -> None:
    """11 rows of the vocabulary on any number of ranks: 3, 3, 3 and 2 of them on four; the last of eight has none."""
    shards = run_world(parallel, world, (world,))
    assert sum(shard["embedding"].shape[0] for shard in shards) == VOCABULARY


@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 2), (2, 3)])
def test_under_fsdp2(mesh_shape: tuple[int, int]) -> None:
    shards = run_world(parallel, math.prod(mesh_shape), mesh_shape)
    assert sum(shard["head"].shape[0] for shard in shards) == VOCABULARY


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_padded_vocabulary_has_the_rows_of_the_unpadded(world: int) -> None:
    """A row's values follow from its index, not from how many rows there are: 12 rows on 2, 3 or 4 ranks, or 16."""
    want = shardinit.init_model_(copy.deepcopy(recorded()), 7, device="cpu")
    for rows in (12, 16):
        if rows % world:
            continue
        shards = run_world(parallel, world, (world,), rows)
        for name in ("embedding", "head"):
            joined = torch.cat([shard[name] for shard in shards])
            assert joined.shape == (rows, 6) and not joined[VOCABULARY:].any()
            assert_bitwise_equal(patterns(joined[:VOCABULARY]), patterns(getattr(want, name).weight), name)
