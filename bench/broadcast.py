"""From nothing to an initialised, sharded, trainable model: ours beside what people do today, on gloo processes of
this machine, or by NCCL where it has GPUs.

    python bench/broadcast.py [--models 20m,200m] [--worlds 1,2,4] [--quick] [--json FILE]

seconds: building, wrapping and initialising, between two barriers, the least of four runs; where a run takes longer
than 2 s there is one only. init: of these, what gives the values (ours: init_model_; others: torch's init, and the
broadcast, or saving and loading). Wrapping alone, with memory and without values, is a row of its own. sent: the
bytes of the tensors of all collectives, as the ranks that receive them see them: broadcasts on every rank but the
source, other collectives on every rank. disk: the checkpoint, written once and read once by all ranks together. peak:
resident memory at its highest, beyond what was there before, the shard included; on GPUs that of the device's
allocator follows. equal: fingerprints agree with those of the unsharded model that one process makes (ours by
init_model_, the others by torch with rank 0's seed). trains: a forward, backward and step of the result gives a
finite loss; of models up to 50 M parameters.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from broadcast_methods import METHODS, Job, Method, on_meta
from common import mebibytes, print_machine, print_table, progress, write_json

import torch_shardinit as shardinit
from torch_shardinit.demo_model import Decoder, DecoderConfig, decoder, tiny
from torch_shardinit.verify_layouts import Factory, init_unsharded
from torch_shardinit.verify_meter import CollectiveCounter, InitMeter, _reset_peak, _status
from torch_shardinit.verify_processes import run_gloo

LONG_SECONDS = 2.0
MAX_TRAINED = 50e6


def decoder_200m() -> Decoder:
    """199.6 million parameters."""
    return Decoder(DecoderConfig(vocab_size=32_001, dim=1024, num_layers=13, num_heads=16, hidden_dim=2816))


MODELS: dict[str, Factory] = {"tiny": tiny, "20m": decoder, "200m": decoder_200m}


def truths(rank: int, world: int, model: str, seed: int) -> dict[str, dict[str, str]]:
    """The digests of the unsharded model's tensors: ours and torch's. In one process."""
    factory = MODELS[model]
    ours = dict(shardinit.fingerprint(init_unsharded(factory, seed, InitMeter())).tensors)
    torch.manual_seed(seed)
    return {"ours": ours, "torch": dict(shardinit.fingerprint(factory()).tensors)}


def _received(counter: CollectiveCounter) -> int:
    not_received = ("barrier",) if dist.get_rank() else ("barrier", "broadcast")
    return sum(size for name, size in counter.calls if not name.startswith(not_received))


def _size(folder: str) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(folder))


def _agreed(value: Any) -> Any:
    """Rank 0's value, so that all ranks go the same way."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _timed(method: Method, job: Job) -> tuple[float, nn.Module]:
    torch.manual_seed(1000 + dist.get_rank())
    job.seconds.clear()
    dist.barrier()
    started = time.perf_counter()
    model = method.run(job)
    dist.barrier()
    return time.perf_counter() - started, model


