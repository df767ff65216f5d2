"""Real processes, for the layouts that `verify` does not have: DDP without its broadcast, tensor parallelism alone and
under FSDP1 and FSDP2, pipeline stages, offload, and an init that only some ranks call. Ranks are seeded differently;
each layout then trains, and its losses are those of the unsharded model."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from guards import local_init
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import torch_shardinit as shardinit
from torch_shardinit.model import materialise_
from torch_shardinit.verify_meter import CollectiveCounter, fill_with_garbage, sequence_numbers
from torch_shardinit.verify_processes import run_gloo

SEED = 2**50 + 1
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        nn.init.trunc_normal_(self.up.weight, std=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(14, 8, padding_idx=0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 14, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = torch.arange(8).view(2, 4) * 5 % 14


def recorded() -> Net:
    with shardinit.recording():
        return Net()


def losses_of(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.roll(1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Nothing may be sent inside: not as torch's operators see it, nor as the process groups count."""
    before = sequence_numbers()
    with local_init() as watch:
        yield
    assert sequence_numbers() == before
    assert watch.fresh == []


def init_alone(model: nn.Module) -> nn.Module:
    if any(parameter.is_meta for parameter in model.parameters()):
        materialise_(model, CPU)
    fill_with_garbage(model)
    with alone():
        shardinit.init_model_(model, SEED)
    return model


def unsharded() -> Net:
    return shardinit.init_model_(recorded(), SEED, device="cpu")  # type: ignore[return-value]


def assert_whole(model: nn.Module, what: str) -> None:
    """Gathered by the framework, every parameter is the unsharded one."""
    want = dict(unsharded().named_parameters())
    with contextlib.ExitStack() as stack:
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            stack.enter_context(FullyShardedDataParallel.summon_full_params(model, writeback=False))
        elif isinstance(model, DistributedDataParallel):
            model = model.module
        got = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}
        assert got.keys() == want.keys(), what
        for name, parameter in got.items():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            # Of a copy: FSDP1 resizes its memory, and can't once NumPy has seen it.
            assert_bitwise_equal(patterns(whole.detach().clone()), patterns(want[name]), f"{what}: {name}")


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    styles = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, styles)


def fsdp1(model: nn.Module, mesh: DeviceMesh, strategy: str, use_orig_params: bool, **options: Any) -> nn.Module:
    """Allocated by FSDP1, not filled."""
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
        device_id=CPU,
        param_init_fn=shardinit.param_init_fn(model, fill=False, device=CPU),
        **options,
    )


def fsdp2(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def check(model: nn.Module, what: str) -> None:
    expected = losses_of(unsharded())
    assert_whole(init_alone(model), what)
    assert losses_of(model) == pytest.approx(expected, rel=1e-5), what


# --- two ranks -----------------------------------------------------------------------------------------------------


def _ddp(rank: int) -> None:
    assert "init_sync" in inspect.signature(DistributedDataParallel).parameters
    model = Net()  # torch's own values, from a generator seeded by rank
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    others = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(others, mine)
    assert not torch.equal(*others), "or equal replicas would prove nothing"
    counter = CollectiveCounter()
    with alone():
        shardinit.record(recorded()).apply_(model, SEED)
    with counter.counting():
        wrapped = DistributedDataParallel(model, init_sync=False)
    assert sum(num_bytes for _, num_bytes in counter.calls) < mine.nbytes / 4, counter.calls
    mine = torch.cat([parameter.detach().flatten() for parameter in wrapped.parameters()])
    dist.all_gather(others, mine)
    assert_bitwise_equal(patterns(others[0]), patterns(others[1]), "replicas")
    assert_whole(wrapped, "DDP")
    assert losses_of(wrapped) == pytest.approx(losses_of(unsharded()), rel=1e-5)


def _pipeline_stages(rank: int) -> None:
    model = recorded()
    plan = shardinit.record(model)
    example = torch.zeros(1, 4, dtype=torch.long, device="meta")
    pipe = pipeline(model, (example,), split_spec={"blocks.1": SplitPoint.BEGINNING})
    module = pipe.get_stage_module(rank).to_empty(device="cpu")
    fill_with_garbage(module)
    with alone():
        plan.apply_(module, SEED)
    want = dict(unsharded().named_parameters())
    for name, parameter in module.named_parameters():
        assert_bitwise_equal(patterns(parameter), patterns(want[name]), f"stage {rank}: {name}")
    stage = pipe.build_stage(rank, CPU)
    result = ScheduleGPipe(stage, 2).step(*([TOKENS] if rank == 0 else []))
    if rank == 1:
        assert torch.allclose(result, unsharded()(TOKENS), rtol=1e-5, atol=1e-6)


def _some_ranks_only(rank: int) -> None:
    """Rank 1 calls no init, and nothing else, until rank 0 has done all of its own."""
    mesh = init_device_mesh("cpu", (2,))
    layouts = {
        "DDP": lambda: DistributedDataParallel(Net(), init_sync=False),
        "FSDP1": lambda: fsdp1(recorded(), mesh, "FULL_SHARD", True),
        "FSDP2": lambda: fsdp2(recorded(), mesh),
        "TP": lambda: tensor_parallel(recorded(), mesh),
    }
    models = {name: make() for name, make in layouts.items()}
    plan, store = shardinit.record(recorded()), dist.distributed_c10d._get_default_store()
    if rank == 0:
        for model in models.values():
            if any(parameter.is_meta for parameter in model.parameters()):
                materialise_(model, CPU)
            with alone():
                plan.apply_(model, SEED)
        store.set("rank 0 is done", "yes")
    else:
        store.wait(["rank 0 is done"], timedelta(seconds=60))
        for model in models.values():
            init_alone(model) if not isinstance(model, DistributedDataParallel) else plan.apply_(model, SEED)
    for name, model in models.items():
        assert_whole(model, f"{name}, one rank after the other")


def _two_ranks(rank: int, world: int) -> int:
    torch.manual_seed(100 + rank)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    _ddp(rank)
    check(tensor_parallel(recorded(), mesh), "TP")
    _pipeline_stages(rank)
    _some_ranks_only(rank)
    # FSDP1's offload pins memory in its first forward and so needs an accelerator: see test_shards_fsdp1.py.
    check(fsdp2(recorded(), mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)), "FSDP2, offloaded")
    return 1


def test_two_ranks() -> None:
    assert run_gloo(_two_ranks, 2, limit=120) == [1, 1]


# --- four ranks ----------------------------------------------------------------------------------------------------


def _four_ranks(rank: int, world: int) -> int:
    torch.manual_seed(100 + rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    check(fsdp2(tensor_parallel(recorded(), mesh["tp"]), mesh["dp"]), "FSDP2 over TP")
    check(fsdp2(recorded(), mesh), "HSDP")
    for use_orig_params in (False, True):
        hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
            check(fsdp1(recorded(), hybrid, strategy, use_orig_params), strategy)
        for strategy in ("FULL_SHARD", "NO_SHARD"):
            if strategy == "NO_SHARD" and use_orig_params:
                continue  # torch 2.13 itself can't run this: "Cannot writeback when the parameter shape changes"
            model = fsdp1(tensor_parallel(recorded(), mesh["tp"]), mesh["dp"], strategy, use_orig_params)
            check(model, f"FSDP1 {strategy} over TP")
    return 1


def test_four_ranks() -> None:
    assert run_gloo(_four_ranks, 4, limit=200) == [1] * 4
