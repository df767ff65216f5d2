"""Shards that are no run of their tensor: boxes with inner rows of different length, and transposed memory, beside a
contiguous fill of as many elements in the same run.

    python bench/boxes.py [--log2n 21] [--seconds 0.2] [--json FILE] [--check]

of contiguous: the speed as a share of the contiguous fill's. fp32 and bf16, one thread.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from common import best_seconds_each, print_machine, print_table, progress, write_json

import torch_shardinit as shardinit

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = [1, 2, 3, 4, 8, 16, 32, 64, 128, 512, 4096]
# What --check holds shards to: rows of 64 and more elements, and Shard(1) of 4096 x 4096 over 8.
GOAL_ROWS, GOAL_SHARD = 1 / 1.3, 0.4

Box = tuple[
    str, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool
]  # name, shape, global shape, corner, transposed


def boxes(num_elements: int) -> list[Box]:
    found: list[Box] = []
    for row in ROWS:
        num_rows = num_elements // row
        found.append((f"rows of {row}", (num_rows, row), (num_rows, 3 * row), (0, row), False))
    found.append(("Shard(1) of 4096 x 4096 over 8", (4096, 512), (4096, 4096), (0, 1024), False))
    found.append(("the same, memory transposed", (4096, 512), (4096, 4096), (0, 1024), True))
    found.append(("4096 x 4096, memory transposed", (4096, 4096), (4096, 4096), (0, 0), True))
    found.append(("Shard(0) of 4096 x 4096 over 8", (512, 4096), (4096, 4096), (1024, 0), False))
    return found


def measure(dtype: str, box: Box, budget: float) -> dict[str, Any]:
    name, shape, global_shape, corner, transposed = box
    tensor = torch.zeros(shape[::-1] if transposed else shape, dtype=DTYPES[dtype])
    view = tensor.t() if transposed else tensor
    flat = tensor.view(-1)
    where: dict[str, Any] = {"offset": corner, "global_shape": global_shape, "seed": 1, "tensor_id": 1}
    seconds = best_seconds_each(lambda: shardinit.normal_(view, **where), budget=budget)
    contiguous = best_seconds_each(lambda: shardinit.normal_(flat, seed=1, tensor_id=1), budget=budget)
    rate = tensor.numel() / seconds
    return {"dtype": dtype, "box": name, "shape": shape, "rate": rate, "of_contiguous": contiguous / seconds}


def _goal(result: dict[str, Any]) -> float | None:
    if result["box"].startswith("rows of"):
        return GOAL_ROWS if int(result["box"].split()[-1]) >= 64 else None
    return GOAL_SHARD if result["box"].startswith("Shard(1)") else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log2n", type=int, default=21, help="elements of the boxes of rows (default: 21)")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each figure (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 unless the goals are met")
    options = parser.parse_args()
    print_machine("normal_ of boxes")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cases = [(dtype, box) for dtype in DTYPES for box in boxes(2**options.log2n)]
    results = [measure(dtype, box, options.seconds) for dtype, box in progress(cases, "boxes")]
    torch.set_num_threads(threads)
    rows, failed = [], False
    for one in results:
        goal = _goal(one)
        failed |= goal is not None and one["of_contiguous"] < goal
        numbers = [f"{one['of_contiguous']:.2f}", f"{one['rate'] / 1e6:,.0f}", f"{goal:.2f}" if goal else ""]
        rows.append([one["box"], one["dtype"], *numbers])
    print_table(["box", "dtype", "of contiguous", "M/s", "goal"], rows, left=2)
    write_json(options.json, results)
    return 1 if options.check and failed else 0


if __name__ == "__main__":
    sys.exit(main())