def _trains(model: nn.Module, device: torch.device) -> bool:
    """Whether a step gives a finite loss."""
    tokens = torch.arange(1, 9, device=device).view(1, -1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = model(tokens, tokens)
    loss.backward()
    optimizer.step()
    return bool(torch.isfinite(loss))


def measure(
    method: Method, job: Job, truth: dict[str, dict[str, str]], num_parameters: int, repeats: int
) -> dict[str, Any]:
    on_gpu = job.device.type == "cuda"
    counter = CollectiveCounter()
    gc.collect()
    can_measure = _reset_peak()
    resident = _status("VmRSS") or 0
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
    # Counted and timed: the counter costs microseconds an operator, which shows in short runs only.
    with counter.counting():
        seconds, model = _timed(method, job)
    peak = _status("VmHWM")
    result: dict[str, Any] = {
        "layout": method.layout,
        "method": method.name,
        "num_parameters": num_parameters,
        "seconds": seconds,
        "init_seconds": job.seconds.get("init", 0.0),
        "collectives": counter.count - 2,  # the barriers
        "sent_bytes": _received(counter),
        "disk_bytes": _size(job.folder) if method.name == "seed checkpoint" else 0,
        "peak_bytes": peak - resident if can_measure and peak is not None else None,
        "gpu_peak_bytes": torch.cuda.max_memory_allocated() - allocated if on_gpu else None,
        "equal": None,
        "trains": None,
        "timed_runs": 1,
    }
    if method.truth is not None:
        tensors = shardinit.fingerprint(model).tensors
        result["equal"] = dict(tensors) == truth[method.truth]
        result["differing_tensors"] = sum(tensors.get(name) != of for name, of in truth[method.truth].items())
        if num_parameters < MAX_TRAINED:
            result["trains"] = _trains(model, job.device)
    del model
    for _ in range(0 if _agreed(seconds) > LONG_SECONDS else repeats):
        gc.collect()
        seconds = _timed(method, job)[0]
        result["timed_runs"] += 1
        if seconds < result["seconds"]:
            result |= {"seconds": seconds, "init_seconds": job.seconds.get("init", 0.0)}
    return result


def worker(
    rank: int, world: int, model: str, seed: int, folder: str, repeats: int, truth: dict[str, dict[str, str]]
) -> list[dict[str, Any]]:
    cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    warm_up = Job(tiny, seed, device, os.path.join(folder, "warm-up"))
    for method in METHODS:  # imports, first calls
        method.run(warm_up)
    job = Job(MODELS[model], seed, device, os.path.join(folder, "model"))
    num_parameters = sum(parameter.numel() for parameter in on_meta(job.factory).parameters())
    return [measure(method, job, truth, num_parameters, repeats) for method in METHODS]


def _merged(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One method's results of all ranks."""
    merged = dict(of_ranks[0])
    for key in ("seconds", "init_seconds", "collectives"):
        merged[key] = max(result[key] for result in of_ranks)
    merged["sent_bytes"] = sum(result["sent_bytes"] for result in of_ranks)
    for key in ("peak_bytes", "gpu_peak_bytes"):
        own, *others = [result[key] for result in of_ranks]
        merged[key] = own
        merged[f"others_{key}"] = max(others) if others and None not in others else None
    for key in ("equal", "trains"):
        values = [result[key] for result in of_ranks]
        merged[key] = None if None in values else all(values)
    return merged


def run_case(model: str, world: int, options: argparse.Namespace, truth: dict[str, Any]) -> list[dict[str, Any]]:
    folder = tempfile.mkdtemp(prefix="shardinit-bench-")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    arguments = (model, options.seed, folder, options.repeats, truth)
    try:
        of_ranks = run_gloo(worker, world, *arguments, limit=options.limit, backend=backend)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    merged = [_merged(list(rows)) for rows in zip(*of_ranks, strict=True)]
    return [{"model": model, "world": world, "backend": backend, **result} for result in merged]


def default_worlds() -> list[int]:
    """As many ranks as there are GPUs, or on a CPU cores; but 4 in any case there."""
    if torch.cuda.is_available():
        return [world for world in (1, 2, 4, 8) if world <= torch.cuda.device_count()]
    return [1, 2, 4, 8] if (os.cpu_count() or 1) >= 8 else [1, 2, 4]


def _yes(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "NO"


def _row(result: dict[str, Any]) -> list[str]:
    numbers = [f"{result['seconds']:.3f}", f"{result['init_seconds']:.3f}" if result["init_seconds"] else ""]
    numbers += [f"{result['sent_bytes'] / 1e6:,.1f}", str(result["collectives"])]
    numbers.append(f"{result['disk_bytes'] / 1e6:,.1f}" if result["disk_bytes"] else "")
    peaks = [mebibytes(result[key]) for key in ("peak_bytes", "others_peak_bytes")]
    if result["gpu_peak_bytes"] is not None:
        peaks = [
            f"{host} / {mebibytes(result[f'{who}gpu_peak_bytes'])}"
            for host, who in zip(peaks, ("", "others_"), strict=True)
        ]
    where = [result["model"], str(result["world"]), result["layout"], result["method"]]
    return [*where, *numbers, *peaks, _yes(result["equal"]), _yes(result["trains"])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="20m,200m", help=f"of {', '.join(MODELS)} (default: %(default)s)")
    parser.add_argument("--worlds", default=",".join(map(str, default_worlds())), help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs beside the first (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="20 M parameters on 1 and 2 ranks")
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds for a model on a world (default: %(default)g)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.models, options.worlds, options.repeats = "20m", "1,2", 1
    print_machine("from nothing to a sharded, initialised model")
    results = []
    cases = [(model, int(world)) for model in options.models.split(",") for world in options.worlds.split(",")]
    known: dict[str, Any] = {}
    for model, world in progress(cases, "broadcast"):
        if model not in known:
            (known[model],) = run_gloo(truths, 1, model, options.seed, limit=options.limit)
        results += run_case(model, world, options, known[model])
    header = ["model", "ranks", "layout", "method", "seconds", "init", "sent MB", "collectives", "disk MB"]
    header += ["peak MiB, rank 0", "others", "equal", "trains"]
    print_table(header, [_row(result) for result in results], left=4)
    write_json(options.json, results)
    return 0 if all(result["equal"] is not False for result in results if result["method"] == "ours") else 1


if __name__ == "__main__":
    sys.exit(main())
