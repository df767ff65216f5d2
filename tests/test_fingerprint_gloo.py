"""Real processes: one fingerprint whatever the layout; replicas that differ are named; nobody waits for ever."""

from __future__ import annotations

import copy
import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_shardinit as shardinit
from torch_shardinit.demo_model import Decoder, tiny
from torch_shardinit.verify_layouts import LAYOUTS, build
from torch_shardinit.verify_meter import CollectiveCounter, InitMeter
from torch_shardinit.verify_processes import ChildError, run_gloo

SEED = 11


def _unsharded(seed: int = SEED) -> Decoder:
    model = build(tiny)
    shardinit.init_model_(model, seed, device="cpu")
    return model


def _layouts_worker(rank: int, world: int) -> str:
    torch.manual_seed(rank)
    want = shardinit.fingerprint(_unsharded(), local_only=True)
    assert not want.partial
    for name, layout in LAYOUTS.items():
        model = layout.init(tiny, SEED, InitMeter())
        got = shardinit.fingerprint(model)
        assert got == want and got.digest == want.digest, f"{name}: {got.diff(want)}"
        shardinit.check_replicas(model)
        other = shardinit.fingerprint(layout.init(tiny, SEED + 1, InitMeter()))
        assert other.digest != want.digest, name
        counter = CollectiveCounter()
        with counter.counting():
            local = shardinit.fingerprint(model, local_only=True)
        assert counter.counts == (0, 0)
        counter = CollectiveCounter()
        with counter.counting():
            shardinit.fingerprint(model)
        tensors = len(set(want.tensors.values()))
        assert counter.count == 2 and sum(size for _, size in counter.calls) < (world + 1) * (400 + 60 * tensors), name
        if name in ("unsharded", "ddp") or "no-shard" in name:
            assert local == want, name
        else:
            assert local.partial and local.digest != want.digest, name
    return want.digest


