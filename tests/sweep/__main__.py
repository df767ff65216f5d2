"""python -m sweep [--package NAME] [--models REGEX] [--sample]: the table, then what failed, then a summary."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch

from . import catalogue, workers
from .examine import CLASSES, Row

HEADER = ("package", "model", "elements", *CLASSES, "stock", "result")


def cells(row: Row) -> tuple[str, ...]:
    counts = [str(row.classes.get(name, 0) or "-") if row.classes else "" for name in CLASSES]
    stock = row.stock if row.stock in ("", "ok") else "differs"
    result = row.failure or ("ok" if stock == "ok" else row.stock)
    return row.package, row.model, f"{row.num_elements:,}" if row.num_elements else "", *counts, stock, result[:160]


def table(rows: list[Row]) -> str:
    lines = [HEADER, *map(cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER) - 1)]
    numbers = range(2, 3 + len(CLASSES))
    shown = []
    for line in lines:
        aligned = [
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=False))
        ]
        shown.append("  ".join([*aligned, line[-1]]).rstrip())
    return "\n".join([shown[0], "-" * max(map(len, shown[:1])), *shown[1:]])


def summary(rows: list[Row]) -> str:
    lines = []
    for package in dict.fromkeys(row.package for row in rows):
        mine = [row for row in rows if row.package == package]
        built = [row for row in mine if not row.not_built]
        ok = [row for row in built if not row.failure]
        classes: Counter[str] = Counter()
        for row in ok:
            classes.update(row.classes)
        lines.append(
            f"{package}: {len(ok)} of {len(built)} models ok, {sum(row.stock == 'ok' for row in ok)} equal to stock "
            f"torch; {sum(row.compared for row in ok):,} elements compared; tensors "
            + ", ".join(f"{name} {classes[name]:,}" for name in CLASSES)
            + f"; {len(mine) - len(built)} not built"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sweep", description=__doc__)
    parser.add_argument("--package", action="append", choices=list(catalogue.PACKAGES), help="all by default")
    parser.add_argument("--models", default="", metavar="REGEX", help="of their names")
    parser.add_argument("--sample", action="store_true", help="the few models of tests/test_sweep.py")
    parser.add_argument("--parallel", type=int, default=2, help="models at a time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one model")
    parser.add_argument("--json", metavar="FILE", help="the rows as JSON")
    parser.add_argument("--messages", metavar="FILE", help="the messages of failures, in full")
    options = parser.parse_args()
    torch.set_num_threads(1)  # models are forked from this process
    start = time.perf_counter()
    items = catalogue.items(options.package or list(catalogue.PACKAGES), options.models, options.sample)
    print(f"{len(items)} models, packages imported in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)

    def progress(row: Row, trace: str) -> None:
        said = row.not_built or row.failure or f"stock {row.stock}"
        print(f"{row.package} {row.model} {row.seconds:.1f} s {said[:200]}", file=sys.stderr, flush=True)

    results = workers.run(items, options.parallel, options.timeout, progress)
    rows = [row for row, _ in results]
    print(table([row for row in rows if not row.not_built]))
    print()
    print(summary(rows))
    print(f"{time.perf_counter() - start:.0f} s")
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if options.messages:
        failed = [(row, trace) for row, trace in results if row.failure]
        texts = [f"== {row.package} {row.model}\n{row.failure}\n{trace}" for row, trace in failed]
        Path(options.messages).write_text("\n".join(texts))
    return 1 if any(not row.not_built and (row.failure or row.stock != "ok") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
