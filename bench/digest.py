"""Digests beside our normal_ and torch.sum over the same tensor: elements a second, in one run, turn by turn.

    python bench/digest.py [--log2n 26] [--json FILE] [--check]

2^26 elements lie in memory, where torch.sum is as fast as it is; 2^18 lie in the cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from common import machine, print_table, progress, write_json

import torch_shardinit as shardinit
from torch_shardinit import _native
from torch_shardinit.digest import digest_parts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
# What --check holds digests to, in fp32 on one thread with the best instruction set.
GOALS = {"normal_": 1.0, "sum": 0.25}


def measure(log2n: int, budget: float) -> list[dict[str, Any]]:
    results = []
    all_threads = torch.get_num_threads()
    for name, dtype in progress(DTYPES.items(), f"digest, 2^{log2n}"):
        tensor = torch.randn(2**log2n).to(dtype)
        for isa in _native.available_isas():
            for threads in sorted({1, all_threads}):
                if threads > 1 and isa != _native.available_isas()[-1]:
                    continue
                _native.force_isa(isa)
                torch.set_num_threads(threads)
                calls = {
                    "digest": lambda x=tensor: digest_parts([(x, (0,), tuple(x.shape))]),
                    "sum": lambda x=tensor: x.sum(),
                }
                if isa != "baseline":  # there FMA is emulated, in seconds
                    calls["normal_"] = lambda x=tensor: shardinit.normal_(x, seed=1, tensor_id=1)
                best = dict.fromkeys(calls, float("inf"))
                until = time.perf_counter() + budget
                while time.perf_counter() < until or float("inf") in best.values():
                    for what, call in calls.items():
                        started = time.perf_counter()
                        call()
                        best[what] = min(best[what], time.perf_counter() - started)
                rates = {what: tensor.numel() / seconds for what, seconds in best.items()}
                results.append({"dtype": name, "isa": isa, "threads": threads, "log2n": log2n, **rates})
    torch.set_num_threads(all_threads)
    _native.force_isa("")
    return results


def _row(result: dict[str, Any]) -> list[str]:
    def ratio(other: str) -> str:
        return f"{result['digest'] / result[other]:.2f}" if other in result else "-"

    rates = [f"{result[what] / 1e6:,.0f}" if what in result else "-" for what in ("digest", "normal_", "sum")]
    elements = f"2^{result['log2n']}"
    return [elements, result["dtype"], result["isa"], str(result["threads"]), ratio("normal_"), ratio("sum"), *rates]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log2n", type=int, default=26, help="elements in memory, as a power of 2 (default: 26)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row (default: %(default)g)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 unless the goals of fp32 on one thread are met")
    options = parser.parse_args()
    info = machine()
    print(f"{info['processor']}, {info['threads']} threads, torch {info['torch']}")
    results = measure(options.log2n, options.seconds) + measure(18, options.seconds / 4)
    print_table(
        ["elements", "dtype", "set", "threads", "of normal_", "of sum", "M/s", "normal_", "sum"],
        [_row(result) for result in results],
        left=3,
    )
    write_json(options.json, results)
    failed = False
    for result in results[: len(results) // 2]:
        if options.check and (result["dtype"], result["threads"], result["isa"]) == ("fp32", 1, info["isa"]):
            for other, goal in GOALS.items():
                reached = result["digest"] / result[other]
                failed |= reached < goal
                print(f"digest, fp32: must be at least {goal:g} x {other}, is {reached:.2f} x")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
