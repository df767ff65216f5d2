"""Worlds of any size by torch's fake process group: what all ranks would send makes the fingerprint of one process."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn as nn
from fake_world import numbered, run_world
from test_locate_fsdp1 import numbered_net
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torch_shardinit.exchange import Exchange
from torch_shardinit.fingerprint import Fingerprint, fingerprint, fingerprint_of
from torch_shardinit.holdings import digest_holdings, holdings_of
from torch_shardinit.merge import TableEntry, Tables, merged

Sent = tuple[list[TableEntry], np.ndarray]


def sent_by(build: Callable[..., object], *args: object) -> Sent:
    """What this rank puts into the exchange."""
    holdings = holdings_of(build(*args))
    sums = digest_holdings(holdings)
    rows = [one.row(total) for one, total in zip(holdings, sums, strict=True)]
    return [(one.names, one.dtype, one.shape) for one in holdings], np.array(rows, np.uint64).reshape(-1, 5)


def together(world: int, build: Callable[..., object], *args: object) -> Fingerprint:
    sent: list[Sent] = run_world(sent_by, world, build, *args)
    rows = np.zeros((world, max(len(one) for _, one in sent), 5), np.uint64)
    for rank, (_, one) in enumerate(sent):
        rows[rank, : len(one)] = one
    tables = Tables([table for table, _ in sent], list(range(world)), rows)
    found = list(merged(Exchange("fingerprint", alone=True), tables))
    assert all(one.covered() and one.agrees for one in found), [one.name for one in found if not one.covered()]
    return fingerprint_of({one.name: (one.dtype, one.shape, one.total()) for one in found})


def fsdp1(strategy: ShardingStrategy, use_orig_params: bool, hybrid: bool) -> nn.Module:
    """Padding, alignment, ties, parameters that are flattened in the order of their memory, units in units."""
    net, _ = numbered_net()
    options = {
        "sharding_strategy": strategy,
        "use_orig_params": use_orig_params,
        "device_id": torch.device("cpu"),
        "device_mesh": init_device_mesh("cpu", (2, 2)) if hybrid else None,
    }
    net.blocks[0] = FSDP(net.blocks[0], **options)
    return FSDP(net, **options)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world", [1, 3, 7])
def test_fsdp1_flat_shards_with_padding(world: int, use_orig_params: bool) -> None:
    want = fingerprint(numbered_net()[0])
    assert together(world, fsdp1, ShardingStrategy.FULL_SHARD, use_orig_params, False) == want


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_hybrid_and_no_shard(use_orig_params: bool) -> None:
    want = fingerprint(numbered_net()[0])
    assert together(4, fsdp1, ShardingStrategy.HYBRID_SHARD, use_orig_params, True) == want
    assert together(2, fsdp1, ShardingStrategy.NO_SHARD, use_orig_params, False) == want


SHAPES = [(9, 6), (1, 5), (7, 3), (8, 4), (2, 2)]


def fsdp2_over_tp(mesh_shape: tuple[int, int], tp_dim: int | None) -> nn.Module:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    model = nn.ParameterList()
    for k, shape in enumerate(SHAPES):
        placement = Replicate() if tp_dim is None else Shard(tp_dim)
        full = numbered(shape, 100 * k)
        model.append(nn.Parameter(distribute_tensor(full, mesh["tp"], [placement], src_data_rank=None)))
    return fully_shard(model, mesh=mesh["dp"])


@pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 2), (2, 4), (3, 2)])
def test_fsdp2_over_tensor_parallelism_uneven(mesh_shape: tuple[int, int]) -> None:
    """Both may shard dimension 0, in pieces that torch's own function places wrongly; some ranks hold nothing."""
    want = fingerprint({str(k): numbered(shape, 100 * k) for k, shape in enumerate(SHAPES)})
    for tp_dim in (0, 1, None):
        assert together(mesh_shape[0] * mesh_shape[1], fsdp2_over_tp, mesh_shape, tp_dim) == want, tp_dim


def fsdp2_in_eight(replicate: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (replicate, 8 // replicate), mesh_dim_names=("replicate", "shard"))
    net, _ = numbered_net()
    net.blocks[1].register_buffer("scratch", torch.full((2,), float(mesh.get_rank())), persistent=False)
    net.blocks[0].b.weight = nn.Parameter(net.blocks[0].b.weight.detach().contiguous())
    net.blocks[1].b.weight = nn.Parameter(net.blocks[1].b.weight.detach().contiguous())
    net.conv = net.conv.to(memory_format=torch.contiguous_format)
    fully_shard(net.blocks[0], mesh=mesh)
    return fully_shard(net, mesh=mesh)


@pytest.mark.parametrize("replicate", [1, 2, 4])
def test_hsdp(replicate: int) -> None:
    """A buffer that a state_dict leaves out does not count, so it may differ."""
    assert together(8, fsdp2_in_eight, replicate) == fingerprint(numbered_net()[0])


def stage() -> object:
    """Two stages of two ranks, whose tensors are replicated in a stage; the first and the last share the embedding."""
    rank = torch.distributed.get_rank()
    state = numbered_net()[0].state_dict()
    first = {name: one for name, one in state.items() if name.startswith(("emb", "blocks"))}
    last = {name: one for name, one in state.items() if name.startswith(("emb", "conv", "head", "scale"))}
    return first if rank < 2 else last


def test_pipeline_stages_merge() -> None:
    assert together(4, stage) == fingerprint(numbered_net()[0])


def test_rename_of_a_stage() -> None:
    net = numbered_net()[0]
    want = fingerprint(net)
    found = fingerprint(net.blocks[1], rename=lambda name: f"blocks.1.{name}")
    assert found.tensors == {name: one for name, one in want.tensors.items() if name.startswith("blocks.1.")}
    with pytest.raises(ValueError, match="rename must give different tensors different names, got x for two"):
        fingerprint(net, rename=lambda name: "x")
