"""Real processes: every layout of verify on 2 and 4 gloo ranks, initialised, trained for a step, initialised again."""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel

from torch_shardinit.demo_model import Decoder, tiny
from torch_shardinit.model import init_model_, materialise_, param_init_fn
from torch_shardinit.record import record
from torch_shardinit.verify import Row, Truth, _compare, _truth_of
from torch_shardinit.verify_layouts import LAYOUTS, build, init_unsharded, wrap_fsdp2
from torch_shardinit.verify_meter import CollectiveCounter, InitMeter, check_counter, fill_with_garbage, local_tensors
from torch_shardinit.verify_processes import ChildError, run_gloo

SEED = 2**40 + 3
GARBAGE = int.from_bytes(bytes([0xA5]) * 4, "little", signed=True)


def _assert_equals(model: nn.Module, truth: Truth, what: str) -> None:
    row = Row(what, "")
    _compare(model, truth, row)
    assert row.ok, (what, row.num_differing, row.problems)
    assert row.num_compared == sum(tensor.numel() for tensor in truth.tensors.values())


def _assert_no_garbage(model: nn.Module, what: str) -> None:
    """The padding of flat parameters too has been written: it was garbage and is zero."""
    for tensor in [] if what.startswith("fsdp2") else local_tensors(model):
        words = torch.empty(0, dtype=torch.int32).set_(tensor.untyped_storage())
        assert not bool((words == GARBAGE).any()), what


def _same_on_all_ranks(value: float) -> bool:
    values: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(one == value for one in values)


def _train(model: nn.Module) -> list[float]:
    """The losses of two steps on the same tokens on every rank."""
    tokens = torch.arange(2 * 16).view(2, 16) * 37 % 301
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = model(tokens, tokens.roll(-1, dims=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _owners(model: nn.Module) -> list[torch.Tensor]:
    """The tensors whose version counters autograd looks at."""
    handles = [
        module._handle
        for module in FullyShardedDataParallel.fsdp_modules(model)
        if module._handle is not None  # a unit without parameters of its own
    ]
    return [handle.flat_param for handle in handles] or list(model.parameters())


def _assert_sharded_as_named(model: nn.Module, name: str, truth: Truth) -> None:
    """A layout that quietly became another one would prove nothing: HYBRID_SHARD on a mesh of (2, 1) is NO_SHARD."""
    world = dist.get_world_size()
    shards = world
    if name in ("unsharded", "ddp") or "no-shard" in name:
        shards = 1
    elif world == 4 and ("hybrid" in name or "hsdp" in name):
        shards = 2
    held = sum(owner.numel() for owner in (getattr(owner, "_local_tensor", owner) for owner in _owners(model)))
    total = sum(tensor.numel() for first, tensor in truth.tensors.items() if first != "rotary")
    # Shards of odd sizes are rounded up, by less than an eighth here.
    assert total / shards - total / 8 / shards < held < total / shards + total / 8 / shards, (name, held, total)


def _check_layout(name: str, truth: Truth, expected_losses: list[float]) -> None:
    meter = InitMeter()
    model = LAYOUTS[name].init(tiny, SEED, meter)
    assert meter.collectives.counts == (0, 0), name
    assert not meter.moved_generator, name
    _assert_equals(model, truth, name)
    _assert_sharded_as_named(model, name, truth)
    losses = _train(model)
    assert all(map(math.isfinite, losses)) and losses[1] < losses[0], (name, losses)
    assert all(map(_same_on_all_ranks, losses)), (name, losses)
    assert losses == pytest.approx(expected_losses, rel=1e-5), name
    # Again, over trained parameters, then over garbage.
    before = [owner._version for owner in _owners(model)]
    init_model_(model, SEED)
    assert all(owner._version > version for owner, version in zip(_owners(model), before, strict=True)), name
    _assert_equals(model, truth, f"{name}, again")
    fill_with_garbage(model)
    init_model_(model, SEED)
    _assert_equals(model, truth, f"{name}, over garbage")
    _assert_no_garbage(model, name)
    init_model_(model, SEED + 1)
    row = Row(name, "")
    _compare(model, truth, row)
    assert row.num_differing > 0.8 * row.num_compared, f"{name}: another seed must give other values"


def _layouts_worker(rank: int, world: int, names: list[str]) -> int:
    torch.manual_seed(1000 + rank)
    check_counter()
    unsharded = init_unsharded(tiny, SEED, InitMeter())
    truth = _truth_of(unsharded)
    expected_losses = _train(unsharded)
    for name in names:
        try:
            _check_layout(name, truth, expected_losses)
        except Exception as error:
            raise AssertionError(f"in layout {name}") from error
    return len(names)


@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_equals_unsharded_and_trains(world: int) -> None:
    assert run_gloo(_layouts_worker, world, list(LAYOUTS), limit=200) == [len(LAYOUTS)] * world


def _over_default_init_worker(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    plan = record(build(tiny))
    truth = _truth_of(init_unsharded(tiny, SEED, InitMeter()))

    def wrap_fsdp1(model: Decoder) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))

    def wrap_ddp(model: Decoder) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model)

    for wrap in (lambda model: model, wrap_ddp, wrap_fsdp1, wrap_fsdp2):
        model = wrap(tiny())  # initialised by torch, from this rank's own generator
        plan.apply_(model, SEED)
        _assert_equals(model, truth, "over torch's init")


