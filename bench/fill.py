"""The raw fills beside torch's, NumPy's Philox, JAX's threefry, and fill_, the bound that memory sets: elements a
second, in one run.

    python bench/fill.py [--log2n 10,...,27] [--quick] [--isa NAME] [--jax-python PYTHON] [--json FILE] [--check]

Peers are timed on at most 2^24 elements (torch's trunc_normal_ and NumPy 2^22), where their rates are flat, or
favoured by a cache. NumPy has one thread. JAX (jit, CPU, partitionable threefry) runs in a process that has as many
cores as the row has threads, and allocates its result, as it does for its users.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import best_seconds_each, print_machine, print_table, progress, write_json

import torch_shardinit as shardinit
from torch_shardinit import _native

FLOATS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "fp8": torch.float8_e4m3fn,
}
INTEGERS = {"int32": torch.int32, "int64": torch.int64}
Fill = Callable[[torch.Tensor], object]
# By distribution: ours, torch's, and the most elements (log2) that torch's is timed on.
FILLS: dict[str, tuple[Fill, Fill, int]] = {
    "normal": (lambda x: shardinit.normal_(x, 1.0, seed=1, tensor_id=1), lambda x: x.normal_(0.0, 1.0), 24),
    "uniform": (lambda x: shardinit.uniform_(x, -1.0, 1.0, seed=1, tensor_id=1), lambda x: x.uniform_(-1.0, 1.0), 24),
    "trunc_normal": (
        lambda x: shardinit.trunc_normal_(x, 1.0, seed=1, tensor_id=1),
        lambda x: torch.nn.init.trunc_normal_(x, 0.0, 1.0, -2.0, 2.0),
        22,
    ),
    "random_bits": (lambda x: shardinit.random_bits_(x, seed=1, tensor_id=1), lambda x: x.random_(), 24),
}
NUMPY_LOG2N, JAX_LOG2N = 22, 24
SIZES = [10, 12, 14, 16, 18, 20, 22, 24, 26, 27]
# fp32 and bf16 are measured at every size, JAX and the other dtypes at these. 2^27 of fp64 is a GiB.
FEW_SIZES, QUICK_SIZES = [10, 16, 22, 26], [10, 16, 20]

# What --check holds ours to: (distribution, dtype, threads) -> times torch's, by instruction set.
GOALS: dict[str, dict[tuple[str, str, int], float]] = {
    "avx512": {
        ("normal", "fp32", 1): 5.5,
        ("normal", "bf16", 1): 6.5,
        ("uniform", "fp32", 1): 7.5,
        ("trunc_normal", "fp32", 1): 25.0,
        ("normal", "fp32", 2): 10.0,
    },
    "avx2": {("normal", "fp32", 1): 3.8, ("uniform", "fp32", 1): 5.0},
}
OF_FILL_GOALS = {("normal", "fp32", 1): 0.28, ("uniform", "fp32", 1): 0.45}

Case = tuple[str, str, int, int]  # distribution, dtype, threads, log2 of the elements


def cases(sizes: list[int] | None, quick: bool) -> list[Case]:
    found = []
    for dtype in (*FLOATS, *INTEGERS):
        chosen = sizes or (QUICK_SIZES if quick else SIZES if dtype in ("fp32", "bf16") else FEW_SIZES)
        for threads in sorted({1, torch.get_num_threads()}):
            for distribution in FILLS:
                if (distribution == "random_bits") == (dtype in INTEGERS):
                    found += [(distribution, dtype, threads, log2n) for log2n in chosen]
    return found


class Rates:
    """Elements a second, each measured once; None where a peer can't."""

    def __init__(self, max_log2n: int, budget: float) -> None:
        self.budget = budget
        self._memory = torch.zeros(8 * 2**max_log2n, dtype=torch.uint8)
        self._known: dict[tuple[object, ...], float | None] = {}

    def _buffer(self, dtype: str, log2n: int) -> torch.Tensor:
        kind = {**FLOATS, **INTEGERS}[dtype]
        return self._memory[: kind.itemsize * 2**log2n].view(kind)

    def _rate(self, key: tuple[object, ...], call: Callable[[], object], log2n: int) -> float | None:
        if key not in self._known:
            try:
                self._known[key] = 2**log2n / best_seconds_each(call, budget=self.budget)
            except (RuntimeError, NotImplementedError):
                self._known[key] = None
        return self._known[key]

    def fill(self, who: str, distribution: str, dtype: str, threads: int, log2n: int) -> float | None:
        fill = FILLS[distribution][0 if who == "ours" else 1]
        tensor = self._buffer(dtype, log2n)
        return self._rate((who, distribution, dtype, threads, log2n), lambda: fill(tensor), log2n)

    def bound(self, dtype: str, threads: int, log2n: int) -> float | None:
        tensor = self._buffer(dtype, log2n)
        return self._rate(("fill_", dtype, threads, log2n), lambda: tensor.fill_(0), log2n)

    def numpy(self, distribution: str, dtype: str, log2n: int) -> float | None:
        """NumPy's own Philox; it has fp32, fp64 and integers only, and no truncated normal."""
        generator = np.random.Generator(np.random.Philox(1))
        size = 2**log2n
        calls: dict[tuple[str, str], Callable[[], object]] = {
            ("random_bits", "int64"): lambda: generator.bit_generator.random_raw(size)
        }
        for name, kind in (("fp32", np.float32), ("fp64", np.float64)):
            out: Any = np.empty(size, kind)
            calls["normal", name] = lambda k=kind, o=out: generator.standard_normal(dtype=k, out=o)
            calls["uniform", name] = lambda k=kind, o=out: generator.random(dtype=k, out=o)
        call = calls.get((distribution, dtype))
        return None if call is None else self._rate(("numpy", distribution, dtype, log2n), call, log2n)


