"""Shared by the benchmarks: timing, tables, progress, and what machine the numbers are of."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import torch_shardinit
from torch_shardinit.cli import aligned


def best_seconds(call: Callable[[], object], *, repeats: int = 7, budget: float = 0.6) -> float:
    """The least time of up to ``repeats`` calls after a first one, ending early when ``budget`` seconds are spent."""
    call()
    best, spent = float("inf"), 0.0
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds = time.perf_counter() - started
        best, spent = min(best, seconds), spent + seconds
        if spent > budget:
            break
    return best


def least_seconds(call: Callable[[], object], repeats: int) -> float:
    """The least time of ``repeats`` calls, the first included."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def best_seconds_each(call: Callable[[], object], *, budget: float = 0.2) -> float:
    """The least mean time of a call that is too short to be timed by itself: loops of about a hundredth of a second."""
    call()
    started = time.perf_counter()
    call()
    once = max(time.perf_counter() - started, 1e-7)
    count = max(1, min(100_000, int(0.01 / once)))

    def loop() -> None:
        for _ in range(count):
            call()

    return best_seconds(loop, repeats=100, budget=budget) / count


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": load,  # of the last minute, the benchmark's own included
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **torch_shardinit.build_info(),
    }


def print_machine(what: str) -> None:
    info = machine()
    print(f"{what}; {info['processor']}, {info['threads']} threads, {info['isa']}, torch {info['torch']}")


def print_table(header: list[str], rows: list[list[str]], left: int) -> None:
    print("\n".join(aligned([header, *rows], left=left)), flush=True)


def write_json(path: str | None, results: list[dict[str, Any]], **more: Any) -> None:
    """Writes the results with the machine that they are of. ``more``: other top-level fields."""
    if path:
        with open(path, "w") as file:
            json.dump({"machine": machine(), **more, "results": results}, file, indent=1)
            file.write("\n")


def progress(items: Iterable[Any], what: str, total: int | None = None) -> Iterator[Any]:
    """The items, with how far they are shown on stderr: by tqdm where it is installed, else a line now and then."""
    items = list(items) if total is None else items
    total = len(items) if total is None else total  # type: ignore[arg-type]
    try:
        import tqdm
    except ModuleNotFoundError:
        yield from _lines(items, what, total)
        return
    tqdm.tqdm.monitor_interval = 0  # no thread: some benchmarks fork
    terminal = sys.stderr.isatty()
    yield from tqdm.tqdm(
        items, what, total, leave=False, dynamic_ncols=terminal, mininterval=0.2 if terminal else 10, file=sys.stderr
    )


def _lines(items: Iterable[Any], what: str, total: int) -> Iterator[Any]:
    shown = started = time.monotonic()
    for number, item in enumerate(items):
        now = time.monotonic()
        if now - shown >= 5:
            shown = now
            print(f"{what}: {number} of {total}, {now - started:.0f} s", file=sys.stderr, flush=True)
        yield item


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """What tensors hold here, each storage once; of DTensors their local shards."""
    local = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in local if not one.is_meta}
    return sum(storages.values())


def mebibytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:,.1f}"
