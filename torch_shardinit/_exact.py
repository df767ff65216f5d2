"""Exactly rounded arithmetic for reference.py, in NumPy and Python numbers: fma, frexp, rounding to narrow types."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

# name: (exponent bits, mantissa bits, has an infinity); docs/stream.md section 2
FORMATS: dict[str, tuple[int, int, bool]] = {
    "float64": (11, 52, True),
    "float32": (8, 23, True),
    "float16": (5, 10, True),
    "bfloat16": (8, 7, True),
    "float8_e4m3fn": (4, 3, False),
    "float8_e5m2": (5, 2, True),
}


def _two_sum(a: NDArray, b: NDArray) -> tuple[NDArray, NDArray]:
    """Knuth's TwoSum: s = RN(a + b) and a + b - s, exact unless s overflows (addition never underflows)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _to_odd(s: NDArray, e: NDArray) -> NDArray:
    """s + e rounded to odd, where s = RN(s + e).

    If s is even and e not 0, the exact sum lies between s and its neighbour on e's side, and that one is odd.
    """
    bits = np.atleast_1d(s).view(np.int64)
    step = np.where((e > 0) == (s > 0), 1, -1)  # bit patterns grow with the magnitude
    inexact = (e > 0) | (e < 0)  # False for the NaN that an infinite s leaves
    return (bits + np.where(inexact & ((bits & 1) == 0), step, 0)).view(np.float64).reshape(np.shape(s))


