"""Many small tensors: what one costs in a batch and in a call of its own, beside torch.

    python bench/small.py [--tensors 2000] [--elements 64] [--json FILE] [--check]

Microseconds a tensor, the least of several loops, on one model of that many tensors of normal numbers, fp32. native:
the C++ call alone on pieces that are ready. pieces: the same, with the tuples for it made in Python. Plan.apply_ and
init_model_ are what users call: they find and check each tensor, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from common import best_seconds_each, least_seconds, print_machine, print_table, progress, write_json

import torch_shardinit as shardinit
from torch_shardinit import native
from torch_shardinit.locate import locate

STD = 0.02
# What --check holds ours to, in microseconds a tensor.
TARGETS = {("batch", "native, 1 thread"): 1.0, ("call", "normal_"): 8.0}

Call = Callable[[], object]


class Many(nn.Module):
    """num_tensors parameters of num_elements, each in a module of its own."""

    def __init__(self, num_tensors: int, num_elements: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(num_elements, 1, bias=False) for _ in range(num_tensors))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=STD)  # type: ignore[arg-type]


def batches(num_tensors: int, num_elements: int) -> dict[str, tuple[Call, int]]:
    """What fills them all: by name a call, and how many threads it may use (0: as they are)."""
    with shardinit.recording():
        model = Many(num_tensors, num_elements)
    plan = shardinit.record(model)
    shardinit.init_model_(model, 0, device="cpu")
    tensors = [parameter.detach() for parameter in model.parameters()]
    names = [f"layers.{number}.weight" for number in range(num_tensors)]
    ids = [shardinit.tensor_id(name) for name in names]

    def pieces() -> list[Any]:
        return [
            native.piece(tensor, "normal", (STD, 0.0), seed=0, tensor_id=identity, start=0, steps=tensor.stride())
            for tensor, identity in zip(tensors, ids, strict=True)
        ]

    ready = pieces()

    def loop(fill: Callable[[torch.Tensor], object]) -> Call:
        def run() -> None:
            for tensor in tensors:
                fill(tensor)

        return run

    def raw() -> None:
        for tensor, name in zip(tensors, names, strict=True):
            shardinit.normal_(tensor, STD, seed=0, tensor_id=name)

    threads = torch.get_num_threads()
    return {
        "native, 1 thread": (lambda: native.fill(ready), 1),
        **({f"native, {threads} threads": (lambda: native.fill(ready), 0)} if threads > 1 else {}),
        "pieces and native": (lambda: native.fill(pieces()), 0),
        "locate": (lambda: locate(model), 0),
        "Plan.apply_": (lambda: plan.apply_(model, 0), 0),
        "init_model_": (lambda: shardinit.init_model_(model, 0), 0),
        "loop of normal_ by name": (raw, 0),
        "torch: loop of nn.init.normal_": (loop(lambda tensor: nn.init.normal_(tensor, 0.0, STD)), 0),
        "torch: loop of Tensor.normal_": (loop(lambda tensor: tensor.normal_(0.0, STD)), 0),
        "torch: loop of Tensor.fill_": (loop(lambda tensor: tensor.fill_(0.0)), 0),
    }


def single_calls(num_elements: int) -> dict[str, Call]:
    """One tensor, one call."""
    tensor = torch.empty(num_elements)
    narrow = torch.empty(num_elements, dtype=torch.bfloat16)
    ready = [native.piece(tensor, "normal", (STD, 0.0), seed=0, tensor_id=1, start=0, steps=(1,))]
    name = "layers.0.weight"
    return {
        "native": lambda: native.fill(ready),
        "normal_": lambda: shardinit.normal_(tensor, STD, seed=0, tensor_id=1),
        "normal_ by name": lambda: shardinit.normal_(tensor, STD, seed=0, tensor_id=name),
        "normal_ by name, with offset": lambda: shardinit.normal_(tensor, STD, seed=0, tensor_id=name, offset=640),
        "normal_, bf16": lambda: shardinit.normal_(narrow, STD, seed=0, tensor_id=1),
        "uniform_": lambda: shardinit.uniform_(tensor, -STD, STD, seed=0, tensor_id=1),
        "trunc_normal_": lambda: shardinit.trunc_normal_(tensor, STD, seed=0, tensor_id=1),
        "torch: nn.init.normal_": lambda: nn.init.normal_(tensor, 0.0, STD),
        "torch: nn.init.uniform_": lambda: nn.init.uniform_(tensor, -STD, STD),
        "torch: nn.init.trunc_normal_": lambda: nn.init.trunc_normal_(tensor, 0.0, STD),
        "torch: Tensor.normal_": lambda: tensor.normal_(0.0, STD),
        "torch: Tensor.fill_": lambda: tensor.fill_(0.0),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--elements", type=int, default=64, help="of each (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 unless the targets are met")
    options = parser.parse_args()
    print_machine(f"{options.tensors:,} tensors of {options.elements} elements, normal, fp32")
    results = []
    threads = torch.get_num_threads()
    for what, (call, num_threads) in progress(batches(options.tensors, options.elements).items(), "batches"):
        torch.set_num_threads(num_threads or threads)
        call()
        microseconds = 1e6 * least_seconds(call, options.repeats) / options.tensors
        torch.set_num_threads(threads)
        results.append({"kind": "batch", "what": what, "microseconds": microseconds})
    for what, single in progress(single_calls(options.elements).items(), "calls"):
        results.append({"kind": "call", "what": what, "microseconds": 1e6 * best_seconds_each(single)})
    torchs = {one["kind"]: one["microseconds"] for one in results if one["what"].endswith("nn.init.normal_")}
    failed = False
    rows = []
    for one in results:
        target = TARGETS.get((one["kind"], one["what"]))
        failed |= target is not None and one["microseconds"] > target
        ratio = f"{one['microseconds'] / torchs[one['kind']]:.2f}"
        rows.append([one["kind"], one["what"], f"{one['microseconds']:.2f}", ratio, f"{target:g}" if target else ""])
    print_table(["", "", "us a tensor", "of nn.init.normal_", "target"], rows, left=2)
    write_json(options.json, results, tensors=options.tensors, elements=options.elements)
    return 1 if options.check and failed else 0


if __name__ == "__main__":
    sys.exit(main())
