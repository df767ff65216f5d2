"""Floating-point arithmetic on arrays, exact: round to nearest even, subnormals kept, every NaN that comes out is the
GPU's canonical one. float32 and float64 arrays in and out unless said."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

NAN: dict[np.dtype, np.ndarray] = {
    np.dtype(np.float32): np.array([0x7FFFFFFF], np.uint32).view(np.float32),
    np.dtype(np.float64): np.array([0x7FFFFFFFFFFFFFFF], np.uint64).view(np.float64),
}
_UNSIGNED = {np.dtype(np.float32): np.uint32, np.dtype(np.float64): np.uint64}
NAN16 = np.uint16(0x7FFF)  # of bf16 and f16


def canonical(x: np.ndarray) -> np.ndarray:
    nan = np.isnan(x)
    if nan.any():
        return np.where(nan, NAN[x.dtype], x)
    return x


def bits_of(x: np.ndarray) -> np.ndarray:
    return x.view(_UNSIGNED[x.dtype])


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return canonical(a + b)


def sub(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return canonical(a - b)


def mul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return canonical(a * b)


def div(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return canonical(a / b)


def rcp(a: np.ndarray) -> np.ndarray:
    return canonical(a.dtype.type(1) / a)


def sqrt(a: np.ndarray) -> np.ndarray:
    return canonical(np.sqrt(a))


def neg(a: np.ndarray) -> np.ndarray:
    return canonical(-a)


def absolute(a: np.ndarray) -> np.ndarray:
    return canonical(np.abs(a))


def copysign(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """b with the sign of a: PTX has the operands this way round."""
    unsigned = bits_of(a), bits_of(b)
    top = unsigned[0].dtype.type(1 << (8 * a.dtype.itemsize - 1))
    return ((unsigned[0] & top) | (unsigned[1] & ~top)).view(a.dtype)


def minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The other operand where one is NaN; -0 is below +0."""
    result = np.where((a < b) | np.isnan(b), a, b)
    zeros = (a == 0) & (b == 0)
    if zeros.any():
        result = np.where(zeros, (bits_of(a) | bits_of(b)).view(a.dtype), result)
    return canonical(result)


def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    result = np.where((a > b) | np.isnan(b), a, b)
    zeros = (a == 0) & (b == 0)
    if zeros.any():
        result = np.where(zeros, (bits_of(a) & bits_of(b)).view(a.dtype), result)
    return canonical(result)


# ---- fused multiply and add ---------------------------------------------------------------------------------------


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a + b rounded, and what the rounding lost (Knuth). Exact without overflow."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def round_to_odd(s: np.ndarray, error: np.ndarray) -> np.ndarray:
    """s + error (float64, |error| at most half a unit of s), rounded to odd: where inexact, the neighbour whose last
    bit is 1. Rounding that once more to fewer bits is as good as rounding once (Boldo and Melquiond, 2008)."""
    bits = s.view(np.int64)
    move = (error != 0) & ((bits & 1) == 0) & np.isfinite(s)
    if not move.any():
        return s
    away_from_zero = (error > 0) == (s > 0)
    return (bits + np.where(move, np.where(away_from_zero, 1, -1), 0)).view(np.float64)


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The product of two float32 is exact in float64, and so is the sum with its error term."""
    product = a.astype(np.float64) * b.astype(np.float64)
    return canonical(round_to_odd(*two_sum(product, c.astype(np.float64))).astype(np.float32))


def _split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x = high + low with 26 bits each at most (Dekker, Veltkamp)."""
    t = x * 134217729.0
    high = t - (t - x)
    return high, x - high


