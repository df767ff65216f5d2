"""exp, log, sqrt and the inverse error function: the bytes of docs/stream.md, section 11, and their accuracy."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from conftest import assert_bitwise_equal

from torch_shardinit import _native, native
from torch_shardinit.reference_draws import UNARY, minus_log, tangent

FUNCTIONS = tuple(UNARY)


def chosen(dtype: str) -> np.ndarray:
    """Bit patterns over all exponents, both signs, and around what a function turns at."""
    real, unsigned = (np.float64, np.uint64) if dtype == "float64" else (np.float32, np.uint32)
    bits, mantissa = (64, 52) if dtype == "float64" else (32, 23)
    rng = np.random.default_rng(5)
    any_bits = rng.integers(0, 2**bits, 1500, dtype=np.uint64).astype(unsigned).view(real)
    near = [0.0, 1.0, 2.0 / 3, 4.0 / 3, 0.85, 0.5, 2.0**-126, 2.0**-1022, 88.7228, 89, 104, 103.97, 709.78, 745.13, 746]
    edges = np.concatenate([np.array([x, -x], real) for x in near if np.isfinite(real(x))])
    around = (edges.view(unsigned)[:, None] + np.arange(-6, 7).astype(np.int64).astype(unsigned)).ravel().view(real)
    one_below = (np.array(1, real).view(unsigned) - np.arange(40, dtype=unsigned)).view(real)
    spread = np.concatenate([rng.uniform(-1, 1, 800), rng.uniform(-110, 110, 800), rng.normal(0, 1, 300)]).astype(real)
    special = np.array([np.inf, -np.inf, 2.0**-mantissa, real(np.finfo(real).max), np.finfo(real).tiny], real)
    with np.errstate(invalid="ignore"):
        found = np.concatenate([any_bits, around, one_below, -one_below, spread, special])
    return np.append(found[~np.isnan(found)], real(np.nan))


def by_native(name: str, x: np.ndarray) -> np.ndarray:
    """The step on constants, one piece an element."""
    result = np.empty_like(x)
    code = 0 if x.dtype == np.float64 else 1
    unary = native.unary_codes([(name, ())])
    with np.errstate(invalid="ignore"):
        values = x.astype(np.float64)
    address = result.ctypes.data
    pieces = [
        (address + k * x.itemsize, code, (1,), (1,), 0, (1,), 0, (float(value),), 0, 0, unary)
        for k, value in enumerate(values)
    ]
    _native.fill(pieces, 1)
    return result


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bytes_equal_the_reference(isa: str, name: str, dtype: str) -> None:
    x = chosen(dtype)
    want = UNARY[name](x)
    want[np.isnan(want)] = np.nan  # the positive quiet one
    unsigned = np.uint64 if dtype == "float64" else np.uint32
    assert_bitwise_equal(by_native(name, x).view(unsigned), want.view(unsigned), isa)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_whole_vectors_equal_single_elements(isa: str, name: str) -> None:
    """Lengths around those of vectors: each element by itself gives the same."""
    for dtype in (torch.float32, torch.float64):
        for size in (*range(1, 70), 127, 128, 129, 2303, 2305):
            got = torch.empty(size, dtype=dtype)
            where = dict(seed=3, tensor_id=4, steps=(1,), unary=native.unary_codes([(name, ()), ("mul", (0.5,))]))
            native.fill([native.piece(got, "uniform", (-1.0, 1.0), start=0, **where)])
            for at in {0, size // 2, size - 1}:
                one = torch.empty(1, dtype=dtype)
                native.fill([native.piece(one, "uniform", (-1.0, 1.0), start=at, **where)])
                assert got[at : at + 1].numpy().tobytes() == one.numpy().tobytes(), f"{size} {at}"


def worst_ulp(got: np.ndarray, exact: Callable[[float], mpmath.mpf], x: np.ndarray) -> float:
    """The largest error in units of the exact value's last place, subnormals included."""
    digits, least = (53, -1074) if got.dtype == np.float64 else (24, -149)
    worst = 0.0
    with mpmath.workdps(60):
        for value, at in zip(got.tolist(), x.tolist(), strict=True):
            want = exact(at)
            if want == 0:
                assert value == 0
                continue
            exponent = max(int(mpmath.floor(mpmath.log(abs(want), 2))) - digits + 1, least)
            worst = max(worst, float(abs(mpmath.mpf(value) - want) / mpmath.mpf(2) ** exponent))
    return worst


EXACT: dict[str, Callable[[float], mpmath.mpf]] = {
    "exp": mpmath.exp,
    "log": mpmath.log,
    "sqrt": mpmath.sqrt,
    "erfinv": lambda x: mpmath.erfinv(mpmath.mpf(x)),
}
# Asserted in docs/stream.md, section 11.
BOUNDS = {
    ("exp", "float32"): 1.0,
    ("log", "float32"): 2.0,
    ("sqrt", "float32"): 0.5,
    ("erfinv", "float32"): 7.0,
    ("exp", "float64"): 1.0,
    ("log", "float64"): 2.0,
    ("sqrt", "float64"): 0.5,
    ("erfinv", "float64"): 7.0,
}


def test_accuracy(isa: str) -> None:
    if isa != _native.available_isas()[-1]:
        return  # the bytes are the same
    for (name, dtype), bound in BOUNDS.items():
        x = chosen(dtype)
        size = np.abs(x)
        inside = {
            "exp": (x > (-745 if dtype == "float64" else -103.9)) & (x < (709.7 if dtype == "float64" else 88.7)),
            "log": (x > 0) & np.isfinite(x),
            "sqrt": (x >= 0) & np.isfinite(x),
            "erfinv": (size < 1) & (size > (1e-300 if dtype == "float64" else 1e-37)),
        }[name]
        x = x[inside][:: 6 if name == "erfinv" else 2]
        worst = worst_ulp(by_native(name, x), EXACT[name], x)
        assert 0.2 < worst <= bound, f"{name} {dtype}: {worst}"


@pytest.mark.parametrize("wide", [False, True])
def test_accuracy_of_exponential_and_cauchy(wide: bool) -> None:
    bits = 64 if wide else 32
    rng = np.random.default_rng(8)
    ends = [k for near in (0, 2 ** (bits - 2), 2 ** (bits - 1), 3 * 2 ** (bits - 2)) for k in range(near, near + 20)]
    words = np.array([*ends, *(2**bits - 1 - k for k in range(20)), *(2**k + 1 for k in range(bits))], dtype=np.uint64)
    words = np.concatenate([words, rng.integers(0, 2**bits, 400, dtype=np.uint64)])
    words = words.astype(np.uint64 if wide else np.uint32)

    def v(word: float) -> mpmath.mpf:
        return (mpmath.mpf(int(word)) + mpmath.mpf(1) / 2) / mpmath.mpf(2) ** bits

    def of_word(function: Callable[[mpmath.mpf], mpmath.mpf]) -> Callable[[float], mpmath.mpf]:
        return lambda word: function(v(word))

    numbers = words.astype(object)
    assert worst_ulp(minus_log(words, wide), of_word(lambda p: -mpmath.log(p)), numbers) <= 4.0
    centered = of_word(lambda p: mpmath.tan(mpmath.pi * (p - mpmath.mpf(1) / 2)))
    assert worst_ulp(tangent(words, wide), centered, numbers) <= 5.0