def _parallel_worker(rank: int, world: int) -> None:
    want = shardinit.fingerprint(_unsharded(), local_only=True)

    # tensor parallelism, and beside it data parallelism, on a mesh of 2 x 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build(tiny)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "." in name:
            style = ColwiseParallel() if len(name) % 2 else RowwiseParallel()
            parallelize_module(model, mesh["tp"], {name: style})
    shardinit.init_model_(model, SEED, device="cpu")
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    assert len(sharded) >= 4
    assert shardinit.fingerprint(model) == want
    assert shardinit.fingerprint(model, group=mesh["tp"].get_group()) == want
    with pytest.raises(shardinit.ShardInitError, match=r"must hold each element of .* between them"):
        shardinit.fingerprint(model, group=mesh["dp"].get_group())

    # pipeline stages of two ranks each: names are the whole model's, each stage lacks the others'
    whole = _unsharded()
    names = sorted(whole.state_dict())
    stage = {name: whole.state_dict()[name] for k, name in enumerate(names) if k * 2 // len(names) == rank // 2}
    assert shardinit.fingerprint(stage) == want
    shardinit.check_replicas(stage)

    # uneven shards, one of them empty, replicated over the other axis, and strided memory
    full = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    one = shardinit.fingerprint(full, local_only=True)
    for placements in ([Shard(0), Replicate()], [Shard(0), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Shard(1)]):
        assert shardinit.fingerprint(distribute_tensor(full, mesh, placements, src_data_rank=None)) == one, placements
    strided = DTensor.from_local(
        full[:, (rank % 2) * 5 : (rank % 2) * 5 + 5], mesh, [Replicate(), Shard(1)], shape=full.shape, stride=(10, 1)
    )
    assert not strided._local_tensor.is_contiguous()
    assert shardinit.fingerprint({"": strided}) == one


def _state_dicts_worker(rank: int, world: int) -> None:
    want = shardinit.fingerprint(_unsharded(), local_only=True)
    for name in ("fsdp1-full", "fsdp1-full-orig", "fsdp2"):
        model = LAYOUTS[name].init(tiny, SEED, InitMeter())
        assert shardinit.fingerprint(model.state_dict() if name == "fsdp2" else _sharded(model)) == want, name


def _sharded(model: nn.Module) -> dict:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return model.state_dict()


# ---- replicas that differ


def _flip(tensor: torch.Tensor, at: int, bit: int) -> None:
    tensor.detach().reshape(-1).view(torch.int32)[at] ^= 1 << bit


def _flipped_worker(rank: int, world: int) -> None:
    """The recipe for a rank whose memory, or whose last step, went wrong."""
    bad = world - 1
    model = nn.Sequential(nn.Linear(70, 90), nn.BatchNorm1d(90))
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model = nn.parallel.DistributedDataParallel(model)
    shardinit.check_replicas(model)
    if rank == bad:
        _flip(model.module[0].weight, 37 * 70 + 12, 3)
        _flip(model.module[0].weight, 37 * 70 + 13, 4)
        _flip(model.module[0].weight, 80 * 70, 5)
        model.module[1].running_var[4] = 2.0
    rest = "0" if world == 2 else "0-2"
    for call in (shardinit.check_replicas, shardinit.fingerprint):
        with pytest.raises(shardinit.ReplicaMismatchError, match=r"2 of 7 tensors differ") as caught:
            call(model)
        text = str(caught.value)
        assert f"0.weight (float32 [90, 70]): ranks {rest} | {bad}; first difference at [37, 12], bits 0x" in text
        assert f"1.running_var (float32 [90]): ranks {rest} | {bad}; first difference at [4], bits 0x3f800000" in text
        first, second = caught.value.mismatches
        assert first.name == "0.weight" and first.sides == (tuple(range(bad)), (bad,)) and first.first == (37, 12)
        assert first.values[0] ^ first.values[1] == 1 << 3
        assert second.values == (0x3F800000, 0x40000000)
    if world == 4:  # among ranks that agree there is nothing to find, and the ranks of a group have global numbers
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        if rank < 2:
            shardinit.check_replicas(model, groups[0])
        else:
            with pytest.raises(shardinit.ReplicaMismatchError, match=r"ranks 2 \| 3"):
                shardinit.check_replicas(model, groups[1])


def _hybrid_worker(rank: int, world: int) -> None:
    """Replicas that are shards: HSDP, and FSDP1's NO_SHARD whose ranks were seeded differently (the first thread)."""
    model = LAYOUTS["fsdp2-hsdp"].init(tiny, SEED, InitMeter())
    shardinit.check_replicas(model)
    weight = next(p for name, p in sorted(model.named_parameters()) if name.endswith("weight") and p.dim() == 2)
    if rank == 3:
        local = weight._local_tensor.detach()
        _flip(local, local.numel() - 1, 31)
    with pytest.raises(shardinit.ReplicaMismatchError, match=r"1 of \d+ tensors differ") as caught:
        shardinit.check_replicas(model)
    (one,) = {mismatch.name: mismatch for mismatch in caught.value.mismatches}.values()
    assert sorted(rank for side in one.sides for rank in side) in ([1, 3], [2, 3]), one
    assert one.values[0] ^ one.values[1] == 1 << 31

    torch.manual_seed(rank)  # what the project's first thread did: each rank draws its own "replica"
    stock = FullyShardedDataParallel(
        nn.Linear(40, 30), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
    )
    with pytest.raises(shardinit.ReplicaMismatchError, match=r"weight .*: ranks 0 \| 1 \| 2 \| 3; first difference at"):
        shardinit.check_replicas(stock)
    with shardinit.recording():
        model = nn.Linear(40, 30)
    ours = FullyShardedDataParallel(
        model,
        param_init_fn=shardinit.param_init_fn(model, seed=SEED),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        device_id=torch.device("cpu"),
    )
    shardinit.check_replicas(ours)


def _ddp_worker(rank: int, world: int) -> None:
    """DDP copies rank 0's values when it wraps; without it, replicas differ by whatever each rank drew."""
    torch.manual_seed(rank)
    model = nn.Linear(8, 8)
    with pytest.raises(shardinit.ReplicaMismatchError, match=r"2 of 2 tensors differ"):
        shardinit.check_replicas(model)
    shardinit.check_replicas(nn.parallel.DistributedDataParallel(model))


# ---- errors and bounded waits


def _lists_worker(rank: int, world: int) -> None:
    layers = [nn.Linear(4, 4) for _ in range(2 + (rank == 1))]
    model = copy.deepcopy(nn.Sequential(*layers))
    with pytest.raises(
        shardinit.ShardInitError, match=r"check_replicas: .* ranks 1 hold 2\.bias, 2\.weight, which ranks 0 lack"
    ):
        shardinit.check_replicas(model)
    shapes = nn.Linear(4, 4 + rank)
    for call in (shardinit.check_replicas, shardinit.fingerprint):
        with pytest.raises(
            shardinit.ShardInitError,
            match=r"bias must have one dtype and global shape.*\[4\] on rank 0.*\[5\] on rank 1",
        ):
            call(shapes)
    with pytest.raises(shardinit.ShardInitError, match=r"must make the same call, but rank [01] made another one"):
        (shardinit.check_replicas if rank else shardinit.fingerprint)(model)
    if rank:
        with pytest.raises(ValueError, match="on meta"):
            shardinit.fingerprint(nn.Linear(2, 2, device="meta"))
    else:
        with pytest.raises(shardinit.ShardInitError, match=r"but rank 1 failed: ValueError: fingerprint: .* on meta"):
            shardinit.fingerprint(nn.Linear(2, 2))


def _stays_away_worker(rank: int, world: int) -> float:
    if rank == 1:
        time.sleep(6)
        return 0.0
    begin = time.monotonic()
    with pytest.raises(shardinit.ShardInitError, match=r"every one of 2 ranks must take part within 2 s"):
        shardinit.check_replicas(nn.Linear(2, 2), timeout=2)
    return time.monotonic() - begin


def test_error_a_rank_that_stays_away_ends_the_wait() -> None:
    try:
        waited = run_gloo(_stays_away_worker, 2, limit=40)[0]
    except ChildError as error:  # gloo may not part in peace from a collective that was given up
        raise AssertionError("the wait must end with an error of ours") from error
    assert 1.5 < waited < 5


def _dies_worker(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(3)
    with pytest.raises(shardinit.ShardInitError, match=r"at least one died"):
        shardinit.fingerprint(nn.Linear(2, 2), timeout=20)
    raise KeyError("the error came")


def test_error_a_rank_that_dies() -> None:
    with pytest.raises(ChildError) as caught:
        run_gloo(_dies_worker, 2, limit=40)
    assert "the error came" in str(caught.value) and "exit code 3" in str(caught.value)


# ---- check_consistent


def _consistent_worker(rank: int, world: int) -> None:
    with shardinit.recording():
        model = nn.Linear(4, 4)
    counter = CollectiveCounter()
    with counter.counting():
        shardinit.check_consistent(model, SEED)
    assert counter.count == 1 and sum(size for _, size in counter.calls) == 40 * (world + 1)
    plan = shardinit.record(model)
    shardinit.check_consistent(model, SEED, plan)
    with pytest.raises(shardinit.ShardInitError, match=r"differ in seed: 11 on ranks 0, 12 on ranks 1$"):
        shardinit.check_consistent(model, SEED + rank, plan)
    with shardinit.recording():
        other = nn.Linear(4, 4)
        if rank:
            nn.init.normal_(other.weight)
    with pytest.raises(shardinit.ShardInitError, match=r"differ in the plan of weight \(ranks 0 \| 1\)$"):
        shardinit.check_consistent(other, SEED)
    with shardinit.recording():
        longer = nn.Sequential(*[nn.Linear(4, 4) for _ in range(1 + rank)])
    with pytest.raises(shardinit.ShardInitError, match=r"ranks 1 hold 1\.bias, 1\.weight, which ranks 0 lack"):
        shardinit.check_consistent(longer, SEED)
    with shardinit.recording():
        stage = nn.ModuleDict({f"stage{rank}": nn.Linear(4, 4)})
    shardinit.check_consistent(stage, SEED)
    with shardinit.recording():
        played = nn.Linear(4, 4)
        played.register_buffer("table", torch.arange(6.0).cos())
    shardinit.check_consistent(played, SEED)
    capability = torch.backends.cpu.get_cpu_capability
    torch.backends.cpu.get_cpu_capability = lambda: f"capability {rank}"
    try:
        with pytest.raises(shardinit.ShardInitError, match=r"CPU capability: capability 0 on ranks 0, capability 1 on"):
            shardinit.check_consistent(played, SEED)
        shardinit.check_consistent(model, SEED)  # nothing is played here
    finally:
        torch.backends.cpu.get_cpu_capability = capability
    if rank:
        with pytest.raises(shardinit.RecordError):
            shardinit.check_consistent(nn.Linear(2, 2), SEED)
    else:
        with pytest.raises(shardinit.ShardInitError, match=r"but ranks 1 failed: RecordError"):
            shardinit.check_consistent(model, SEED)


# ---- in one group of processes each, for a process costs seconds to start

CASES = {
    2: (_layouts_worker, _state_dicts_worker, _flipped_worker, _ddp_worker, _lists_worker, _consistent_worker),
    4: (_layouts_worker, _parallel_worker, _flipped_worker, _hybrid_worker),
}


def _cases_worker(rank: int, world: int) -> str:
    answers = []
    for case in CASES[world]:
        dist.barrier()
        answers.append(case(rank, world))
    return str(answers[0])


@pytest.mark.parametrize("world", [2, 4])
def test_cases_of(world: int) -> None:
    """The layouts' digest is that of one process, here; the rest is asserted over there."""
    digests = run_gloo(_cases_worker, world, limit=250)
    assert set(digests) == {shardinit.fingerprint(_unsharded()).digest}