def test_over_a_default_init_the_values_are_the_same() -> None:
    run_gloo(_over_default_init_worker, 2, limit=100)


def _counter_worker(rank: int, world: int) -> None:
    check_counter()
    group = dist.new_group([0, 1])
    meter = InitMeter()
    with meter.around(nn.Linear(2, 2)):
        torch.rand(1)
        dist.broadcast(torch.ones(3), src=0, group=group)
        torch.distributed._functional_collectives.all_reduce(torch.ones(2), "sum", group=dist.group.WORLD).wait()
    assert meter.moved_generator
    assert meter.collectives.counts == (2, 2)
    counter = CollectiveCounter()
    with counter.counting():
        dist.all_gather_into_tensor(torch.empty(2 * world), torch.ones(2))
    assert counter.counts == (1, 1)


def test_collectives_and_a_moved_generator_are_seen() -> None:
    run_gloo(_counter_worker, 2, limit=100)


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4096, 2048, bias=False), nn.Linear(2048, 4096))


def _memory_worker(rank: int, world: int) -> tuple[int | None, int | None]:
    init_unsharded(tiny, SEED, InitMeter())  # imports
    model = wrap_fsdp2(build(_wide))
    materialise_(model, "cpu")
    fill_with_garbage(model)
    ours, wasteful = InitMeter(), InitMeter()
    with ours.around(model):
        init_model_(model, SEED)
    with wasteful.around(model):
        init_model_(model, SEED)
        torch.ones(2**22)  # 16 MiB, for a moment
    return ours.extra_bytes, wasteful.extra_bytes


def test_init_allocates_nothing_beyond_the_shard() -> None:
    for ours, wasteful in run_gloo(_memory_worker, 2, limit=100):
        if ours is None:
            pytest.skip("the peak of resident memory can't be reset here")
        assert ours < 2 * 2**20  # of 32 MiB a rank
        assert wasteful > 14 * 2**20


def _wrong_param_init_fn_worker(rank: int, world: int) -> None:
    with pytest.raises(
        ValueError, match=r"every parameter must be on meta, or FSDP never calls the function, got .* cpu"
    ):
        param_init_fn(tiny(), SEED)


def test_error_param_init_fn_of_a_real_model() -> None:
    run_gloo(_wrong_param_init_fn_worker, 1, limit=60)


def _fails_worker(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("the cause")
    dist.barrier()


def _waits_worker(rank: int, world: int) -> None:
    if rank == 1:
        dist.barrier()


def _dies_worker(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def test_error_of_a_process_is_shown_with_its_traceback() -> None:
    with pytest.raises(
        ChildError, match=r"^rank 1 of 2 failed:\nTraceback(?s:.*)_fails_worker(?s:.*)KeyError: 'the cause'"
    ):
        run_gloo(_fails_worker, 2, limit=60)


def test_error_of_a_process_that_dies_or_waits() -> None:
    with pytest.raises(ChildError, match="rank 1 of 2 failed:\nit ended without an answer, exit code 7"):
        run_gloo(_dies_worker, 2, limit=60)
    with pytest.raises(ChildError):
        run_gloo(_waits_worker, 2, limit=10)
