"""FSDP1 over tensor parallelism: a flat parameter of local tensors, whose runs are boxes of the whole."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
import torch.nn as nn
from fake_world import assert_covered, assert_pieces, numbered, run_ranks, run_world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torch_shardinit import region
from torch_shardinit.locate import locate
from torch_shardinit.locate.fsdp1 import runs_of_entry

BOTH = pytest.mark.parametrize("use_orig_params", [False, True])


@pytest.mark.parametrize(("shape", "corner"), [((3, 2), (1, 4)), ((2, 3, 2), (0, 2, 5)), ((), ()), ((4,), (3,))])
def test_runs_are_boxes_at_the_corner(shape: tuple[int, ...], corner: tuple[int, ...]) -> None:
    """Every shard of a parameter in every memory order, against numpy's indices of the whole."""
    numel, start = int(np.prod(shape, dtype=int)), 2
    whole = np.arange(int(np.prod([c + s + 1 for c, s in zip(corner, shape, strict=True)], dtype=int)))
    whole = whole.reshape([c + s + 1 for c, s in zip(corner, shape, strict=True)])
    part = whole[region.slices(region.box_at(corner, shape))]
    for order in itertools.permutations(range(len(shape))):
        stored = part.transpose(order).ravel()
        for low, high in itertools.combinations(range(start + numel + 2), 2):
            held: list[int] = []
            for run in runs_of_entry(start, shape, order, low, high - low, corner):
                if not run.length:
                    continue
                assert run.sizes is not None and isinstance(run.offset, tuple)
                sizes = [run.sizes[run.memory_order.index(dim)] for dim in range(len(shape))]
                box = region.slices(region.box_at(run.offset, sizes))
                held += whole[box].transpose(order).ravel().tolist()
            assert held == stored[max(low - start, 0) : max(high - start, 0)].tolist()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 9)
        self.norm = nn.LayerNorm(9)
        self.down = nn.Linear(9, 5)
        self.turned = nn.Parameter(torch.empty(5, 7).t())
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight


PLAN = {
    "embedding": RowwiseParallel,
    "up": ColwiseParallel,
    "norm": SequenceParallel,
    "down": RowwiseParallel,
    "head": ColwiseParallel,
}


def parallel_net(mesh: object) -> tuple[Net, dict[str, torch.Tensor]]:
    """A numbered Net, parallelised, and its tensors in full."""
    net, truth = Net().double(), {}
    with torch.no_grad():
        for place, (name, parameter) in enumerate(net.named_parameters()):
            parameter.copy_(numbered(tuple(parameter.shape), 1000 * place))
            truth[name] = parameter.detach().clone()
    styles = {name: style() for name, style in PLAN.items()}
    parallelize_module(net, mesh, styles, src_data_rank=None)  # type: ignore[arg-type]
    net.head.weight = net.embedding.weight
    # Its local tensor is not contiguous.
    columns = [*net.turned.data.chunk(mesh.size(), dim=1), net.turned.data[:, :0]]  # type: ignore[attr-defined]
    turned = columns[min(mesh.get_local_rank(), len(columns) - 1)]  # type: ignore[attr-defined]
    net.turned = nn.Parameter(
        DTensor.from_local(turned, mesh, [Shard(1)], run_check=False, shape=truth["turned"].shape, stride=(1, 7))  # type: ignore[arg-type]
    )
    return net, truth


def wrap(net: nn.Module, mesh: object, use_orig_params: bool, strategy: str = "FULL_SHARD") -> FullyShardedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        return FullyShardedDataParallel(
            net,
            device_mesh=mesh,  # type: ignore[arg-type]
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )


def locate_parallel(mesh_shape: tuple[int, ...], use_orig_params: bool, strategy: str) -> dict[str, np.ndarray]:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("rep", "dp", "tp")[-len(mesh_shape) :])
    net, truth = parallel_net(mesh["tp"])
    model = wrap(net, mesh["rep", "dp"] if len(mesh_shape) == 3 else mesh["dp"], use_orig_params, strategy)
    located = locate(model)
    assert all(piece.owner is model._handle.flat_param for piece in located.pieces)
    views = [*(piece.local for piece in located.pieces), *located.padding]
    assert sum(view.numel() for view in views) == model._handle.flat_param.numel()
    # torch 2.13 does not see that two DTensors of a unit are one Parameter, and flattens it twice.
    twice = [piece for piece in located.pieces if piece.name == "head.weight"]
    assert twice
    assert_pieces(twice, {"head.weight": truth["embedding.weight"]})
    return assert_pieces([piece for piece in located.pieces if piece.name != "head.weight"], truth)


@BOTH
@pytest.mark.parametrize(
    ("mesh_shape", "strategy"),
    [
        ((2, 2), "FULL_SHARD"),
        ((3, 2), "SHARD_GRAD_OP"),
        ((2, 4), "FULL_SHARD"),
        ((2, 2), "NO_SHARD"),
        ((2, 2, 2), "HYBRID_SHARD"),
    ],
)
def test_every_element_is_held_once(mesh_shape: tuple[int, ...], strategy: str, use_orig_params: bool) -> None:
    world = int(np.prod(mesh_shape))
    held_of_ranks = run_world(locate_parallel, world, mesh_shape, use_orig_params, strategy)
    copies = 2 if strategy in ("NO_SHARD", "HYBRID_SHARD") else 1
    replicated = {"norm.weight", "norm.bias", "down.bias"}
    assert_covered([{k: v for k, v in held.items() if k not in replicated} for held in held_of_ranks], copies)
    tp = mesh_shape[-1]
    assert assert_covered([{k: held[k] for k in replicated} for held in held_of_ranks], copies * tp) == 3


def refused() -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    partial = nn.Linear(4, 3)
    partial.weight = nn.Parameter(DTensor.from_local(torch.ones(3, 4), mesh["tp"], [Partial()], run_check=False))
    with pytest.raises(ValueError) as summands:
        locate(wrap(partial, mesh["dp"], True))
    inner = nn.Linear(4, 6)
    inner.weight = nn.Parameter(distribute_tensor(inner.weight.data, mesh["tp"], [Shard(0)], src_data_rank=None))
    outer = nn.Sequential(wrap(inner, mesh["dp"], True, "NO_SHARD"), nn.Linear(6, 2))
    with pytest.raises(ValueError) as twice:
        locate(wrap(outer, mesh["dp"], True, "NO_SHARD"))
    return str(summands.value), str(twice.value)


def test_error_partial_or_flattened_by_two_units() -> None:
    ((summands, twice),) = run_ranks(refused, [1], 4)
    assert summands.startswith("FSDP unit '': weight: a DTensor must be sharded or replicated")
    assert "Partial" in summands
    assert twice.startswith("0.weight: each tensor must have a name of its own")
