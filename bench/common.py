"""Shared by the benchmarks: timing, tables, and what machine the numbers are of."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
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
    return {"processor": _processor(), "threads": torch.get_num_threads(), **torch_shardinit.build_info()}


def print_table(header: list[str], rows: list[list[str]], left: int) -> None:
    print("\n".join(aligned([header, *rows], left=left)))


def write_json(path: str | None, results: list[dict[str, Any]]) -> None:
    if path:
        with open(path, "w") as file:
            json.dump({"machine": machine(), "results": results}, file, indent=2)
            file.write("\n")