def measure(every: list[Case], budget: float) -> list[dict[str, Any]]:
    rates = Rates(max(log2n for *_, log2n in every), budget)
    all_threads = torch.get_num_threads()
    results = []
    try:
        for distribution, dtype, threads, log2n in progress(every, "fill"):
            torch.set_num_threads(threads)
            torchs, numpys = min(log2n, FILLS[distribution][2]), min(log2n, NUMPY_LOG2N)
            results.append(
                {
                    "distribution": distribution,
                    "dtype": dtype,
                    "threads": threads,
                    "log2n": log2n,
                    "ours": rates.fill("ours", distribution, dtype, threads, log2n),
                    "torch": rates.fill("torch", distribution, dtype, threads, torchs),
                    "numpy": rates.numpy(distribution, dtype, numpys) if threads == 1 else None,
                    "fill_": rates.bound(dtype, threads, log2n),
                    "torch_log2n": torchs,
                }
            )
    finally:
        torch.set_num_threads(all_threads)
    return results


def add_jax(results: list[dict[str, Any]], python: str, sizes: list[int]) -> str | None:
    """Puts JAX's rates into the results; its version."""
    version = None
    of_case: dict[tuple[int, str], float] = {}

    def key(result: dict[str, Any]) -> tuple[int, str]:
        log2n = min(result["log2n"], JAX_LOG2N)
        return result["threads"], f"{result['distribution']}:{result['dtype']}:{log2n}"

    wanted: dict[int, dict[str, None]] = {}
    for result in results:
        if result["log2n"] in sizes:
            threads, case = key(result)
            wanted.setdefault(threads, {})[case] = None
    for threads, named in wanted.items():
        command = [python, str(Path(__file__).with_name("fill_jax.py")), str(threads), *named]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in progress(process.stdout, f"JAX, {threads} threads", len(named)):
                one = json.loads(line)
                of_case[threads, one["case"]], version = one["rate"], one["version"]
        if process.returncode:
            raise RuntimeError(f"fill_jax.py must end with status 0, got {process.returncode}")
    for result in results:
        result["jax"] = of_case.get(key(result)) if result["log2n"] in sizes else None
    return version


