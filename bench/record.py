"""Recording a large model: a Llama 3 shape built and initialised inside recording(), made a Plan, and located for one
rank of a large world.

    python bench/record.py [--shapes 8b,70b,405b] [--world 1024] [--json FILE] [--check]

All times are the least of three in one process; the first recording of a process also pays for imports, about a
second of torch's own. meta: the same construction and init code on torch's meta device, without this library.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import llama
from common import least_seconds, print_machine, print_table, progress, write_json
from one_rank import SHARDERS, join_fake_world, run_alone
from scale import added_seconds

from torch_shardinit.locate import locate

# What --check holds the 70B shape to.
RECORD_SECONDS, LOCATE_SECONDS = 5.0, 1.0


def measure(shape: str, layout: str, world: int) -> dict[str, Any]:
    """In a process of its own."""
    config = llama.SHAPES[shape]
    on_meta, recording, record, model, plan = added_seconds(config)
    join_fake_world(world // 2, world)
    model = SHARDERS[layout](model, list(model.layers))  # type: ignore[arg-type, call-overload]
    return {
        "num_layers": config.num_layers,
        "tensors": len(plan.entries),
        "meta_seconds": on_meta,
        "recording_seconds": recording,
        "record_seconds": record,
        f"locate_{layout}_seconds": least_seconds(lambda: locate(model), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8b,70b,405b", help=f"of {', '.join(llama.SHAPES)} (default: %(default)s)")
    parser.add_argument(
        "--world", type=int, default=1024, help="ranks; the middle one is located (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 unless the targets of the 70B shape are met")
    options = parser.parse_args()
    print_machine(f"recording Llama 3 shapes, locating them as one rank of {options.world}")
    results = []
    for shape in progress(options.shapes.split(","), "record"):
        result: dict[str, Any] = {"shape": shape, "world": options.world}
        for layout in SHARDERS:
            result |= {**run_alone(measure, shape, layout, options.world), **result}
        results.append(result)
    keys = ["meta_seconds", "recording_seconds", "record_seconds", "locate_fsdp2_seconds", "locate_fsdp1_seconds"]
    rows = []
    for result in results:
        per_tensor = 1e6 * (result["recording_seconds"] + result["record_seconds"]) / result["tensors"]
        counts = [result["shape"], str(result["num_layers"]), f"{result['tensors']:,}"]
        rows.append([*counts, *(f"{result[key]:.3f}" for key in keys), f"{per_tensor:.0f}"])
    header = ["shape", "layers", "tensors", "meta s", "recording s", "record s", "locate fsdp2 s", "locate fsdp1 s"]
    print_table([*header, "us a tensor"], rows, left=1)
    write_json(options.json, results)
    failed = False
    for result in results:
        if options.check and result["shape"] == "70b":
            recorded = result["recording_seconds"] + result["record_seconds"]
            located = max(result[f"locate_{layout}_seconds"] for layout in SHARDERS)
            failed |= recorded > RECORD_SECONDS or located > LOCATE_SECONDS
            print(f"70b: recording must take at most {RECORD_SECONDS:g} s, takes {recorded:.2f}; locating at most "
                  f"{LOCATE_SECONDS:g} s, takes {located:.3f}")  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