def fma32(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> NDArray[np.float32]:
    """a*b + c of fp32 operands, rounded once to fp32.

    The product has 48 bits and an exponent in [-298, 256), so it is exact in fp64 and nothing below is subnormal
    there. The sum is rounded to odd at 53 bits; as 53 >= 24 + 2, rounding that to 24 bits, or to the fewer of a
    subnormal, equals rounding the exact sum (Boldo and Melquiond, IEEE Trans. Computers 57(4), 2008).
    """
    with np.errstate(all="ignore"):
        product = _as64(a) * _as64(b)
        s, e = _two_sum(*np.broadcast_arrays(product, _as64(c)))
        return np.asarray(_to_odd(s, e)).astype(np.float32)


def _as64(x: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(x, np.float32).astype(np.float64)


def _fma_exact(a: float, b: float, c: float) -> float:
    """One fma by rational arithmetic; int / int in Python is correctly rounded, subnormals included."""
    if not (np.isfinite(a) and np.isfinite(b) and np.isfinite(c)) or a == 0 or b == 0:
        return float(np.float64(a) * np.float64(b) + np.float64(c))  # the product is exact, or the result not finite
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    try:
        return float(exact)  # an exact zero by cancellation is +0, as it must be
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def fma64(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> NDArray[np.float64]:
    """a*b + c of fp64 operands, rounded once to fp64.

    Boldo and Melquiond's emulation (same paper, fma from TwoProduct, two TwoSums and one addition rounded to odd),
    proved where nothing over- or underflows. That holds for a, b in [2^-200, 2^200] and c in [2^-400, 2^400] or 0:
    all terms are multiples of 2^-504. Everything else goes through rational arithmetic, one element at a time.
    """
    with np.errstate(all="ignore"):
        a, b, c = np.broadcast_arrays(*(np.asarray(v, np.float64) for v in (a, b, c)))
        uh, ul = _two_product(a, b)
        th, tl = _two_sum(c, ul)
        vh, vl = _two_sum(uh, th)
        out = np.array(vh + _to_odd(*_two_sum(tl, vl)))
        out = np.where((a == 0) | (b == 0), a * b + c, out)
        safe = _within(a, 200) & _within(b, 200) & (_within(c, 400) | (c == 0)) | (a == 0) | (b == 0)
        for at in zip(*np.nonzero(np.atleast_1d(~safe)), strict=True):
            one = (float(np.atleast_1d(v)[at]) for v in (a, b, c))
            np.atleast_1d(out)[at] = _fma_exact(*one)
    return out


def _within(x: NDArray, e: int) -> NDArray[np.bool_]:
    return (np.abs(x) >= 2.0**-e) & (np.abs(x) <= 2.0**e)


def _two_product(a: NDArray, b: NDArray) -> tuple[NDArray, NDArray]:
    """Dekker's product with Veltkamp's split: RN(a*b) and the exact rest."""
    ah, bh = (v * 134217729.0 - (v * 134217729.0 - v) for v in (a, b))  # 2^27 + 1
    al, bl = a - ah, b - bh
    p = a * b
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def horner32(x: NDArray, coefficients: ArrayLike) -> NDArray[np.float32]:
    """horner(x; c) of docs/stream.md; c[0] belongs to the lowest power."""
    c = np.asarray(coefficients, np.float32)
    r = np.full(np.shape(x), c[-1], np.float32)
    for ck in c[-2::-1]:
        r = fma32(r, x, ck)
    return r


def horner64(x: NDArray, coefficients: ArrayLike) -> NDArray[np.float64]:
    c = np.asarray(coefficients, np.float64)
    r = np.full(np.shape(x), c[-1], np.float64)
    for ck in c[-2::-1]:
        r = fma64(r, x, ck)
    return r


def split(x: NDArray) -> tuple[NDArray, NDArray]:
    """x = m * 2^n with 1 <= m < 2, in x's type."""
    m, n = np.frexp(x)
    return m * x.dtype.type(2), n.astype(np.int64) - 1


def round_to(x: NDArray, dtype: str) -> NDArray:
    """Bit patterns of x (fp32, or fp64 where dtype is float64) rounded to nearest even.

    With the exponent e held at emin or above, x is k units of 2^(e - mantissa bits) and its pattern is
    (e - emin) * 2^(mantissa bits) + k: subnormals need no case, and a k rounded up to the next power of two carries.
    """
    ebits, mbits, has_inf = FORMATS[dtype]
    if dtype == "float64":
        return np.asarray(x, np.float64).view(np.uint64)
    if dtype == "float32":
        return np.asarray(x, np.float32).view(np.uint32)
    x = np.asarray(x, np.float32).astype(np.float64)
    emin = 2 - (1 << (ebits - 1))
    finite = np.where(np.isfinite(x), np.abs(x), 0.0)
    e = np.where(finite > 0, np.maximum(np.frexp(finite)[1] - 1, emin), emin)  # frexp gives a zero the exponent 0
    k = np.rint(np.ldexp(finite, mbits - e)).astype(np.int64)  # scaling is exact, rint takes ties to even
    largest = ((1 << ebits) - 1) << mbits if has_inf else (1 << (ebits + mbits)) - 2
    bits = np.minimum(((e - emin).astype(np.int64) << mbits) + k, largest)
    bits = np.where(np.isfinite(x), bits, largest)
    bits = np.where(np.isnan(x), (1 << (ebits + mbits)) - 1, bits)  # never reached by a fill
    bits = bits + (np.signbit(x).astype(np.int64) << (ebits + mbits))
    return bits.astype(np.uint8 if ebits + mbits == 7 else np.uint16)


def values_of(bits: ArrayLike, dtype: str) -> NDArray[np.float64]:
    """The real values of bit patterns."""
    ebits, mbits, has_inf = FORMATS[dtype]
    if dtype in ("float64", "float32"):
        wide = np.asarray(bits, np.uint64 if dtype == "float64" else np.uint32)
        return wide.view(dtype).astype(np.float64)
    b = np.asarray(bits).astype(np.int64)
    magnitude, mantissa = b & ((1 << (ebits + mbits)) - 1), b & ((1 << mbits) - 1)
    exponent = magnitude >> mbits
    implicit = np.where(exponent > 0, 1 << mbits, 0)
    x = np.ldexp((mantissa + implicit).astype(np.float64), np.maximum(exponent, 1) + 1 - (1 << (ebits - 1)) - mbits)
    if has_inf:
        x = np.where(exponent == (1 << ebits) - 1, np.where(mantissa == 0, np.inf, np.nan), x)
    else:
        x = np.where(magnitude == (1 << (ebits + mbits)) - 1, np.nan, x)
    return np.where((b >> (ebits + mbits)) & 1 == 1, -x, x)


def below(b: float, dtype: str) -> float | None:
    """The largest value of the type below b, -inf included; None where there is none. Zero is +0."""
    if dtype == "float64":
        return float(np.nextafter(np.float64(b), np.float64(-np.inf)))
    if dtype == "float32":
        return float(np.nextafter(np.float32(b), np.float32(-np.inf)))
    ebits, mbits, _ = FORMATS[dtype]
    every = values_of(np.arange(1 << (1 + ebits + mbits)), dtype)
    smaller = every[every < b]
    return float(smaller.max()) + 0.0 if smaller.size else None  # -0 + 0 is +0
