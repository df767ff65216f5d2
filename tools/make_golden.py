"""Write tests/data/golden_*.txt from torch_shardinit/reference.py. Run from the repository: python tools/make_golden.py

A line is: distribution dtype parameters seed=N id=N start=N count=N bytes. Parameters are name=hex float, joined by
commas ("-" if none); bytes are the count elements start, start + 1, ... as they lie in memory, little-endian.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from torch_shardinit import reference as ref
from torch_shardinit.reference_draws import DRAWS

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
HEADER = "".join(f"# {line}".rstrip() + "\n" for line in [
    "Made by tools/make_golden.py from torch_shardinit/reference.py; docs/stream.md is the definition.",
    *__doc__.strip().split("\n")[2:],
])  # fmt: skip
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTS = ("int32", "uint32", "int64", "uint64")
DTYPES = dict.fromkeys(("bernoulli", "random"), (*FLOATS, "bool", "int8", "uint8", "int16", "int32", "int64"))
DTYPES["random_bits"] = INTS
INF = float("inf")
# start, count: both parities, places in a block, 2^32 (indices need 64 bits), 2^34 (so do blocks), the last elements
STARTS = ((0, 12), (1, 5), (3, 6), (5, 6), (2**32 - 2, 5), (2**34 - 2, 5), (2**34, 5), (2**63 - 8, 8))
# seeds and ids, taken in turn: signs, both words, all ones
KEYS = (
    (0, 0), (42, ref.tensor_id("layers.0.weight")), (-1, 2**64 - 1), (2**64 - 1, 1), (2**32 - 1, 2**32 - 1),
    (-(2**63), 2**32), (0x0123456789ABCDEF, ref.tensor_id("layers.0.weight", 1)),
)  # fmt: skip
PARAMS: dict[str, tuple[tuple[str, ...], list[tuple[float, ...]]]] = {
    "random_bits": ((), [()]),
    "uniform": (
        ("a", "b"),
        [(0, 1), (-1, 1), (-0.1, 0.1), (0.5, 0.5), (-0.0, 0.0), (1, 1.0001), (1e-42, 1e-40), (-1e-6, 3e-6),
         (-300, 1000), (-1e38, 2e38), (-70000, -60000), (0, 448), (-2.5, -2.25)],
    ),
    "normal": (
        ("std", "mean"),
        [(1, 0), (0.02, 0), (0.5, 3), (1, -1000), (0, 0.3), (1e-41, 0), (1e5, 0), (3e37, 1e38)],
    ),
    "trunc_normal": (
        ("std", "mean", "a", "b"),
        [(1, 0, -2, 2), (0.02, 0, -2, 2), (0.02, 0, -0.04, 0.04), (1, 0, 5, 6), (1, 0, 0, INF), (1, 0, 5, 5.001),
         (1, 0, -0.001, 0.001), (1, 0, -8, 8), (0.5, 1, 0, 3), (3, -2, -10, 1), (1, 0, -INF, INF), (1, 0, -INF, -5),
         (1, 0, 12, 12.5), (1e5, 0, -1e5, 3e5), (1, 0, 0.25, 0.25), (1, 0, -1, 0.5)],
    ),
    "exponential": (("lambd",), [(1,), (0.02,), (1e30,), (1e-38,)]),
    "log_normal": (("mean", "std"), [(1, 2), (0, 0.02), (-100, 5), (80, 10)]),
    "cauchy": (("median", "sigma"), [(0, 1), (0.5, 0.02), (-1000, 1e30)]),
    "geometric": (("p",), [(0.5,), (0.999,), (1e-3,), (1e-9,), (2.0**-60,)]),
    "bernoulli": (("p",), [(0.5,), (0.1,), (0,), (1,), (1e-9,)]),
    "random": (("low", "high"), [(0, 2), (-5, 100), (0, 2.0**24 + 1), (-(2.0**63), 2.0**63 - 2048),
               (0, 2.0**64 - 2048)]),
}  # fmt: skip


def fill(op: str, dtype: str, params: tuple[float, ...], seed: int, ident: int, start: int, count: int) -> NDArray:
    index = np.arange(start, start + count, dtype=np.uint64)
    return DRAWS[op](index, *params, dtype=dtype, seed=seed, tensor_id=ident)


def short_hex(x: float) -> str:
    """float.hex without trailing zeros."""
    digits, p, exponent = float(x).hex().partition("p")
    return (digits.rstrip("0").rstrip(".") if "." in digits else digits) + p + exponent


def hex_bytes(values: NDArray) -> str:
    return values.astype(values.dtype.newbyteorder("<")).tobytes().hex()


def _holds(dtype: str, low: float, high: float) -> bool:
    """Whether an integer type has all of [low, high)."""
    if dtype in FLOATS:
        return True
    info = np.iinfo(np.uint8 if dtype == "bool" else dtype)
    return info.min <= low and high <= (1 if dtype == "bool" else info.max) + 1


def lines(op: str) -> Iterator[str]:
    names, cases = PARAMS[op]
    turn = 0
    for dtype in DTYPES.get(op, FLOATS):
        for params in cases:
            if op == "uniform" and dtype == "float8_e4m3fn" and params[1] <= -448:
                continue  # an error: no e4m3fn value lies below b
            if op == "random" and not _holds(dtype, *params):
                continue
            text = ",".join(f"{n}={short_hex(v)}" for n, v in zip(names, params, strict=True)) or "-"
            for start, count in STARTS:
                seed, ident = KEYS[turn % len(KEYS)]
                turn += 1
                got = fill(op, dtype, params, seed, ident, start, count)
                yield f"{op} {dtype} {text} seed={seed} id={ident} start={start} count={count} {hex_bytes(got)}"


def parse(line: str) -> tuple[str, str, tuple[float, ...], int, int, int, int, bytes]:
    """op, dtype, params, seed, id, start, count, bytes of one line."""
    op, dtype, params, seed, ident, start, count, data = line.split()
    values = () if params == "-" else tuple(float.fromhex(p.split("=")[1]) for p in params.split(","))
    return (op, dtype, values, *(int(x.split("=")[1]) for x in (seed, ident, start, count)), bytes.fromhex(data))  # type: ignore[return-value]


def main() -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    for op in PARAMS:
        body = "".join(f"{line}\n" for line in lines(op))
        (DATA / f"golden_{op}.txt").write_text(HEADER + body)
        print(f"golden_{op}.txt: {len(HEADER) + len(body)} bytes")


if __name__ == "__main__":
    main()
