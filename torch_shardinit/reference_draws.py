"""docs/stream.md, sections 11 and 12, beside reference.py and like it written from the page alone: elementary functions
and the draws that are made of them or of integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_shardinit import reference as ref
from torch_shardinit._exact import FORMATS, fma32, fma64, horner32, horner64, round_to, split
from torch_shardinit._quantile import quantile64, ratio32
from torch_shardinit._tables import (
    C32,
    C64,
    EXP32,
    EXP64,
    K32,
    K64,
    L32,
    L64,
    LN2,
    LN2_64,
    LOG2E32,
    LOG2E64,
    LOG32,
    LOG64,
    S32,
    S64,
    TAIL32,
    TAIL64,
)

_U64 = np.uint64
INTEGER_BITS = {"bool": 8, "uint8": 8, "int8": 8, "uint16": 16, "int16": 16, "int32": 32, "uint32": 32}
INTEGER_BITS.update({"int64": 64, "uint64": 64})


_ARITHMETIC: dict[bool, Any] = {True: (fma64, horner64), False: (fma32, horner32)}


def _is_double(x: NDArray) -> bool:
    return bool(x.dtype == np.float64)


# ---- 11. elementary functions, of arrays of fp32 or fp64


def exp(x: NDArray) -> NDArray:
    """e to the x."""
    real, wide = x.dtype.type, _is_double(x)
    fma, horner = _ARITHMETIC[wide]
    lowest, highest = (-746, 710) if wide else (-104, 89)
    is_nan = np.isnan(x)
    at = np.minimum(np.maximum(np.where(is_nan, real(0), x), real(lowest)), real(highest))
    big = real(1.5) * real(2.0 ** (52 if wide else 23))
    n = fma(at, LOG2E64 if wide else LOG2E32, big) - big
    ln2, tail = (LN2_64, TAIL64) if wide else (LN2, TAIL32)
    r = fma(n, -tail, fma(n, -ln2, at))
    y = fma(r * r, horner(r, EXP64 if wide else EXP32), r) + real(1)
    half = fma(n, 0.5, big) - big
    with np.errstate(over="ignore", under="ignore"):
        result = y * np.ldexp(real(1), half.astype(np.int64)) * np.ldexp(real(1), (n - half).astype(np.int64))
    return np.where(is_nan, x, result)


def log(x: NDArray) -> NDArray:
    """The natural logarithm."""
    real, wide = x.dtype.type, _is_double(x)
    fma, horner = _ARITHMETIC[wide]
    ordinary = (x > 0) & np.isfinite(x)
    m, n = split(np.where(ordinary, x, real(1)))
    # m in [2/3, 4/3): "two thirds" is the bit pattern of 2/3, rounded up in fp32 and down in fp64
    two_thirds = float.fromhex("0x1.5555555555555p-1") if wide else float.fromhex("0x1.555556p-1")
    above = m >= real(2 * two_thirds)
    m, n = np.where(above, m * real(0.5), m), np.where(above, n + 1, n)
    f = m - real(1)
    series = horner(f, LOG64 if wide else LOG32)
    value = fma(n.astype(real), LN2_64 if wide else LN2, fma(f * f, series, f))
    value = np.where(x == np.inf, x, value)
    value = np.where(x == 0, real(-np.inf), value)
    return np.where((x < 0) | np.isnan(x), real(np.nan), value)


def sqrt(x: NDArray) -> NDArray:
    with np.errstate(invalid="ignore"):
        return np.sqrt(x)


def erfinv(x: NDArray) -> NDArray:
    """The inverse of the error function."""
    real = x.dtype.type
    inside = np.abs(x) < 1
    at = np.where(inside, x, real(0))
    if _is_double(x):
        value = quantile64(at * 0.5, (1.0 - np.abs(at)) * 0.5) * float.fromhex("0x1.6a09e667f3bcdp-1")
    else:
        m, n = split(fma32(-at, at, 1.0))
        t = m - real(2)
        w = fma32((n + 1).astype(np.float32), -LN2, real(0.5) * (t * horner32(t, L32)))
        value = at * (ratio32(w) * real(float.fromhex("0x1.6a09e6p-2")))
    with np.errstate(invalid="ignore"):
        outside = np.where(np.abs(x) == 1, x * real(np.inf), real(np.nan))
    return np.where(inside, value, outside)


UNARY: dict[str, Callable[[NDArray], NDArray]] = {"exp": exp, "log": log, "sqrt": sqrt, "erfinv": erfinv}


# ---- 12. draws


def _signed(w: ArrayLike, wide: bool) -> NDArray[Any]:
    """float(int32(w)) or double(int64(w))."""
    if wide:
        return np.asarray(w, _U64).view(np.int64).astype(np.float64)
    return np.asarray(w, np.uint32).view(np.int32).astype(np.float64).astype(np.float32)


def _unsigned(w: NDArray, wide: bool) -> NDArray[Any]:
    return w.astype(np.float64) if wide else w.astype(np.float64).astype(np.float32)


def minus_log(w: ArrayLike, wide: bool) -> NDArray:
    """-ln((w + 1/2) / 2^32), wide: 2^64."""
    fma, horner = _ARITHMETIC[wide]
    bits = 64 if wide else 32
    x = fma(_signed(w, wide), 2.0 ** (1 - bits), 2.0**-bits)
    real = x.dtype.type
    top = x < 0
    m, n = split(np.where(top, real(1), x))
    t = np.where(top, x, m - real(2))
    n = np.where(top, 0, n).astype(real)
    return real(0.5) * fma(n, K64 if wide else K32, t * horner(t, L64 if wide else L32))


def tangent(w: ArrayLike, wide: bool) -> NDArray:
    """tan(pi (v - 1/2)), v = (w + 1/2) / 2^32, wide: 2^64."""
    fma, horner = _ARITHMETIC[wide]
    bits = 64 if wide else 32
    word: NDArray[Any] = np.asarray(w, _U64 if wide else np.uint32)
    center = fma(_signed(word ^ word.dtype.type(1 << (bits - 1)), wide), 2.0**-bits, 2.0 ** (-1 - bits))
    end = fma(_unsigned(np.where(center < 0, word, ~word), wide), 2.0**-bits, 2.0 ** (-1 - bits))
    real = center.dtype.type
    outer = np.abs(center) > 0.25
    a = np.where(outer, end, np.abs(center)) * real(4)
    x = a * a
    sine, cosine = horner(x, S64 if wide else S32) * a, horner(x, C64 if wide else C32)
    value = np.where(outer, cosine, sine) / np.where(outer, sine, cosine)
    return np.where(center < 0, -value, value)


def _word(index: ArrayLike, wide: bool, seed: int, tensor_id: int) -> NDArray:
    draw = ref._words64 if wide else ref.words
    return draw(index, 0, seed=seed, tensor_id=tensor_id)


def _positive(op: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{op}: {name} must be > 0, got {value}")


def exponential(
    index: ArrayLike, lambd: float = 1.0, *, dtype: str = "float32", seed: int = 0, tensor_id: int = 0
) -> NDArray:
    """Exponential with rate lambd."""
    (lambd,) = ref._params("exponential", dtype, lambd=lambd)
    ref._finite("exponential", lambd=lambd)
    _positive("exponential", lambd=lambd)
    wide = dtype == "float64"
    e = minus_log(_word(index, wide, seed, tensor_id), wide)
    with np.errstate(over="ignore", under="ignore"):
        return round_to(e / e.dtype.type(lambd), dtype)


def log_normal(
    index: ArrayLike, mean: float = 1.0, std: float = 2.0, *, dtype: str = "float32", seed: int = 0, tensor_id: int = 0
) -> NDArray:
    """exp of a normal."""
    mean, std = ref._params("log_normal", dtype, mean=mean, std=std)
    ref._finite("log_normal", mean=mean, std=std)
    _positive("log_normal", std=std)
    working = "float64" if dtype == "float64" else "float32"
    bits = ref.normal(index, std, mean, dtype=working, seed=seed, tensor_id=tensor_id)
    return round_to(exp(bits.view(working)), dtype)


def cauchy(
    index: ArrayLike,
    median: float = 0.0,
    sigma: float = 1.0,
    *,
    dtype: str = "float32",
    seed: int = 0,
    tensor_id: int = 0,
) -> NDArray:
    """Cauchy with the given median and half width at half height."""
    median, sigma = ref._params("cauchy", dtype, median=median, sigma=sigma)
    ref._finite("cauchy", median=median, sigma=sigma)
    _positive("cauchy", sigma=sigma)
    wide = dtype == "float64"
    t = tangent(_word(index, wide, seed, tensor_id), wide)
    real = t.dtype.type
    with np.errstate(over="ignore", under="ignore"):
        return round_to(t * real(sigma) + real(median), dtype)


def geometric_rate(p: float) -> float:
    """-ln(1 - p), as section 12 computes it."""
    u = 1.0 - p
    return p if u == 1.0 else p * float(log(np.array(u))) / (u - 1.0)


def geometric(index: ArrayLike, p: float, *, dtype: str = "float32", seed: int = 0, tensor_id: int = 0) -> NDArray:
    """The number of trials up to the first success."""
    if dtype not in FORMATS:
        raise ValueError(f"geometric: dtype must be one of {', '.join(FORMATS)}, got {dtype}")
    if not 0 < p < 1:
        raise ValueError(f"geometric: p must be > 0 and < 1, got {p}")
    wide = dtype == "float64"
    e = minus_log(_word(index, wide, seed, tensor_id), wide)
    with np.errstate(all="ignore"):
        return round_to(np.maximum(np.ceil(e / e.dtype.type(geometric_rate(p))), e.dtype.type(1)), dtype)


def _rounded_integers(x: NDArray, dtype: str) -> NDArray:
    """Bit patterns of int64 as the type: through the working precision, or the low bits."""
    if dtype in INTEGER_BITS:
        bits = INTEGER_BITS[dtype]
        return x.view(_U64).astype({8: np.uint8, 16: np.uint16, 32: np.uint32, 64: _U64}[bits])
    return round_to(x.astype(np.float64 if dtype == "float64" else np.float32), dtype)


def bernoulli(
    index: ArrayLike, p: float = 0.5, *, dtype: str = "float32", seed: int = 0, tensor_id: int = 0
) -> NDArray:
    """1 with probability p, else 0."""
    if not 0 <= p <= 1:
        raise ValueError(f"bernoulli: p must be in [0, 1], got {p}")
    threshold = math.ceil(Fraction(p) * 2**32)
    below = ref.words(index, 0, seed=seed, tensor_id=tensor_id).astype(_U64) < _U64(threshold)
    return _rounded_integers(below.astype(np.int64), dtype)


def random(
    index: ArrayLike, low: int, high: int, *, dtype: str = "float32", seed: int = 0, tensor_id: int = 0
) -> NDArray:
    """Integers, uniform in [low, high)."""
    low, high = int(low), int(high)
    if not 0 < high - low < 2**64:
        raise ValueError(f"random: high - low must be in [1, 2^64), got {low} and {high}")
    words = ref._words64(index, 0, seed=seed, tensor_id=tensor_id)
    numbers = [(low + (int(w) * (high - low) >> 64)) % 2**64 for w in np.ravel(words)]
    return _rounded_integers(np.array(numbers, _U64).reshape(words.shape).view(np.int64), dtype)


DRAWS: dict[str, Callable[..., NDArray]] = {
    "uniform": ref.uniform,
    "normal": ref.normal,
    "trunc_normal": ref.trunc_normal,
    "random_bits": ref.random_bits,
    "exponential": exponential,
    "log_normal": log_normal,
    "cauchy": cauchy,
    "geometric": geometric,
    "bernoulli": bernoulli,
    "random": random,
}
