"""TorchRec on real gloo processes: DistributedModelParallel, initialised with no collective, and trained for a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torchrec_world as tw
from conftest import assert_bitwise_equal, patterns
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor

import torch_shardinit as shardinit
from torch_shardinit import region
from torch_shardinit.locate import boxes_of_piece, locate
from torch_shardinit.verify_meter import InitMeter, check_counter
from torch_shardinit.verify_processes import run_gloo

SEED = 77
ROWS, DIM = 7, 256
SHARED_BY_ALL = "data"
# The shardings that TorchRec has for an EmbeddingCollection.
UNPOOLED = ("data", "table_last", "rows", "columns", "columns_on_one")


class _NoCollective(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "c10d" not in func.namespace, f"a collective during init: {func}"
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_collective(model: nn.Module) -> Iterator[None]:
    """Any operator of c10d raises; and process groups, by their own count, begin nothing; no generator moves."""
    meter = InitMeter()
    with meter.around(model), _NoCollective():
        yield
    assert meter.collectives.counts == (0, 0)
    assert not meter.moved_generator


class Ranker(nn.Module):
    """Pooled and unpooled tables under every sharding, and a dense part."""

    def __init__(self, bags: list[str], rows: list[str]) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=tw.bag_configs(bags, ROWS, DIM))
        if rows:
            self.rows = EmbeddingCollection(tables=tw.row_configs(rows, ROWS, DIM))
        self.over = nn.Linear((len(bags) + len(rows)) * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.bags(features).to_dict()
        unpooled = self.rows(features) if hasattr(self, "rows") else {}
        found = {key: one.values().reshape(-1, 2, DIM).sum(1) for key, one in unpooled.items()}
        vectors = [pooled[key] for key in sorted(pooled)] + [found[key] for key in sorted(found)]
        return self.over(torch.cat(vectors, dim=1)).squeeze(1)


def features_of(bags: list[str], rows: list[str]) -> KeyedJaggedTensor:
    """Four examples with two ids for each table, all rows among them, the same on every rank."""
    keys = [f"bag_{name}" for name in bags] + [f"row_{name}" for name in rows]
    values = torch.arange(len(keys) * 8) * 5 % ROWS
    return KeyedJaggedTensor(keys=keys, values=values, lengths=torch.full((len(keys) * 4,), 2))


def assert_equals(model: nn.Module, truth: dict[str, torch.Tensor], what: str) -> None:
    names = set()
    for piece in locate(model).pieces:
        held = piece.local.reshape(-1)
        at = 0
        for box in boxes_of_piece(piece):
            whole = truth[piece.name][region.slices(box)].reshape(-1)
            assert_bitwise_equal(patterns(held[at : at + whole.numel()]), patterns(whole), f"{what}: {piece.name}")
            at += whole.numel()
        assert at == held.numel()
        names.add(piece.name)
    assert names == set(truth), what


def same_on_all_ranks(tensor: torch.Tensor) -> bool:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.detach().contiguous())
    return all(torch.equal(one, gathered[0]) for one in gathered)


def table(model: nn.Module, name: str) -> torch.Tensor:
    return dict(model.named_parameters())[name].detach()


def optimizer_state(model: Any) -> dict[str, torch.Tensor]:
    found = {}
    for key, states in model.fused_optimizer.state_dict()["state"].items():
        for name, value in states.items():
            shards = value.local_shards() if hasattr(value, "local_shards") else [value]
            for number, shard in enumerate(shards):
                found[f"{key} {name} {number}"] = getattr(shard, "tensor", shard).detach().clone()
    return found


def _train(rank: int, world: int, local: int, kernel: str) -> None:
    torch.manual_seed(1000 + rank)
    per_bag = tw.shardings(world, local)
    # Unpooled lookups by the dense kernel, a data-parallel table's too, don't run on the CPU.
    per_row = {name: per_bag[name] for name in UNPOOLED if name != SHARED_BY_ALL and kernel == "fused"}
    names = list(per_bag), list(per_row)
    with shardinit.recording():
        whole = Ranker(*names)
    shardinit.init_model_(whole, SEED, device="cpu")
    truth = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}

    with shardinit.recording():
        model: Any = Ranker(*names)
    model = tw.distribute(model, {"bags": per_bag, **({"rows": per_row} if per_row else {})}, local, kernel)
    with no_collective(model):
        shardinit.init_model_(model, SEED)
    assert_equals(model, truth, "after the first init")

    # TorchRec reads the tables as the unsharded model does: the same scores, then a step that moves every table.
    features = features_of(*names)
    with tw.quiet():
        expected, scores = whole(features), model(features)
        assert torch.allclose(scores, expected, rtol=1e-4, atol=1e-6)
        scores.pow(2).sum().backward()
    if kernel == "dense":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
    moved = [name for piece in locate(model).pieces if (name := piece.name).startswith("bags") and _moved(piece, truth)]
    held = [piece.name for piece in locate(model).pieces if piece.local.numel() and piece.name.startswith("bags")]
    assert moved == [name for name in held if kernel == "dense" or SHARED_BY_ALL not in name] and moved

    # Again: over trained tables, with the buffers that the first forward registered, and nothing else written.
    state = optimizer_state(model)
    assert kernel == "dense" or any(bool(tensor.any()) for tensor in state.values())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert any("_features_order_tensor" in name for name in buffers)
    plan = shardinit.record(model)
    with no_collective(model):
        plan.apply_(model, SEED)
    assert_equals(model, truth, "after a step and a second init")
    assert state.keys() == optimizer_state(model).keys()
    assert all(torch.equal(state[key], value) for key, value in optimizer_state(model).items())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())

    # Init code given afterwards, on stand-ins of the whole tables: TorchRec's own would broadcast.
    with no_collective(model):
        again = shardinit.record(model, shardinit.reset_parameters)
    assert {name: entry.program for name, entry in again.entries.items()} == {
        name: entry.program for name, entry in plan.entries.items()
    }


def _moved(piece: Any, truth: dict[str, torch.Tensor]) -> bool:
    if not piece.local.numel():
        return False
    return not torch.equal(piece.local, truth[piece.name][region.slices(boxes_of_piece(piece)[0])])


def _unpooled(rank: int, world: int, kernel: str) -> None:
    """Without a forward: see above."""
    torch.manual_seed(1000 + rank)
    shardings = tw.shardings(world, world)
    per_table = {name: shardings[name] for name in UNPOOLED}
    with shardinit.recording():
        whole, model = Ranker([SHARED_BY_ALL], list(per_table)), Ranker([SHARED_BY_ALL], list(per_table))
    shardinit.init_model_(whole, SEED, device="cpu")
    sharded = tw.distribute(model, {"bags": {SHARED_BY_ALL: tw.data_parallel()}, "rows": per_table}, world, kernel)
    with no_collective(sharded):
        shardinit.init_model_(sharded, SEED)
    assert_equals(sharded, dict(whole.named_parameters()), kernel)


def _both_worker(rank: int, world: int, local: int, kernels: list[str]) -> None:
    """All in one process group: to import TorchRec takes longer than a model."""
    check_counter()
    for kernel in kernels:
        _train(rank, world, local, kernel)
        _unpooled(rank, world, kernel)


@pytest.mark.parametrize("world, local, kernels", [(2, 2, ["fused", "dense"]), (4, 2, ["fused"])])
def test_every_sharding_equals_the_unsharded_model_and_trains(world: int, local: int, kernels: list[str]) -> None:
    run_gloo(_both_worker, world, local, kernels, limit=150, threads=1)


def _memory_worker(rank: int, world: int) -> tuple[int | None, int | None]:
    per_table = {"rows": tw.row_wise(), "columns": tw.column_wise(ranks=[0, 1, 0, 1])}

    def sharded(rows: int) -> nn.Module:
        with shardinit.recording():
            collection = EmbeddingBagCollection(tables=tw.bag_configs(list(per_table), rows, 64))
            model = nn.ModuleDict({"bags": collection})
        return tw.distribute(model, {"bags": per_table}, world, "fused")

    shardinit.init_model_(sharded(ROWS), SEED)  # imports
    model = sharded(2**17)
    ours, wasteful = InitMeter(), InitMeter()
    with ours.around(model):
        shardinit.init_model_(model, SEED)
    with wasteful.around(model):
        shardinit.init_model_(model, SEED)
        torch.ones(2**22)  # 16 MiB, for a moment
    return ours.extra_bytes, wasteful.extra_bytes


def test_init_allocates_nothing_beyond_the_shards() -> None:
    for ours, wasteful in run_gloo(_memory_worker, 2, limit=100, threads=1):
        if ours is None:
            pytest.skip("the peak of resident memory can't be reset here")
        assert ours < 2 * 2**20  # of 32 MiB for each table
        assert wasteful > 14 * 2**20


# --- torchrec#1739: data-parallel tables that differ ----------------------------------------------------------------


def _data_parallel_worker(rank: int, world: int) -> None:
    torch.manual_seed(1000 + rank)
    per_table = {SHARED_BY_ALL: tw.data_parallel()}

    def build() -> nn.Module:
        return Ranker([SHARED_BY_ALL], [SHARED_BY_ALL])

    def distribute(model: nn.Module) -> nn.Module:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "broadcast", lambda *args, **kwargs: None)
            return tw.distribute(model, {"bags": per_table, "rows": per_table}, world, "fused")

    names = ["bags.embedding_bags.data.weight", "rows.embeddings.data.weight"]
    stock = distribute(build())
    tables = dict(stock.module.named_parameters())
    assert not any(same_on_all_ranks(tables[name]) for name in names), "stock tables must differ here"

    with shardinit.recording():
        model = build()
    ours = distribute(model)
    with no_collective(ours):
        shardinit.init_model_(ours, SEED)
    assert all(same_on_all_ranks(parameter) for parameter in ours.module.parameters())
    with shardinit.recording():
        whole = build()
    shardinit.init_model_(whole, SEED, device="cpu")
    assert_equals(ours, dict(whole.named_parameters()), "data-parallel tables")


def test_data_parallel_tables_that_stock_torchrec_leaves_different_are_equal() -> None:
    run_gloo(_data_parallel_worker, 2, limit=100, threads=1)
