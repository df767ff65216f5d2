"""FSDP1: truth is what FSDP itself holds after flattening and sharding parameters whose elements are numbered."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from fake_world import assert_covered, assert_pieces, numbered, run_ranks, run_world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_shardinit import region
from torch_shardinit.locate import Located, locate
from torch_shardinit.locate.fsdp1 import handle_of, memory_order, padding_runs, runs_of_entry

# --- integers: no process group ------------------------------------------------------------------------------------


def test_memory_order() -> None:
    assert memory_order((2, 3, 4), (12, 4, 1)) == (0, 1, 2)
    assert memory_order((2, 3, 4, 5), (60, 1, 15, 3)) == (0, 2, 3, 1)
    assert memory_order((3, 2), (1, 3)) == (1, 0) and memory_order((), ()) == ()
    assert memory_order((4, 1, 3), (3, 77, 1)) is not None  # the stride of a dimension of size 1 means nothing
    assert memory_order((4, 3), (4, 1)) is None and memory_order((4, 3), (0, 1)) is None


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (2, 1, 3, 2)])
def test_runs_of_entry_at_every_shard(shape: tuple[int, ...]) -> None:
    """Any memory order, any place of the shard: the runs hold what numpy says, one after the other."""
    numel, start, cases = math.prod(shape), 3, 0
    for order in itertools.permutations(range(len(shape))):
        stored = np.arange(numel).reshape(shape).transpose(order).ravel()  # the parameter's elements as memory has them
        for low in range(start + numel + 2):
            for high in range(low, start + numel + 3):
                expected = stored[max(low - start, 0) : max(high - start, 0)]
                held: list[int] = []
                for run in runs_of_entry(start, shape, order, low, high - low):
                    assert not run.length or run.at == max(start - low, 0) + len(held)
                    if run.sizes is None:
                        assert isinstance(run.offset, int)
                        held += range(run.offset, run.offset + run.length)
                    else:
                        assert isinstance(run.offset, tuple)
                        sizes = [run.sizes[run.memory_order.index(dim)] for dim in range(len(shape))]
                        box = region.slices(region.box_at(run.offset, sizes))
                        held += np.arange(numel).reshape(shape)[box].transpose(order).ravel().tolist()
                assert held == expected.tolist()
                cases += 1
    assert cases >= (numel + 5) * (numel + 6) // 2 - numel - 6


def test_padding_runs() -> None:
    assert padding_runs([(0, 3), (3, 2), (8, 1)], 10) == [(5, 3), (9, 1)]
    assert padding_runs([], 4) == [(0, 4)] and padding_runs([], 0) == [] and padding_runs([(0, 2)], 2) == []
    with pytest.raises(ValueError, match="disjoint and in order"):
        padding_runs([(0, 3), (2, 2)], 5)


# --- what the framework holds --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, width + 1)
        self.norm = nn.LayerNorm(width + 1)
        self.b = nn.Linear(width + 1, width)
        self.b.weight = nn.Parameter(torch.empty(width + 1, width).t())  # flattened in the order of its memory
        self.register_buffer("table", torch.empty(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.norm(self.a(x)))


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.conv = nn.Conv2d(3, 4, (3, 2)).to(memory_format=torch.channels_last)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.empty(3))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.emb(index)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale.sum() + self.conv.weight.sum() + self.conv.bias.sum()


def numbered_net() -> tuple[Net, dict[str, torch.Tensor]]:
    net, truth = Net().double(), {}
    with torch.no_grad():
        for place, (name, tensor) in enumerate([*net.named_parameters(), *net.named_buffers()]):
            tensor.copy_(numbered(tuple(tensor.shape), 1000 * place))
            truth[name] = tensor.detach().clone()
    assert not net.blocks[0].b.weight.is_contiguous() and not net.conv.weight.is_contiguous() and len(truth) == 18
    return net, truth


def handles_of(model: nn.Module) -> list[Any]:
    return [handle for module in model.modules() if (handle := handle_of(module)) is not None]


def assert_tiles(model: nn.Module, located: Located) -> tuple[int, int]:
    """Pieces and padding take each element of each local flat shard exactly once. Returns (elements, padding)."""
    total = 0
    for handle in handles_of(model):
        flat = handle.flat_param
        taken = np.zeros(flat.numel(), np.int64)
        views = [*(piece.local for piece in located.pieces), *located.padding]
        for view in views:
            if view.untyped_storage()._cdata == flat.untyped_storage()._cdata:
                address = torch.arange(flat.numel()).as_strided(view.shape, view.stride(), view.storage_offset())
                np.add.at(taken, address.numpy().ravel(), 1)
        assert np.all(taken == 1), taken
        total += flat.numel()
    return total, sum(view.numel() for view in located.padding)


def wrap(net: nn.Module, strategy: str, mesh_shape: tuple[int, ...] | None, **options: Any) -> FSDP:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("rep", "shard")) if mesh_shape else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says that it runs on a CPU
        return FSDP(
            net,
            sharding_strategy=ShardingStrategy[strategy],
            device_mesh=mesh,
            auto_wrap_policy=options.pop("policy", ModuleWrapPolicy({Block})),
            device_id=torch.device("cpu"),
            **options,
        )


def flatten_with_torch(cases: list[tuple]) -> list[tuple]:
    results = []
    for strategy, mesh_shape, use_orig_params, nested in cases:
        net, truth = numbered_net()
        policy = ModuleWrapPolicy({Block} if nested else set())
        model = wrap(net, strategy, mesh_shape, use_orig_params=use_orig_params, policy=policy)
        located = locate(model)
        assert {piece.name for piece in located.pieces} == set(truth), "every tensor has a piece on every rank"
        aliases = {piece.name: piece.aliases for piece in located.pieces}
        assert aliases.pop("emb.weight") == ("emb.weight", "head.weight")
        assert all(names == (name,) for name, names in aliases.items())
        assert [piece.name for piece in located.pieces if piece.kind == "buffer"] == [
            "blocks.0.table",
            "blocks.1.table",
        ]
        held = assert_pieces(located.pieces, truth)
        results.append((held, *assert_tiles(model, located), len(handles_of(model))))
    return results


CASES_OF_WORLD = {
    **{world: [("FULL_SHARD", None)] for world in (1, 2, 3, 5, 7)},
    4: [("FULL_SHARD", None), ("SHARD_GRAD_OP", None), ("NO_SHARD", None), ("HYBRID_SHARD", (2, 2))],
    6: [("HYBRID_SHARD", (2, 3)), ("_HYBRID_SHARD_ZERO2", (3, 2)), ("FULL_SHARD", None)],
    8: [("HYBRID_SHARD", (2, 4)), ("_HYBRID_SHARD_ZERO2", (2, 4)), ("FULL_SHARD", None)],
}


@pytest.mark.parametrize("world", range(1, 9))
def test_every_world_and_strategy(world: int) -> None:
    cases = [
        (*case, orig, nested) for case in CASES_OF_WORLD[world] for orig in (True, False) for nested in (True, False)
    ]
    results_of_ranks = run_world(flatten_with_torch, world, cases)
    assert len(results_of_ranks) == world and all(len(results) == len(cases) for results in results_of_ranks)
    for case, *results in zip(cases, *results_of_ranks, strict=True):
        strategy, mesh_shape, use_orig_params, nested = case
        copies = world if strategy == "NO_SHARD" else mesh_shape[0] if mesh_shape else 1
        held = [result[0] for result in results]
        buffers = [{name: one.pop(name) for name in ("blocks.0.table", "blocks.1.table")} for one in held]
        assert assert_covered(held, copies) == 16 and assert_covered(buffers, world) == 2
        assert all(result[3] == (3 if nested else 1) for result in results)
        elements, padding = sum(result[1] for result in results), sum(result[2] for result in results)
        numel = sum(count.size for count in held[0].values())
        assert elements == copies * numel + padding and (padding > 0 or not use_orig_params)


def test_64_ranks() -> None:
    """More ranks than some parameters have elements; the last ranks hold padding alone."""
    cases = [("FULL_SHARD", None, orig, True) for orig in (True, False)]
    ranks = [0, 1, 17, 40, 41, 62, 63]
    results_of_ranks = run_ranks(flatten_with_torch, ranks, 64, cases)
    assert [len(results) for results in results_of_ranks] == [2] * 7
    assert [result[1:3] for result in results_of_ranks[0]] == [(6, 0), (6, 0)]  # (elements, padding)
    assert [result[1:3] for result in results_of_ranks[-1]] == [(6, 6), (6, 6)]


# --- one or two ranks are enough for the rest ----------------------------------------------------------------------


def after_a_step(use_orig_params: bool, strategy: str) -> int:
    net, truth = numbered_net()
    model = wrap(net, strategy, None, use_orig_params=use_orig_params)
    shards = [handle.flat_param.detach().clone() for handle in handles_of(model)]
    before = locate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.tensor([1, 2, 3])).sum()
    if strategy != "NO_SHARD":  # the root keeps its unsharded parameters for the backward
        with pytest.raises(ValueError, match="must be its own local shard, got one that is unsharded"):
            locate(model)
    loss.backward()
    optimizer.step()
    for handle, shard in zip(handles_of(model), shards, strict=True):
        handle.flat_param.data.copy_(shard)
    located = locate(model)
    assert_pieces(located.pieces, truth)
    assert_tiles(model, located)
    assert [piece.offset for piece in located.pieces] == [piece.offset for piece in before.pieces]
    with FSDP.summon_full_params(model):
        if strategy != "NO_SHARD":
            with pytest.raises(ValueError, match="inside summon_full_params"):
                locate(model)
    assert_pieces(locate(model).pieces, truth)
    flat = handles_of(model)[0].flat_param
    flat.data = flat.data.clone()  # as model.to() does; FSDP goes on with the memory that it knows
    with pytest.raises(ValueError, match="moved after its first forward"):
        locate(model)
    return len(located.pieces)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_after_forward_backward_and_step(use_orig_params: bool, strategy: str) -> None:
    assert len(run_ranks(after_a_step, [1], 3, use_orig_params, strategy)) == 1


def inner_units_and_names() -> list:
    net, truth = numbered_net()
    whole = wrap(net, "FULL_SHARD", None, use_orig_params=True)
    block = whole.module.blocks[1]
    located = locate(block)
    assert isinstance(block, FSDP) and sorted({piece.name for piece in located.pieces}) == [
        "a.bias", "a.weight", "b.bias", "b.weight", "norm.bias", "norm.weight", "table"
    ]  # fmt: skip
    assert_pieces(located.pieces, {name.removeprefix("blocks.1."): tensor for name, tensor in truth.items()})
    for piece in located.pieces:
        assert piece.owner is (block.table if piece.name == "table" else block._handle.flat_param)
    with pytest.raises(ValueError, match=r"contains the unit"):
        locate(block.module)
    for use_orig_params in (True, False):
        bare = wrap(nn.Linear(3, 2), "FULL_SHARD", None, use_orig_params=use_orig_params)
        with pytest.raises(ValueError, match="can only be located from a model that contains the unit"):
            locate(bare.module)
    return sorted(piece.name for piece in locate(whole).pieces)


def test_inner_unit_alone_and_inside_of_a_unit() -> None:
    (names,) = run_ranks(inner_units_and_names, [1], 2)
    assert len(set(names)) == 18


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 5)
        self.frozen.requires_grad_(False)
        self.live = nn.Linear(5, 2)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.ignored = nn.Linear(2, 2)


def frozen_mixed_precision_ignored() -> list:
    model, truth = Partly().double(), {}
    with torch.no_grad():
        for place, (name, tensor) in enumerate(model.named_parameters()):
            tensor.copy_(numbered(tuple(tensor.shape), 1000 * place))
            truth[name] = tensor.detach().clone()
    ignored = model.ignored
    wrapped = wrap(
        model, "FULL_SHARD", None, use_orig_params=True, ignored_modules=[ignored], mixed_precision=MixedPrecision(
            param_dtype=torch.float32
        )
    )  # fmt: skip
    located = locate(wrapped)
    held = assert_pieces(located.pieces, truth)
    assert_tiles(wrapped, located)
    assert {piece.name: piece.owner for piece in located.pieces}["ignored.bias"] is ignored.bias
    return [{name: count for name, count in held.items() if "ignored" not in name}]


def test_frozen_mix_empty_ignored_and_mixed_precision() -> None:
    held_of_ranks = [held for (held,) in run_world(frozen_mixed_precision_ignored, 3)]
    assert len(held_of_ranks) == 3 and assert_covered(held_of_ranks, 1) == 5


def ties_across_units() -> list[tuple]:
    """One Parameter in two units: FSDP1 flattens it in the inner one and, with use_orig_params, shows it in both."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.Linear(4, 4, bias=False)
            self.z = nn.Parameter(torch.empty(2))
            self.block = Block(4)
            self.block.a = nn.Linear(4, 4, bias=False)
            self.block.a.weight = self.outer.weight

    model = Tied()
    with torch.no_grad():
        model.outer.weight.copy_(numbered((4, 4)))
    wrapped = wrap(model, "FULL_SHARD", None, use_orig_params=True)
    return [(p.aliases, p.offset, p.local.tolist()) for p in locate(wrapped).pieces if "outer.weight" in p.aliases]


def test_ties_across_units() -> None:
    assert run_world(ties_across_units, 2) == [
        [(("block.a.weight", "outer.weight"), 0, [float(i) for i in range(16)])],
        [(("block.a.weight", "outer.weight"), 0, [])],
    ]


def not_dense() -> str:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(9, 9))
    model[0].weight = nn.Parameter(torch.zeros(3, 8)[:, ::2])
    wrapped = wrap(model, "FULL_SHARD", None, use_orig_params=False)  # it reads into the next parameter
    with pytest.raises(ValueError) as error:
        locate(wrapped)
    return str(error.value)


def test_error_not_dense() -> None:
    (message,) = run_ranks(not_dense, [1], 4)
    assert message.startswith("FSDP unit '': 0.weight: a parameter in a flat parameter must be dense, got shape (3, 4)")
