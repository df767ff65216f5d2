"""The raw fills beside torch's, NumPy's Philox, and fill_, the bound that memory sets: elements a second, in one run.

    python bench/fill.py [--log2n 26] [--json FILE] [--check]

torch's slow fills are timed on smaller buffers, which favours them where a buffer then fits into a cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import best_seconds, machine, print_table, write_json

import torch_shardinit as shardinit

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "fp8": torch.float8_e4m3fn,
}
Fill = Callable[[torch.Tensor], object]
# ours, torch's, and how many times smaller torch's buffer is
FILLS: dict[str, tuple[Fill, Fill, int]] = {
    "normal": (lambda x: shardinit.normal_(x, 1.0, seed=1, tensor_id=1), lambda x: x.normal_(0.0, 1.0), 8),
    "uniform": (lambda x: shardinit.uniform_(x, -1.0, 1.0, seed=1, tensor_id=1), lambda x: x.uniform_(-1.0, 1.0), 8),
    "trunc_normal": (
        lambda x: shardinit.trunc_normal_(x, 1.0, seed=1, tensor_id=1),
        lambda x: torch.nn.init.trunc_normal_(x, 0.0, 1.0, -2.0, 2.0),
        64,
    ),
}
# What --check holds ours to, x torch in fp32 on one thread.
GOALS = {"normal": 3.0, "trunc_normal": 15.0}


def rate(fill: Fill, tensor: torch.Tensor) -> float | None:
    """Elements a second; None where torch can't."""
    try:
        return tensor.numel() / best_seconds(lambda: fill(tensor))
    except (RuntimeError, NotImplementedError):
        return None


def numpy_rate(distribution: str, dtype: str, num_elements: int) -> float | None:
    """NumPy's own Philox, on one thread; it has fp32 and fp64 only."""
    kinds: dict[str, Any] = {"fp32": np.float32, "fp64": np.float64}
    generator = np.random.Generator(np.random.Philox(1))
    draw: Any = {"normal": generator.standard_normal, "uniform": generator.random}.get(distribution)
    if dtype not in kinds or draw is None:
        return None
    out = np.empty(num_elements, kinds[dtype])
    return num_elements / best_seconds(lambda: draw(dtype=kinds[dtype], out=out), budget=0.3)


def measure(log2n: int) -> list[dict[str, Any]]:
    results = []
    all_threads = torch.get_num_threads()
    for name, dtype in DTYPES.items():
        buffer = torch.zeros(2**log2n, dtype=dtype)
        for threads in sorted({1, all_threads}):
            torch.set_num_threads(threads)
            bound = rate(lambda x: x.fill_(0), buffer)
            for distribution, (ours, torchs, divisor) in FILLS.items():
                small = buffer[: max(1, buffer.numel() // divisor)]
                numpys = numpy_rate(distribution, name, 2**22) if threads == 1 else None
                results.append(
                    {
                        "distribution": distribution,
                        "dtype": name,
                        "threads": threads,
                        "ours": rate(ours, buffer),
                        "torch": rate(torchs, small),
                        "fill_": bound,
                        "numpy": numpys,
                    }
                )
        torch.set_num_threads(all_threads)
    return results


def _ratio(result: dict[str, Any], other: str) -> float | None:
    return result["ours"] / result[other] if result["ours"] and result[other] else None


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _row(result: dict[str, Any]) -> list[str]:
    millions = [_text(result[key] and result[key] / 1e6, ",.0f") for key in ("ours", "torch", "numpy", "fill_")]
    ratios = [_text(_ratio(result, "torch"), ".1f"), _text(_ratio(result, "fill_"), ".0%")]
    return [result["distribution"], result["dtype"], str(result["threads"]), *ratios, *millions]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log2n", type=int, default=26, help="elements of the buffer, as a power of 2 (default: 26)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 unless the goals of fp32 on one thread are met")
    options = parser.parse_args()
    info = machine()
    where = f"{info['processor']}, {info['threads']} threads, {info['isa']}, torch {info['torch']}"
    print(f"{where}, 2^{options.log2n} elements")
    results = measure(options.log2n)
    header = ["distribution", "dtype", "threads", "x torch", "of fill_", "M/s", "torch", "numpy", "fill_"]
    print_table(header, [_row(result) for result in results], left=2)
    write_json(options.json, results)
    failed = False
    for result in results:
        goal = GOALS.get(result["distribution"])
        if options.check and goal is not None and (result["dtype"], result["threads"]) == ("fp32", 1):
            reached = _ratio(result, "torch") or 0.0
            failed |= reached < goal
            print(f"{result['distribution']}: must be at least {goal:g} x torch, is {reached:.1f} x")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
