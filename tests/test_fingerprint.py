"""fingerprint in one process: what counts, what does not, and what 512 ranks would hold."""

from __future__ import annotations

import copy
import json
import tracemalloc

import numpy as np
import pytest
import torch
import torch.nn as nn

import torch_shardinit as shardinit
from torch_shardinit import _native, reference
from torch_shardinit.digest import combined_digest
from torch_shardinit.exchange import Exchange
from torch_shardinit.fingerprint import Fingerprint, fingerprint
from torch_shardinit.holdings import Holding, digest_holdings
from torch_shardinit.merge import Tables, exchange_tables, merged, show_ranks


def net(seed: int = 3) -> nn.Module:
    with shardinit.recording():
        model = nn.TransformerEncoderLayer(32, 4, 64)
    return shardinit.init_model_(model, seed, device="cpu")


def reference_of(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    found = {}
    for name, one in tensors.items():
        raw = one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        summed = reference.digest_sum(raw, one.element_size(), np.arange(one.numel()))
        found[name] = reference.tensor_digest(str(one.dtype).removeprefix("torch."), tuple(one.shape), summed)
    return found


def test_a_model_its_state_dict_and_the_reference_agree() -> None:
    model = net()
    model.register_buffer("steps", torch.tensor(5))
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    model.register_buffer("z", torch.randn(4, dtype=torch.complex64))
    model.register_buffer("mask", torch.rand(7) > 0.5)
    model.register_buffer("none", torch.zeros(0, 4))
    found = fingerprint(model)
    want = reference_of(model.state_dict())
    assert found.tensors == want and found.digest == reference.combined_digest(want)
    assert found == fingerprint(model.state_dict()) == fingerprint(model, local_only=True)
    assert "scratch" in fingerprint(model, non_persistent=True).tensors
    assert fingerprint(torch.compile(model)).digest == found.digest
    assert fingerprint({"model": model.state_dict(), "more": {"deep": torch.ones(2)}}).tensors.keys() == {
        *(f"model.{name}" for name in want),
        "more.deep",
    }


def test_instruction_sets_threads_and_memory_do_not_matter() -> None:
    model = net()
    want = fingerprint(model)
    threads = torch.get_num_threads()
    try:
        for isa in _native.available_isas():
            _native.force_isa(isa)
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                assert fingerprint(model) == want
    finally:
        torch.set_num_threads(threads)
        _native.force_isa("")
    strided = copy.deepcopy(model)
    for parameter in strided.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
    assert not strided.linear1.weight.is_contiguous()
    assert fingerprint(strided) == want
    channels = torch.randn(4, 3, 5, 6)
    assert fingerprint(channels) == fingerprint(channels.to(memory_format=torch.channels_last))
    assert fingerprint(torch.ones(1).expand(5)) == fingerprint(torch.ones(5))


def test_tensors_at_odd_addresses() -> None:
    values = torch.randn(33)
    raw = bytearray(b"??") + bytearray(values.view(torch.uint8).numpy().tobytes())
    odd = torch.frombuffer(raw, dtype=torch.float32, count=33, offset=2)
    assert odd.data_ptr() % 4 == 2
    assert fingerprint(odd) == fingerprint(values) and fingerprint(odd[::2]) == fingerprint(values[::2])


def test_names_dtypes_shapes_and_swapped_tensors_count() -> None:
    a, b = torch.randn(6, 4), torch.randn(6, 4)
    base = fingerprint({"a": a, "b": b})
    assert base == fingerprint({"b": b, "a": a})
    assert combined_digest(dict(reversed(base.tensors.items()))) == base.digest
    others = [
        {"a": b, "b": a},
        {"a": a, "c": b},
        {"a": a},
        {"a": a, "b": b.reshape(4, 6)},
        {"a": a, "b": b.view(torch.int32)},
        {"a": a, "b": b, "c": torch.zeros(0)},
        {"a": a, "b": b.double()},
    ]
    digests = {fingerprint(other).digest for other in others}
    assert len(digests) == len(others) and base.digest not in digests
    assert all(fingerprint(other) != base for other in others)
    swapped = fingerprint(others[0])
    assert swapped.tensors == {"a": base.tensors["b"], "b": base.tensors["a"]}
    assert "the first's is the second's b" in base.diff(swapped).changed["a"]


def test_ties_come_under_each_name() -> None:
    model = nn.ModuleDict({"x": nn.Linear(3, 3), "y": nn.Linear(3, 3)})
    model["y"].weight = model["x"].weight
    found = fingerprint(model)
    assert found.tensors["x.weight"] == found.tensors["y.weight"] and found == fingerprint(model.state_dict())
    untied = copy.deepcopy(model)
    untied["y"].weight = nn.Parameter(untied["x"].weight.detach().clone())
    assert fingerprint(untied) == found


def test_json_and_text() -> None:
    found = fingerprint(net())
    assert Fingerprint.from_json(found.to_json()) == found and hash(Fingerprint.from_json(found.to_json())) == hash(
        found
    )
    assert Fingerprint.from_json(found.to_json()).kinds == found.kinds
    lines = str(found).splitlines()
    assert lines[0] == f"{found.digest}  12 tensors"
    assert f"{found.tensors['linear1.weight']}  float32  64x32  linear1.weight" in lines
    raw = json.loads(found.to_json())
    raw["tensors"]["linear1.bias"]["digest"] = "0" * 32
    for text, message in [
        ("{}", "must be what to_json wrote"),
        ("[1]", "must be what to_json wrote"),
        ("nonsense", "must be what to_json wrote"),
        (
            found.to_json().replace('"torch_shardinit_fingerprint": 1', '"torch_shardinit_fingerprint": 2'),
            "version must",
        ),
        (json.dumps(raw), "digest must be that of its tensors"),
    ]:
        with pytest.raises(ValueError, match=message):
            Fingerprint.from_json(text)


def test_diff() -> None:
    state = {"a": torch.zeros(3), "b": torch.ones(3), "c": torch.ones(2), "d": torch.ones(2)}
    first = fingerprint(state)
    second = fingerprint({"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.ones(2, 1), "e": torch.ones(2)})
    diff = first.diff(second)
    assert diff and diff.only_left == ("d",) and diff.only_right == ("e",)
    assert diff.changed["c"] == "shape [2] and [2, 1]"
    assert diff.changed["b"].startswith(f"values, {first.tensors['b']} and {second.tensors['b']}")
    assert str(diff).splitlines()[:2] == ["- d: only in the first", "+ e: only in the second"]
    assert not first.diff(first) and str(first.diff(first)) == "no difference"
    with pytest.raises(TypeError, match="a Fingerprint is needed, got a dict"):
        first.diff({})  # type: ignore[arg-type]


def test_errors() -> None:
    for what, kind, message in [
        (3, TypeError, "a model, a state dict or a tensor is needed, got a int"),
        ({"a": 3}, TypeError, "a: a state dict to digest must hold tensors"),
        (
            {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)},
            ValueError,
            "a.b: each tensor of a state dict must have a name",
        ),
        (nn.Linear(2, 2, device="meta"), ValueError, "must have memory, got one on meta"),
        (torch.ones(3).to_sparse(), ValueError, "must be dense"),
    ]:
        with pytest.raises(kind, match=message):
            fingerprint(what)
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="must lie in its storage"):
        fingerprint(freed)
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        fingerprint(torch.ones(1), timeout=0)
    with pytest.raises(ValueError, match="a group needs"):
        fingerprint(torch.ones(1), group=object())


def test_in_ten_thousand_random_changes_the_digest_changes() -> None:
    """A flipped bit, two elements swapped, two tensors swapped, a changed dtype or shape."""
    random = np.random.default_rng(0)
    shape = (6, 8)
    for trial in range(10_000):
        a = torch.from_numpy(random.standard_normal(shape).astype(np.float32))
        b = torch.from_numpy(random.standard_normal(shape).astype(np.float32))
        state, changed = {"a": a, "b": b}, {"a": a.clone(), "b": b}
        kind = trial % 5
        if kind == 0:
            changed["a"].view(-1).view(torch.int32)[int(random.integers(48))] ^= 1 << int(random.integers(31))
        elif kind == 1:
            i, j = (int(k) for k in random.choice(48, 2, replace=False))
            changed["a"].view(-1)[[i, j]] = changed["a"].view(-1)[[j, i]]
        elif kind == 2:
            changed = {"a": b, "b": a}
        elif kind == 3:
            changed["b"] = b.view(torch.int32)
        else:
            changed["b"] = b.reshape([(8, 6), (48,), (2, 24), (48, 1)][int(random.integers(4))])
        assert fingerprint(changed).digest != fingerprint(state).digest, (trial, kind)


# ---- 512 ranks


class Simulated(Exchange):
    """One rank of a world whose other ranks hold the rest of tensors that are sharded evenly along dimension 0."""

    def __init__(self, world: int, holdings_of_rank: list[np.ndarray]) -> None:
        super().__init__("fingerprint", alone=True)
        self.world, self.rank, self.alone = world, 0, False
        self.rows_of_rank = holdings_of_rank

    def gather(self, row: np.ndarray) -> np.ndarray:
        everyone = np.empty((self.world, *row.shape), row.dtype)
        everyone[:] = row
        if row.dtype == np.uint64:
            for rank in range(self.world):
                everyone[rank] = self.rows_of_rank[rank % len(self.rows_of_rank)]
        return everyone


def test_memory_of_512_ranks_and_2000_tensors() -> None:
    """Shards on 256 ranks, two replicas of each: rows, names and all stay under 64 MiB, and the sum is the whole's."""
    world, tensors, shards = 512, 2000, 256
    full = torch.arange(float(shards * 4)).reshape(shards, 4)
    names = [f"layers.{k // 20:03}.block_{k % 20}.attention.projection.weight" for k in range(tensors)]

    def holding(rank: int, name: str) -> Holding:
        shard = rank % shards
        return Holding((name,), "float32", (shards, 4), [(full[shard : shard + 1], (shard, 0))])

    rows_of_rank = []
    for rank in range(shards):
        one = holding(rank, names[0])
        rows_of_rank.append(np.array(one.row(digest_holdings([one])[0]), np.uint64))  # broadcast to all tensors
    exchange = Simulated(world, rows_of_rank)
    tracemalloc.start()
    _, tables = exchange_tables(exchange, lambda: [holding(0, name) for name in names])
    want = int.from_bytes(reference.digest_sum(full.numpy().tobytes(), 4, np.arange(full.numel())), "little")
    count = 0
    for tensor in merged(exchange, tables):
        assert len(tensor.distinct) == shards and tensor.agrees and tensor.covered() and tensor.total() == want
        count += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == tensors
    assert peak < 64 * 2**20, peak / 2**20


def test_regions_that_are_no_partition_are_seen() -> None:
    """As many elements as the tensor has, but one of them twice and one not at all."""
    full = torch.arange(4.0)
    exchange = Exchange("fingerprint", alone=True)
    for runs, good in ([(0, 2), (2, 2)], True), ([(0, 2), (1, 2)], False), ([(0, 2)], False), ([(0, 1), (1, 3)], True):
        holdings = [Holding(("x",), "float32", (4,), [(full[a : a + n], a)]) for a, n in runs]
        rows = np.array([[one.row(0)] for one in holdings], np.uint64)
        table = [(("x",), "float32", (4,))]
        (tensor,) = merged(exchange, Tables([table], [0] * len(runs), rows))
        assert tensor.covered() == good, runs


def test_ranks_are_shown_as_runs() -> None:
    assert show_ranks([5, 0, 1, 2, 3, 7]) == "0-3, 5, 7"
    assert show_ranks([1, 0]) == "0, 1"
