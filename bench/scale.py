"""What one rank of a large world pays: its real shard of a Llama 3 shape, recorded, located and filled, on torch's
fake process group.

    python bench/scale.py [--worlds 8,16,...,4096] [--layouts fsdp2,fsdp1] [--quick] [--json FILE] [--check]

Each case is the middle rank in a process of its own. added: what recording() and record() add to building the model
on meta, the least of three. locate: locate() alone. first: locate and fill, in memory that was never touched, as
after to_empty; again: the same once more, the least of three, when its pages are there. extra: the peak of resident
memory beyond what was resident before the first fill and beyond the shard itself. Where a shard would not fit into
--max-gib the model has fewer layers, and the table says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from typing import Any

import llama
import torch
import torch.nn as nn
from common import least_seconds, mebibytes, print_machine, print_table, progress, write_json
from one_rank import CPU, SHARDERS, join_fake_world, run_alone

import torch_shardinit as shardinit
from torch_shardinit.locate import locate
from torch_shardinit.model import materialise_
from torch_shardinit.verify_meter import _reset_peak, _status, _storages

WORLDS = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
# (shape, layout, world) beside the curve, and what --check holds cases to: seconds added, seconds, MiB.
TARGETS = {("70b", 1024): (3.0, 1.0, 64.0), ("405b", 4096): (6.0, 2.0, 128.0)}


def num_parameters(config: llama.LlamaConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in llama.Llama(config).parameters())


def fitting(config: llama.LlamaConfig, world: int, max_bytes: float) -> llama.LlamaConfig:
    """The shape with as many of its layers as fit; a ValueError where none do."""
    none, one = (num_parameters(dataclasses.replace(config, num_layers=layers)) for layers in (0, 1))
    num_layers = min(config.num_layers, int((max_bytes * world / 4 - none) // (one - none)))
    if num_layers < 1:
        raise ValueError(f"not one layer fits: without any a shard takes {4 * none / world / 2**30:.1f} GiB")
    return dataclasses.replace(config, num_layers=num_layers)


def added_seconds(config: llama.LlamaConfig) -> tuple[float, float, float, nn.Module, shardinit.Plan]:
    """(building on meta, recording the same, record()), the least of three each; the model and its Plan."""
    best = [float("inf")] * 3
    for _ in range(3):
        started = time.perf_counter()
        with torch.device("meta"):
            llama.build(config)
        built = time.perf_counter()
        with shardinit.recording():
            model = llama.build(config)
        recorded = time.perf_counter()
        plan = shardinit.record(model)
        planned = time.perf_counter()
        spans = (built - started, recorded - built, planned - recorded)
        best = [min(pair) for pair in zip(best, spans, strict=True)]
    return best[0], best[1], best[2], model, plan


def measure(config: llama.LlamaConfig, layout: str, world: int) -> dict[str, Any]:
    """One case; in a process of its own."""
    on_meta, recording, record, model, plan = added_seconds(config)
    join_fake_world(world // 2, world)
    started = time.perf_counter()
    model = SHARDERS[layout](model, list(model.layers))  # type: ignore[arg-type, call-overload]
    wrapped = time.perf_counter()
    allocated = set(_storages(model))
    can_measure = _reset_peak()
    resident = _status("VmRSS")
    materialise_(model, CPU)
    first = least_seconds(lambda: plan.apply_(model, 0), 1)
    peak = _status("VmHWM")
    storages = _storages(model)
    fresh = sum(storage.nbytes() for address, storage in storages.items() if address not in allocated)
    extra = peak - resident - fresh if can_measure and peak is not None and resident is not None else None
    pieces = locate(model).pieces
    return {
        "layout": layout,
        "world": world,
        "num_layers": config.num_layers,
        "tensors": len(plan.entries),
        "elements": sum(piece.local.numel() for piece in pieces),
        "shard_bytes": sum(storage.nbytes() for storage in storages.values()),
        "meta_seconds": on_meta,
        "recording_seconds": recording,
        "record_seconds": record,
        "added_seconds": max(0.0, recording + record - on_meta),
        "wrap_seconds": wrapped - started,
        "locate_seconds": least_seconds(lambda: locate(model), 3),
        "first_seconds": first,
        "again_seconds": least_seconds(lambda: plan.apply_(model, 0), 3),
        "extra_bytes": extra,
    }


def _default_gib() -> float:
    """A fifth of the machine's memory, 4.5 at most."""
    return min(4.5, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30 / 5)


def _cases(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    layouts = options.layouts.split(",")
    shape, *others = options.shapes.split(",")
    curve = [(shape, layout, world) for layout in layouts for world in map(int, options.worlds.split(","))]
    beside = [(other, layout, world) for other, world in TARGETS for layout in layouts if other in others]
    return curve + beside


def _row(result: dict[str, Any]) -> list[str]:
    if "skipped" in result:
        return [result["shape"], result["layout"], str(result["world"]), f"skipped: {result['skipped']}", *[""] * 9]
    numbers = ("added_seconds", "wrap_seconds", "locate_seconds", "first_seconds", "again_seconds")
    return [
        result["shape"],
        result["layout"],
        str(result["world"]),
        f"{result['num_layers']} of {result['all_layers']}",
        f"{result['tensors']:,}",
        f"{result['elements'] / 1e6:,.1f}",
        mebibytes(result["shard_bytes"]),
        *(f"{result[key]:.3f}" for key in numbers),
        mebibytes(result["extra_bytes"]),
    ]


def _failures(results: list[dict[str, Any]]) -> list[str]:
    """What misses its target."""
    failures = []
    for result in results:
        target = TARGETS.get((result["shape"], result["world"]))
        if target is None or "skipped" in result:
            continue
        extra = result["extra_bytes"]
        reached = (result["added_seconds"], result["first_seconds"], (extra or 0) / 2**20)
        for what, bound, got in zip(("seconds added", "seconds", "MiB beside the shard"), target, reached, strict=True):
            if got > bound:
                where = f"{result['shape']}, {result['layout']}, rank of {result['world']}"
                failures.append(f"{where}: must take at most {bound:g} {what}, got {got:.2f}")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)), help="of the curve (default: %(default)s)")
    parser.add_argument("--layouts", default="fsdp2,fsdp1", help="(default: %(default)s)")
    parser.add_argument(
        "--shapes",
        default="70b,405b",
        help=f"the curve's, then those that are measured at their one world; of {', '.join(llama.SHAPES)} "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--max-gib",
        type=float,
        default=_default_gib(),
        help="of one shard (default: %(default).1f, by the memory here)",
    )
    parser.add_argument("--quick", action="store_true", help="two worlds only")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 unless the targets are met")
    options = parser.parse_args()
    if options.quick:
        options.worlds = "1024,4096"
    print_machine("one rank's shard of a Llama 3 shape, fp32, on the fake process group")
    results = []
    for shape, layout, world in progress(_cases(options), "scale"):
        result: dict[str, Any] = {"shape": shape, "layout": layout, "world": world}
        try:
            config = fitting(llama.SHAPES[shape], world, options.max_gib * 2**30)
        except ValueError as error:
            result["skipped"] = str(error)
        else:
            result["all_layers"] = llama.SHAPES[shape].num_layers
            result |= run_alone(measure, config, layout, world)
        results.append(result)
    header = ["shape", "layout", "world", "layers", "tensors", "M elements", "shard MiB"]
    header += ["added s", "wrap s", "locate s", "first s", "again s", "extra MiB"]
    print_table(header, [_row(result) for result in results], left=2)
    write_json(options.json, results)
    failures = _failures(results) if options.check else []
    print("\n".join(failures), end="\n" if failures else "")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
