"""TorchRec's tables: recorded, sharded in every way on any world, and equal to the unsharded ones.

Worlds of one machine: torch's fake process group, a forked process a rank. tests/test_torchrec_gloo.py is the real
thing.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torchrec_world as tw
from conftest import assert_bitwise_equal, patterns
from fake_world import assert_covered, assert_pieces, numbered, run_ranks, run_world
from torch.distributed.device_mesh import init_device_mesh
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagSharder
from torchrec.modules.embedding_configs import DataType

import torch_shardinit as shardinit
from torch_shardinit.locate import locate

SEED = 2**45 + 11


def build(kind: str, names: list[str], rows: int = 7, dim: int = 256, **options: Any) -> nn.Module:
    if kind == "bags":
        return EmbeddingBagCollection(tables=tw.bag_configs(names, rows, dim, **options))
    return EmbeddingCollection(tables=tw.row_configs(names, rows, dim, **options))


def recorded(*args: Any, **options: Any) -> nn.Module:
    with shardinit.recording():
        return build(*args, **options)


def by_rows(weight: torch.Tensor) -> None:
    """Needs the rows of the whole table. TorchRec itself calls it with a shard, or with (0,) where it has none."""
    nn.init.normal_(weight, std=max(weight.shape[0], 1) ** -0.5)


def unsharded(*args: Any, **options: Any) -> dict[str, torch.Tensor]:
    model = recorded(*args, **options)
    shardinit.init_model_(model, SEED, device="cpu")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


# --- recording -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, "meta", torch.device("meta"), torch.device("cpu")])
@pytest.mark.parametrize("kind", ["bags", "rows"])
def test_tables_get_their_init_function_and_not_that_of_embedding(kind: str, device: Any) -> None:
    """A collection on meta leaves what nn.EmbeddingBag draws: N(0, 1)."""
    seen: list[tuple[int, ...]] = []

    def mine(weight: torch.Tensor) -> None:
        seen.append(tuple(weight.shape))
        nn.init.normal_(weight, std=weight.shape[0] ** -0.5)

    make = tw.bag_configs if kind == "bags" else tw.row_configs
    configs = [*make(["default"], 16, 4), *make(["mine"], 25, 4, init_fn=mine)]
    with shardinit.recording():
        model = (EmbeddingBagCollection if kind == "bags" else EmbeddingCollection)(tables=configs, device=device)
    programs = {name.split(".")[1]: entry.program.describe() for name, entry in shardinit.record(model).entries.items()}
    assert programs == {"default": "uniform(a=-0.25, b=0.25)", "mine": "normal(std=0.2, mean=0)"}
    assert set(seen) == {(25, 4)}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_reset_parameters_of_a_collection_that_was_not_recorded(device: str) -> None:
    for kind, make, cls in (
        ("bags", tw.bag_configs, EmbeddingBagCollection),
        ("rows", tw.row_configs, EmbeddingCollection),
    ):
        collection = cls(tables=make(["a"], 16, 4), device=torch.device(device))
        (entry,) = shardinit.record(collection, shardinit.reset_parameters).entries.values()
        assert entry.program.describe() == "uniform(a=-0.25, b=0.25)", kind


def test_the_class_is_as_before_after_a_recording_and_in_other_threads() -> None:
    original = EmbeddingBagCollection.reset_parameters
    drawn = []

    def elsewhere() -> None:
        collection = EmbeddingBagCollection(tables=tw.bag_configs(["t"], 4, 4), device=torch.device("meta"))
        collection._embedding_bag_configs[0].init_fn = drawn.append
        collection.reset_parameters()

    with shardinit.recording():
        assert EmbeddingBagCollection.reset_parameters is not original
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert EmbeddingBagCollection.reset_parameters is original and not drawn
    with pytest.raises(KeyError), shardinit.recording():
        raise KeyError
    assert EmbeddingBagCollection.reset_parameters is original


def test_torchrec_imported_inside_the_recording() -> None:
    code = (
        "import torch_shardinit as shardinit\n"
        "with shardinit.recording():\n"
        "    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig\n"
        "    table = EmbeddingBagConfig(name='t', num_embeddings=16, embedding_dim=4, feature_names=['f'])\n"
        "    model = EmbeddingBagCollection(tables=[table])\n"
        "print(shardinit.record(model).entries['embedding_bags.t.weight'].program.describe())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "uniform(a=-0.25, b=0.25)"


# --- every sharding, every rank of a world -------------------------------------------------------------------------


def _tables_of_rank(local: int, kernel: str, output_dtensor: bool) -> dict[str, np.ndarray]:
    """Pieces against where TorchRec itself puts numbered elements; then an init against the unsharded tables."""
    per_table = tw.shardings(dist.get_world_size(), local)
    names = list(per_table)
    env: dict[str, Any] = {}
    if output_dtensor:
        env = {"output_dtensor": True, "device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    sharded = tw.shard(recorded("bags", names, init_fn=by_rows), per_table, local, kernel, **env)
    shown = {type(value).__name__ for value in sharded.state_dict().values()}
    assert shown == {"Tensor", "DTensor" if output_dtensor else "ShardedTensor"}
    whole_tables = unsharded("bags", names, init_fn=by_rows)
    assert all(abs(float(whole.std()) - 7**-0.5) < 0.03 for whole in whole_tables.values())
    numbers = {name: numbered(tuple(whole.shape)).float() for name, whole in whole_tables.items()}
    with tw.quiet():
        sharded.load_state_dict(dict(numbers))
    located = locate(sharded)
    assert not located.padding
    held = assert_pieces(located.pieces, numbers)
    before = {name: parameter._version for name, parameter in sharded.named_parameters()}
    shardinit.init_model_(sharded, SEED)
    assert_pieces(locate(sharded).pieces, whole_tables)
    assert all(parameter._version > before[name] for name, parameter in sharded.named_parameters())
    return {name.split(".")[1]: counts for name, counts in held.items()}


@pytest.mark.parametrize("world, local", [(1, 1), (2, 2), (3, 3), (4, 2), (6, 3), (9, 9)])
@pytest.mark.parametrize("kernel", ["fused", "dense"])
def test_every_sharding_holds_slices_of_the_unsharded_table(world: int, local: int, kernel: str) -> None:
    held = run_world(_tables_of_rank, world, local, kernel, False)
    per_table = tw.shardings(world, local)
    for name in per_table:
        copies = world if name == "data" else 1
        assert assert_covered([{name: one[name]} for one in held], copies) == 1
    # Otherwise nothing was sharded.
    shares = {name: [int(one[name].sum()) for one in held] for name in per_table}
    assert shares["table_last"] == [0] * (world - 1) + [7 * 256]
    assert shares["rows"] == [min(max(7 - rank * -(-7 // world), 0), -(-7 // world)) * 256 for rank in range(world)]


@pytest.mark.parametrize("kernel", ["fused", "dense"])
def test_tables_shown_as_dtensors(kernel: str) -> None:
    held = run_world(_tables_of_rank, 2, 2, kernel, True)
    assert assert_covered([{k: v for k, v in one.items() if k != "data"} for one in held], 1) == 5


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_half_precision_tables(data_type: DataType) -> None:
    """A table that is to be bf16 is fp16 in an unsharded collection; what counts is what it is where it is filled."""
    # Rank 0: data, rows, two of columns, four of columns_on_one, host_rows. Rank 1 has the last table for those four.
    assert run_ranks(_half_of_rank, [0, 1], 2, data_type) == [9, 6]
    # Seven rows: the last ranks of nine hold an empty shard of "rows".
    assert run_ranks(_half_of_rank, [6, 8], 9, data_type) == [4, 2]


def _half_of_rank(data_type: DataType) -> int:
    world = dist.get_world_size()
    per_table, compared = tw.shardings(world, world), 0
    model = recorded("bags", list(per_table), data_type=data_type)
    plan = shardinit.record(model)
    sharded = tw.shard(model, per_table, world, "fused")
    shardinit.init_model_(sharded, SEED)
    dtype = torch.float16 if data_type is DataType.FP16 else torch.bfloat16
    for piece in locate(sharded).pieces:
        assert piece.local.dtype == dtype, piece.name  # where this rank holds nothing of the table, too
        if piece.local.numel():
            whole = plan.fill_(piece.name, torch.empty(piece.global_shape, dtype=dtype), seed=SEED)
            box = tuple(slice(at, at + size) for at, size in zip(piece.offset, piece.local.shape, strict=True))
            assert_bitwise_equal(patterns(piece.local), patterns(whole[box]), piece.name)
            compared += 1
    return compared


def _more_tables_of_rank() -> None:
    per_table = tw.shardings(2, 2)
    sharded = tw.shard(recorded("bags", ["new", *per_table]), {"new": per_table["rows"], **per_table}, 2, "fused")
    shardinit.init_model_(sharded, SEED)
    before = unsharded("bags", list(per_table))
    assert_pieces([piece for piece in locate(sharded).pieces if piece.name in before], before)


def test_a_table_added_leaves_the_others_alone() -> None:
    run_world(_more_tables_of_rank, 2)


# --- records through sharding --------------------------------------------------------------------------------------


def _shard_rows(collection: nn.Module) -> nn.Module:
    return tw.shard(collection, {name: tw.row_wise() for name in collection.embedding_bags}, 1, "fused")


def _values(collection: nn.Module) -> torch.Tensor:
    shardinit.init_model_(collection, SEED)
    (piece,) = locate(collection).pieces
    return piece.local


def _records_of_rank() -> None:
    configs = tw.bag_configs(["t"], 8, 4)
    with shardinit.recording():
        first, second = EmbeddingBagCollection(tables=configs), EmbeddingBagCollection(tables=configs)
        nn.init.constant_(second.embedding_bags["t"].weight, 2.0)
    copied = copy.deepcopy(first)
    with shardinit.recording():
        third = EmbeddingBagCollection(tables=second.embedding_bag_configs())
    with shardinit.recording():
        nn.init.constant_(third.embedding_bags["t"].weight, 3.0)
    (expected,) = unsharded("bags", ["t"], 8, 4).values()
    assert torch.equal(_values(_shard_rows(first)), expected)
    assert bool((_values(_shard_rows(second)) == 2.0).all())
    assert bool((_values(_shard_rows(third)) == 3.0).all())
    assert torch.equal(_values(_shard_rows(copied)), expected)
    with pytest.raises(shardinit.RecordError, match="the model was not built inside recording"):
        shardinit.init_model_(_shard_rows(pickle.loads(pickle.dumps(first))), SEED)


def test_each_collection_keeps_its_own_record() -> None:
    """One list of configurations may make several collections, and init code may come in a later recording."""
    run_world(_records_of_rank, 1)


def test_a_collection_that_lost_a_table_does_not_trouble_other_recordings() -> None:
    collection = recorded("rows", ["a", "b"])
    del collection.embeddings["a"]
    with shardinit.recording():
        other = nn.Linear(2, 2)
    assert len(shardinit.record(other).entries) == 2
    assert list(shardinit.record(collection).entries) == ["embeddings.b.weight"]


def test_a_pickled_collection_needs_nothing_of_this_package() -> None:
    again = pickle.loads(pickle.dumps(recorded("bags", ["a"])))
    assert type(again.embedding_bag_configs()) is list and len(again.embedding_bag_configs()) == 1


# --- what is refused -----------------------------------------------------------------------------------------------


def _unwritten_of_rank() -> None:
    sharded = _shard_rows(build("bags", ["a", "b"], 8, 4))

    def only_a(model: nn.Module) -> None:
        nn.init.ones_(model.embedding_bags["a"].weight)

    with pytest.raises(shardinit.UninitializedError, match=r"no recorded code initialises 1 tensors: .*\.b\.weight"):
        shardinit.init_model_(sharded, SEED, init_fn=only_a)
    shardinit.init_model_(sharded, SEED, init_fn=only_a, keep=["*.b.weight"])
    other = shardinit.record(recorded("bags", ["a"], 8, 4))
    with pytest.raises(
        ValueError, match=r"the Plan must know every tensor .*1 that it lacks: embedding_bags\.b\.weight"
    ):
        other.apply_(sharded, SEED)


def test_error_unwritten_and_unknown_tables() -> None:
    run_world(_unwritten_of_rank, 1)


def _inside_of_rank() -> None:
    sharded = _shard_rows(recorded("bags", ["t"], 8, 4))
    for call in (locate, lambda inside: shardinit.record(inside, lambda model: nn.init.uniform_(model["t"].weight))):
        with pytest.raises(
            ValueError, match=r"Module\.weight: a table of TorchRec can only be located from a model that"
        ):
            call(sharded.embedding_bags)
    table = sharded.embedding_bags["t"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sharded.embedding_bags._modules, "t", nn.Module())
        sharded.embedding_bags["t"].register_parameter("weight", table.weight)
        assert len(locate(sharded).pieces) == 1  # whichever module holds it


def test_error_a_table_without_its_collection() -> None:
    run_world(_inside_of_rank, 1)


def _misfits_of_rank() -> None:
    def refused(message: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=message + r" \(torchrec 1\.8\.0; see the README"):
            locate(sharded)
        with pytest.raises(ValueError, match=message):
            shardinit.init_model_(sharded, SEED)

    sharded = _shard_rows(recorded("bags", ["t"], 8, 4))
    tensors = sharded._model_parallel_name_to_sharded_tensor
    shard, kept = tensors["t"].local_shards()[0], tensors["t"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard.metadata, "shard_sizes", [7, 4])
        refused(r"table 't': a local shard must have the sizes \(7, 4\) of its metadata, at .* got \(8, 4\)")
        patch.undo()
        patch.setattr(shard.metadata, "shard_offsets", [1, 0])
        refused(r"table 't': a local shard must have the sizes \(8, 4\) of its metadata, at \(1, 0\) of .*got \(8, 4\)")
        patch.undo()
        patch.setattr(shard, "tensor", shard.tensor.clone())
        refused("table 't': a local shard must be memory of the registered parameter, got a copy of it")
        patch.undo()
        patch.setattr(kept, "_local_shards", [])
        refused("table 't': the local shards must be all of the registered parameter, got 0 of 32")
        patch.undo()
        patch.setattr(kept.metadata(), "size", torch.Size([9, 4]))
        refused(r"table 't': the state_dict must show a table of \(8, 4\), got a ShardedTensor of \(9, 4\)")
        patch.undo()
        patch.setattr(sharded, "state_dict", dict)
        refused(r"table 't': the state_dict must show a table of \(8, 4\), got none")
        patch.undo()
        patch.delattr(sharded, "_embedding_bag_configs")
        refused("must have _embedding_bag_configs, got one without")
        patch.undo()
        patch.delitem(sharded._modules, "embedding_bags")
        refused(r"table 't': a ShardedEmbeddingBagCollection must hold it in embedding_bags, got none \(TorchRec .*\)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "tensor", object())
        with pytest.raises(TypeError, match="table 't': a shard must be a tensor in memory to be filled, got a object"):
            locate(sharded)
    assert len(locate(sharded).pieces) == 1


def test_error_what_torchrec_holds_does_not_fit() -> None:
    run_world(_misfits_of_rank, 1)


def _other_modules_of_rank() -> None:
    tw.set_hosts(2)
    sharder = EmbeddingBagSharder(fused_params=dict(tw.FUSED))
    whole = nn.EmbeddingBag(8, 4, mode="sum")
    with tw.quiet():
        plan = tw.construct_module_sharding_plan(
            whole, {"weight": tw.row_wise()}, local_size=2, world_size=2, device_type="cpu", sharder=sharder
        )
        sharded = sharder.shard(whole, plan, tw.ShardingEnv.from_process_group(dist.group.WORLD), tw.CPU)
    message = r"and EmbeddingCollection can be located, got a ShardedEmbeddingBag \(torchrec 1\.8\.0\)"
    with pytest.raises(TypeError, match=message):
        locate(nn.ModuleList([sharded]))
    with pytest.raises(TypeError, match=message):
        shardinit.init_model_(nn.ModuleList([sharded]), SEED, init_fn=shardinit.reset_parameters)


def test_error_a_sharded_embedding_bag() -> None:
    """Its block of memory is no table: filled as one, the ranks would hold equal parts."""
    run_world(_other_modules_of_rank, 2)
