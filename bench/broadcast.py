"""Ours beside an init on rank 0 and a broadcast: from nothing to a sharded model, on gloo processes of this machine.

    python bench/broadcast.py [--model torch_shardinit.demo_model:decoder] [--worlds 2,4] [--json FILE]

seconds: building, wrapping and initialising, between two barriers, the least of three runs. init: of these, the time
of what gives the values (ours: init_model_; broadcast: rank 0's init and the broadcast). sent: the bytes of the tensors
of all collectives from nothing to the model, as the ranks that receive them see them: broadcasts on every rank but the
source, other collectives on every rank. differ: elements, all ranks together, that are not those of the same method in
one process (ours: the unsharded model; broadcast: rank 0's model).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from common import machine, print_table, write_json
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.utils import _sync_params_and_buffers
from torch.nn.parallel import DistributedDataParallel

import torch_shardinit as shardinit
from torch_shardinit.model import materialise_, param_init_fn
from torch_shardinit.verify import Row, Truth, _compare, _truth_of, factory_of
from torch_shardinit.verify_layouts import Factory, build, init_unsharded, wrap_ddp, wrap_fsdp1, wrap_fsdp2
from torch_shardinit.verify_meter import CollectiveCounter, InitMeter
from torch_shardinit.verify_processes import run_gloo

CPU = torch.device("cpu")
BUCKET_BYTES = 250 * 2**20  # what torch's own FSDP and DDP use


class Stopwatch:
    """Seconds of the part that gives the values."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started


def rank_0_model(factory: Factory, seed: int) -> nn.Module:
    """Initialised by torch on rank 0, without memory elsewhere."""
    if dist.get_rank() == 0:
        torch.manual_seed(seed)
        return factory()
    with torch.device("meta"):
        return factory()


def ours_fsdp1(factory: Factory, seed: int, init: Stopwatch) -> nn.Module:
    model = build(factory)
    model = wrap_fsdp1(model, ShardingStrategy.FULL_SHARD, True, param_init_fn(model, device=CPU, fill=False))
    with init:
        shardinit.init_model_(model, seed)
    return model


def ours_fsdp2(factory: Factory, seed: int, init: Stopwatch) -> nn.Module:
    model = wrap_fsdp2(build(factory))
    with init:
        shardinit.init_model_(model, seed, device=CPU)
    return model


def ours_ddp(factory: Factory, seed: int, init: Stopwatch) -> nn.Module:
    model = build(factory)
    with init:
        shardinit.init_model_(model, seed, device=CPU)
    return wrap_ddp(model)


def broadcast_fsdp1(factory: Factory, seed: int, init: Stopwatch) -> nn.Module:
    """What sync_module_states=True does; FSDP1 refuses that on the CPU."""
    with init:
        model = rank_0_model(factory, seed)
        materialise_(model, CPU)
        states = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
        _sync_params_and_buffers(dist.group.WORLD, states, BUCKET_BYTES, 0)
    return wrap_fsdp1(model, ShardingStrategy.FULL_SHARD, True, None)


def broadcast_fsdp2(factory: Factory, seed: int, init: Stopwatch) -> nn.Module:
    with init:
        whole = rank_0_model(factory, seed)
        state = whole.state_dict() if dist.get_rank() == 0 else {}
    with torch.device("meta"):
        model = factory()
    model = wrap_fsdp2(model)
    materialise_(model, CPU)
    initialising = init.seconds
    with init:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        # A state_dict leaves buffers out that are not persistent; most users would notice.
        persistent = model.state_dict().keys()
        source = dict(whole.named_buffers())
        for name, buffer in model.named_buffers():
            if name not in persistent:
                if dist.get_rank() == 0:
                    buffer.copy_(source[name])
                dist.broadcast(buffer, src=0)
    init.seconds += initialising
    return model


def broadcast_ddp(factory: Factory, seed: int, init: Stopwatch) -> nn.Module:
    """As everyone does it: each rank initialises, and the constructor replaces the values by rank 0's."""
    with init:
        torch.manual_seed(seed + dist.get_rank())
        model = factory()
        wrapped = DistributedDataParallel(model)
    return wrapped


Method = Callable[[Factory, int, Stopwatch], nn.Module]
METHODS: dict[str, tuple[Method, Method]] = {
    "fsdp1": (ours_fsdp1, broadcast_fsdp1),
    "fsdp2": (ours_fsdp2, broadcast_fsdp2),
    "ddp": (ours_ddp, broadcast_ddp),
}


def _received(counter: CollectiveCounter) -> int:
    return sum(size for name, size in counter.calls if dist.get_rank() != 0 or not name.startswith("broadcast"))


def _measure(method: Method, factory: Factory, seed: int, truth: Truth, repeats: int = 3) -> dict[str, Any]:
    best: dict[str, Any] = {}
    for repeat in range(repeats):
        torch.manual_seed(1000 + dist.get_rank())
        init = Stopwatch()
        dist.barrier()
        started = time.perf_counter()
        model = method(factory, seed, init)
        dist.barrier()
        seconds = time.perf_counter() - started
        if not best or seconds < best["seconds"]:
            best.update(seconds=seconds, init_seconds=init.seconds)
        if repeat == 0:
            row = Row("", "")
            _compare(model, truth, row)
            best["num_differing"] = row.num_differing + len(row.problems) * (row.num_differing == 0)
        del model
    # Apart from the timing, since the counter costs time of its own.
    counter = CollectiveCounter()
    with counter.counting():
        method(factory, seed, Stopwatch())
    return {**best, "collectives": counter.count, "num_bytes": _received(counter)}


def worker(rank: int, world: int, model: str, seed: int) -> list[dict[str, Any]]:
    factory = factory_of(model)
    unsharded = init_unsharded(factory, seed, InitMeter())
    ours = _truth_of(unsharded)
    torch.manual_seed(seed)
    torchs = _truth_of(factory())
    results = []
    for layout, (our_method, broadcast) in METHODS.items():
        for name, method, truth in (("ours", our_method, ours), ("broadcast", broadcast, torchs)):
            result = _measure(method, factory, seed, truth)
            results.append({"world": world, "layout": layout, "method": name, **result})
    return results


def _merged(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    merged = dict(of_ranks[0])
    for key in ("seconds", "init_seconds", "collectives"):
        merged[key] = max(result[key] for result in of_ranks)
    for key in ("num_differing", "num_bytes"):
        merged[key] = sum(result[key] for result in of_ranks)
    return merged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="torch_shardinit.demo_model:decoder", metavar="MODULE:FACTORY")
    parser.add_argument("--worlds", default="2,4", help="numbers of processes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    results = []
    for world in map(int, options.worlds.split(",")):
        of_ranks = run_gloo(worker, world, options.model, options.seed, limit=200)
        results += [_merged(list(rows)) for rows in zip(*of_ranks, strict=True)]
    info = machine()
    print(f"{options.model}; {info['processor']}, {info['threads']} threads, torch {info['torch']}")
    header = ["layout", "method", "ranks", "seconds", "init", "sent MB", "collectives", "differ"]
    rows = [
        [
            result["layout"],
            result["method"],
            str(result["world"]),
            f"{result['seconds']:.2f}",
            f"{result['init_seconds']:.3f}",
            f"{result['num_bytes'] / 1e6:,.1f}",
            str(result["collectives"]),
            f"{result['num_differing']:,}",
        ]
        for result in results
    ]
    print_table(header, rows, left=2)
    write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
