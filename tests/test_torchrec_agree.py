"""Fingerprints and replica checks of TorchRec's tables, on real gloo processes."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torchrec_world as tw
from torch.distributed.device_mesh import init_device_mesh
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

import torch_shardinit as shardinit
from torch_shardinit.locate import locate
from torch_shardinit.verify_processes import run_gloo

SEED = 77
ROWS, DIM = 7, 256
UNPOOLED = ("data", "table_last", "rows", "columns")
AGREE = Path(__file__).parent.parent / "docs" / "agree.md"


class Ranker(nn.Module):
    """Pooled and unpooled tables, and a dense part."""

    def __init__(self, bags: list[str], rows: list[str]) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=tw.bag_configs(bags, ROWS, DIM))
        self.rows = EmbeddingCollection(tables=tw.row_configs(rows, ROWS, DIM))
        self.over = nn.Linear(len(bags) * DIM, 1)


def recorded(bags: list[str], rows: list[str]) -> Ranker:
    with shardinit.recording():
        return Ranker(bags, rows)


def unsharded(bags: list[str], rows: list[str]) -> shardinit.Fingerprint:
    model = recorded(bags, rows)
    shardinit.init_model_(model, SEED, device="cpu")
    return shardinit.fingerprint(model, local_only=True)


def bag(name: str) -> str:
    return f"bags.embedding_bags.{name}.weight"


def row(name: str) -> str:
    return f"rows.embeddings.{name}.weight"


def flip(model: nn.Module, name: str, at: tuple[int, int]) -> None:
    """The lowest bit of one element of what this rank holds of a table."""
    (held,) = [piece.local for piece in locate(model).pieces if piece.name == name]
    bits = held.view(torch.int32)
    bits[at] = bits[at] ^ 1


# --- one fingerprint whatever the sharding --------------------------------------------------------------------------


def _sharded(rank: int, world: int, kernel: str) -> str:
    shardings = tw.shardings(world, world)
    names = list(shardings), list(UNPOOLED)
    want = unsharded(*names)
    assert not want.partial and {bag(name) for name in shardings} | {row(name) for name in UNPOOLED} < set(want.tensors)

    per_collection = {"bags": shardings, "rows": {name: shardings[name] for name in UNPOOLED}}
    model: Any = tw.distribute(recorded(*names), per_collection, world, kernel)
    shardinit.check_consistent(model, SEED)
    shardinit.init_model_(model, SEED)
    with tw.quiet():
        state = model.state_dict()
    assert {type(value).__name__ for value in state.values()} == {"Tensor", "ShardedTensor"}
    for what in (model, state):
        got = shardinit.fingerprint(what)
        assert got == want and got.digest == want.digest, f"{kernel}, a {type(what).__name__}: {got.diff(want)}"
        shardinit.check_replicas(what)
        # A rank's own view has the whole of data-parallel tables alone, and of those that lie on it.
        local = shardinit.fingerprint(what, local_only=True)
        of_others = {bag("table_last"), row("table_last")} if rank != world - 1 else {bag("columns_on_one")}
        shared = {bag("rows"), row("rows"), bag("columns"), row("columns"), bag("host_rows")}
        assert local.partial == of_others | shared
        assert all(local.tensors[name] == want.tensors[name] for name in want.tensors.keys() - local.partial)

    # A bit of what one rank alone holds: another fingerprint, on every rank, and replicas that agree.
    for name, holder in ((bag("rows"), 0), (bag("table_last"), world - 1), (row("rows"), 1)):
        if rank == holder:
            flip(model, name, (0, 5))
        assert list(shardinit.fingerprint(model).diff(want).changed) == [name]
        shardinit.check_replicas(model)
        if rank == holder:
            flip(model, name, (0, 5))
    # A bit of a replica: an error, whoever asks and however.
    if rank == 1:
        flip(model, bag("data"), (6, 250))
    for call in (shardinit.check_replicas, shardinit.fingerprint):
        for what in (model, state):
            with pytest.raises(shardinit.ReplicaMismatchError, match=rf"; 1 of {len(want.tensors)} tensors") as caught:
                call(what)
            (one,) = caught.value.mismatches
            assert (one.name, one.sides, one.first) == (bag("data"), ((0,), (1,)), (6, 250))
            assert one.values[0] ^ one.values[1] == 1
    if rank == 1:
        flip(model, bag("data"), (6, 250))
    assert shardinit.fingerprint(model) == want

    # The first forward registers buffers; they are no part of what was initialised.
    with tw.quiet():
        features = [f"bag_{name}" for name in names[0]]
        values = torch.arange(len(features) * 8) * 5 % ROWS
        model.module.bags(KeyedJaggedTensor(features, values, lengths=torch.full((len(features) * 4,), 2))).wait()
    assert any("_features_order_tensor" in name for name, _ in model.named_buffers())
    assert shardinit.fingerprint(model, non_persistent=True) == want
    shardinit.check_replicas(model)
    return want.digest


def _dtensors(rank: int, world: int, kernel: str) -> None:
    """The state dict of a collection that shows its shards as DTensors, several of them on a rank."""
    shardings = tw.shardings(world, world)

    def build() -> nn.Module:
        with shardinit.recording():
            return EmbeddingBagCollection(tables=tw.bag_configs(list(shardings), ROWS, DIM))

    whole = build()
    shardinit.init_model_(whole, SEED, device="cpu")
    want = shardinit.fingerprint(whole, local_only=True)
    env = {"output_dtensor": True, "device_mesh": init_device_mesh("cpu", (world,))}
    model = tw.shard(build(), shardings, world, kernel, **env)
    shardinit.init_model_(model, SEED)
    state = model.state_dict()
    assert {type(value).__name__ for value in state.values()} == {"Tensor", "DTensor"}
    shards = [len(value._local_tensor.local_shards()) for value in state.values() if hasattr(value, "_local_tensor")]
    assert max(shards) > 1 or rank, shards
    for what in (model, state):
        got = shardinit.fingerprint(what)
        assert got == want, f"{kernel}, a {type(what).__name__}: {got.diff(want)}"
        shardinit.check_replicas(what)
    name = "embedding_bags.columns.weight"
    assert shardinit.fingerprint(state[name]).tensors[""] == want.tensors[name]
    if rank == 1:
        shard = state[name]._local_tensor.local_shards()[-1].view(torch.int32)
        shard[2, 3] ^= 1
    assert list(shardinit.fingerprint(state).diff(want).changed) == [name]


def _half(rank: int, world: int, data_type: DataType) -> None:
    """What ranks with and without shards of a table say of its dtype, the model and its state dict alike."""
    shardings = tw.shardings(world, world)
    with shardinit.recording():
        collection = EmbeddingBagCollection(tables=tw.bag_configs(list(shardings), ROWS, DIM, data_type=data_type))
        model = nn.ModuleDict({"bags": collection})
    plan = shardinit.record(model)
    model = tw.distribute(model, {"bags": shardings}, world, "fused")
    shardinit.init_model_(model, SEED)
    dtype = torch.float16 if data_type is DataType.FP16 else torch.bfloat16
    whole = {bag(name): plan.fill_(bag(name), torch.empty(ROWS, DIM, dtype=dtype), seed=SEED) for name in shardings}
    want = shardinit.fingerprint(whole, local_only=True)
    with tw.quiet():
        state = model.state_dict()
    for what in (model, state):
        got = shardinit.fingerprint(what)
        assert got == want, f"{dtype}, a {type(what).__name__}: {got.diff(want)}"


def _sharded_worker(rank: int, world: int) -> list[str]:
    """All in one process group: to import TorchRec takes longer than a model."""
    digests = []
    for kernel in ("fused", "dense"):
        digests.append(_sharded(rank, world, kernel))
        _dtensors(rank, world, kernel)
    for data_type in (DataType.FP16, DataType.BF16):
        _half(rank, world, data_type)
    return digests


def test_sharded_tables_have_the_fingerprint_of_the_unsharded_model() -> None:
    here = unsharded(list(tw.shardings(2, 2)), list(UNPOOLED)).digest
    assert run_gloo(_sharded_worker, 2, limit=120, threads=1) == [[here, here]] * 2


# --- torchrec#1739: the replica that was seeded differently ---------------------------------------------------------


def recipe() -> str:
    """The code of the page's recipe for data-parallel tables."""
    (code,) = [
        block
        for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", AGREE.read_text(), re.MULTILINE)
        if "DistributedModelParallel" in block
    ]
    return textwrap.dedent(code)


