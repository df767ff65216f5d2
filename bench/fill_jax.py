"""JAX's random fills, for bench/fill.py: partitionable threefry, jit, on the CPU. A process of its own, so that the
number of cores that XLA finds is the number asked for, and so that nothing else needs JAX.

    python bench/fill_jax.py THREADS DISTRIBUTION:DTYPE:LOG2N ...      prints a line of JSON a case: elements a second
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64", "int32": "uint32"}


def _draw(jax: Any, distribution: str, dtype: Any, size: int) -> Callable[[Any], Any] | None:
    shape = (size,)
    if distribution == "random_bits":
        return lambda key: jax.random.bits(key, shape, dtype)
    draws: dict[str, Callable[[Any], Any]] = {
        "normal": lambda key: jax.random.normal(key, shape, dtype),
        "uniform": lambda key: jax.random.uniform(key, shape, dtype, -1.0, 1.0),
        "trunc_normal": lambda key: jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype),
    }
    return draws.get(distribution)


def best_seconds(call: Callable[[], object], repeats: int = 5, budget: float = 0.15) -> float:
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


def main() -> int:
    threads = int(sys.argv[1])
    if hasattr(os, "sched_setaffinity"):  # before XLA makes its threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_threefry_partitionable", True)
    jax.config.update("jax_enable_x64", True)
    for case in sys.argv[2:]:
        distribution, dtype, log2n = case.split(":")
        draw = _draw(jax, distribution, DTYPES[dtype], 2 ** int(log2n)) if dtype in DTYPES else None
        if draw is None:
            continue
        key = jax.random.key(1, impl="threefry2x32")
        compiled = jax.jit(draw)
        rate = 2 ** int(log2n) / best_seconds(lambda f=compiled, k=key: f(k).block_until_ready())  # type: ignore[misc]
        print(json.dumps({"case": case, "rate": rate, "version": jax.__version__}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