def _exponent(x: np.ndarray) -> np.ndarray:
    return ((x.view(np.uint64) >> np.uint64(52)) & np.uint64(0x7FF)).astype(np.int64) - 1023


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Error-free transforms (Boldo and Melquiond, 2008) where no intermediate can overflow or lose bits to underflow;
    rational arithmetic elsewhere."""
    a, b, c = np.broadcast_arrays(a, b, c)
    product = a * b
    high_a, low_a = _split(a)
    high_b, low_b = _split(b)
    low = ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b
    middle, middle_low = two_sum(c, low)
    top, top_low = two_sum(product, middle)
    result = top + round_to_odd(*two_sum(middle_low, top_low))

    exponent_a, exponent_b, exponent_c = _exponent(a), _exponent(b), _exponent(c)
    # A factor that is zero, infinite or NaN makes the product exact; an infinite or NaN addend decides alone.
    simple = (a == 0) | (b == 0) | (exponent_a == 1024) | (exponent_b == 1024) | (exponent_c == 1024)
    safe = (
        (np.abs(exponent_a) < 900)
        & (np.abs(exponent_b) < 900)
        & (np.abs(exponent_a + exponent_b) < 900)
        & ((np.abs(exponent_c) < 900) | (c == 0))
    )
    if simple.any():
        # Not product + c: two finite factors whose product overflows must not make infinity - infinity.
        finite_factors = (exponent_a < 1024) & (exponent_b < 1024)
        plain = np.where(finite_factors & (exponent_c == 1024), c, product + c)
        result = np.where(simple, plain, result)
    hard = ~simple & ~safe
    if hard.any():
        result = result.copy()
        for at in np.flatnonzero(hard):
            result[at] = _fma_rational(float(a[at]), float(b[at]), float(c[at]))
    return canonical(result)


def _fma_rational(a: float, b: float, c: float) -> float:
    """a, b, c finite, a and b not zero."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        # -0 only where both summands are zero with that sign, and the product is not zero.
        return 0.0
    return round_fraction(exact)


def round_fraction(x: Fraction) -> float:
    """The nearest double; infinity from half a unit above the largest."""
    try:
        return x.numerator / x.denominator  # Python's division of integers is correctly rounded, subnormals included
    except OverflowError:
        return float("inf") if x > 0 else float("-inf")


# ---- the seed of a square root -----------------------------------------------------------------------------------


def rsqrt32(x: np.ndarray) -> np.ndarray:
    """1 / sqrt(x), correctly rounded (tests/test_ptx_instructions.py checks every mantissa and exponent parity)."""
    root = np.sqrt(x.astype(np.float64))
    return canonical((1.0 / root).astype(np.float32))


def rsqrt_approx(x: np.ndarray, shift: np.ndarray, flush: bool) -> np.ndarray:
    """rsqrt.approx: up to some units off, by `shift` units here; what is exact by definition stays."""
    if flush:
        tiny = np.abs(x) < np.float32(2.0**-126)
        x = np.where(tiny, np.copysign(np.float32(0), x), x)
    result = rsqrt32(x)
    ordinary = (x > 0) & np.isfinite(x)
    moved = (result.view(np.int32) + shift.astype(np.int32)).view(np.float32)
    return np.where(ordinary, moved, result)


# ---- conversions --------------------------------------------------------------------------------------------------

ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def float_to_int(x: np.ndarray, rounding: str, dtype: np.dtype) -> np.ndarray:
    """Clamped to the type. NaN is 0, or the top bit alone where float64 or a 64-bit integer takes part."""
    info = np.iinfo(dtype)
    rounded = ROUNDINGS[rounding](x.astype(np.float64))
    above = rounded >= float(info.max) + 1.0 if info.bits < 64 else rounded >= float(info.max)
    below = rounded < float(info.min)
    nan = np.isnan(x)
    inside = np.where(above | below | nan, 0.0, rounded).astype(dtype)
    result = np.where(above, dtype.type(info.max), np.where(below, dtype.type(info.min), inside))
    if x.dtype == np.float64 or info.bits == 64:
        top = np.array([1 << (info.bits - 1)], f"u{dtype.itemsize}").view(dtype)
        result = np.where(nan, top, result)
    return result.astype(dtype)


def round_to_integral(x: np.ndarray, rounding: str) -> np.ndarray:
    return canonical(ROUNDINGS[rounding](x))


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 to the pattern of bf16, as uint16."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), NAN16, rounded.astype(np.uint16))


def from_bf16(x: np.ndarray) -> np.ndarray:
    return canonical((x.astype(np.uint32) << np.uint32(16)).view(np.float32))


def to_f16(x: np.ndarray) -> np.ndarray:
    """float32 to the pattern of f16, as uint16."""
    return np.where(np.isnan(x), NAN16, x.astype(np.float16).view(np.uint16))


def from_f16(x: np.ndarray) -> np.ndarray:
    return canonical(x.view(np.float16).astype(np.float32))