def _seeded_differently_worker(rank: int, world: int) -> str:
    """What TorchRec broadcasts from rank 0 after it has reset a data-parallel table is left out, as in the thread."""
    shardings = {"shared": tw.data_parallel()}
    tables = tw.bag_configs(["shared"], ROWS, DIM)
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    plan = tw.ShardingPlan({"bags": tw.plan_of(collection, shardings, world, "fused")})
    tw.set_hosts(world)
    left_out: list[Any] = []
    names: dict[str, Any] = {"plan": plan, "sharders": [tw.sharder_of(collection)], "tables": tables}
    with tw.quiet(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", lambda *args, **kwargs: left_out.append(args))
        torch.manual_seed(1000 + rank)
        stock = tw.distribute(nn.ModuleDict({"bags": collection}), {"bags": shardings}, world, "fused")
        assert left_out, "TorchRec broadcasts no more: is there a replica to check?"
        for call in (shardinit.check_replicas, shardinit.fingerprint):
            with pytest.raises(shardinit.ReplicaMismatchError, match=r"; 1 of 1 tensors differ") as caught:
                call(stock)
            (one,) = caught.value.mismatches
            assert (one.name, one.sides, one.first) == (bag("shared"), ((0,), (1,)), (0, 0))
            assert f"{bag('shared')} (float32 [{ROWS}, {DIM}]): ranks 0 | 1; first difference at" in str(caught.value)
        shardinit.check_replicas(stock, dist.new_subgroups(1)[0])  # nothing to compare with

        exec(recipe(), names)
    ours = names["model"]
    assert locate(ours).pieces[0].local.shape == (ROWS, DIM)  # on each rank the whole table
    digest = shardinit.fingerprint(ours).digest
    with shardinit.recording():
        whole = nn.ModuleDict({"bags": EmbeddingBagCollection(tables=tables)})
    shardinit.init_model_(whole, 42, device="cpu")
    assert digest == shardinit.fingerprint(whole, local_only=True).digest
    # Without its init the recipe ends in the error.
    torch.manual_seed(1000 + rank)
    with torch.no_grad():
        ours.module.bags.embedding_bags["shared"].weight.uniform_()
    with pytest.raises(shardinit.ReplicaMismatchError, match=re.escape(bag("shared")) + r" .*: ranks 0 \| 1;"):
        shardinit.check_replicas(ours)
    return digest


def test_a_data_parallel_table_that_was_seeded_differently_is_named() -> None:
    digests = run_gloo(_seeded_differently_worker, 2, limit=100, threads=1)
    assert digests[0] == digests[1]