def has_jax(python: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec("jax") is not None
    return subprocess.run([python, "-c", "import jax"], capture_output=True).returncode == 0


def _ratio(result: dict[str, Any], other: str) -> float | None:
    return result["ours"] / result[other] if result.get(other) else None


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _row(result: dict[str, Any], jax: bool) -> list[str]:
    rates = [_text(result[key] and result[key] / 1e6, ",.0f") for key in ("ours", "torch", "numpy")]
    rates.append(_text(result["jax"] and result["jax"] / 1e6, ",.0f") if jax else "not installed")
    rates.append(_text(result["fill_"] and result["fill_"] / 1e6, ",.0f"))
    ratios = [_text(_ratio(result, "torch"), ".1f"), _text(_ratio(result, "fill_"), ".0%")]
    where = [result["distribution"], result["dtype"], str(result["threads"]), f"2^{result['log2n']}"]
    return [*where, *ratios, *rates]


def _by_size(results: list[dict[str, Any]]) -> None:
    """A line a distribution: times torch's, by size; fp32 and bf16."""
    sizes = sorted({one["log2n"] for one in results if one["dtype"] == "fp32"})
    by_case = {(one["distribution"], one["dtype"], one["threads"], one["log2n"]): one for one in results}
    rows = []
    for dtype in ("fp32", "bf16"):
        for threads in sorted({one["threads"] for one in results}):
            for distribution in FILLS:
                if (distribution, dtype, threads, sizes[0]) in by_case:
                    ones = [by_case[distribution, dtype, threads, log2n] for log2n in sizes]
                    rows.append([distribution, dtype, str(threads), *(_text(_ratio(o, "torch"), ".1f") for o in ones)])
    print("\ntimes torch's, by number of elements")
    print_table(["distribution", "dtype", "threads", *(f"2^{log2n}" for log2n in sizes)], rows, left=2)


def _failures(results: list[dict[str, Any]], isa: str) -> list[str]:
    """What misses its goal, at 2^26 elements or the largest size below."""
    failures = []
    largest = max((one["log2n"] for one in results if one["log2n"] <= 26), default=0)
    for one in results:
        case = one["distribution"], one["dtype"], one["threads"]
        if one["log2n"] != largest:
            continue
        of_fill = OF_FILL_GOALS if isa == "avx512" else {}
        for other, goal in (("torch", GOALS.get(isa, {}).get(case)), ("fill_", of_fill.get(case))):
            reached = _ratio(one, other) or 0.0
            if goal is not None and reached < goal:
                failures.append(f"{case}: must be at least {goal:g} x {other}, is {reached:.2f} x")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log2n", metavar="N,...", help="only these sizes, as powers of 2, for every dtype")
    parser.add_argument("--quick", action="store_true", help="few and small sizes, short timings")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each figure (default: %(default)s)")
    parser.add_argument("--isa", default="", help=f"one of {', '.join(_native.available_isas())}; the best by default")
    parser.add_argument("--jax-python", default=sys.executable, help="an interpreter that has JAX (default: this one)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 unless the goals (at 2^26 elements) are met")
    options = parser.parse_args()
    _native.force_isa(options.isa)
    sizes = [int(size) for size in options.log2n.split(",")] if options.log2n else None
    print_machine("elements a second of raw fills")
    results = measure(cases(sizes, options.quick), budget=0.03 if options.quick else options.seconds)
    jax = has_jax(options.jax_python)
    few = sizes or (QUICK_SIZES if options.quick else FEW_SIZES)
    version = add_jax(results, options.jax_python, few) if jax else None
    largest = {one["dtype"]: one["log2n"] for one in results}
    header = ["distribution", "dtype", "threads", "elements", "x torch", "of fill_", "M/s", "torch", "numpy", "jax"]
    shown = [one for one in results if one["log2n"] in (largest[one["dtype"]], FEW_SIZES[-1])]
    print_table([*header, "fill_"], [_row(one, jax) for one in shown], left=2)
    _by_size(results)
    write_json(options.json, results, jax=version)
    failures = _failures(results, _native.active_isa()) if options.check else []
    print("\n".join(failures), end="\n" if failures else "")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
