"""The parts below the fills: fma without the instruction, and the transforms on words chosen for their difficulty."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from conftest import assert_bitwise_equal

from torch_shardinit import _native, reference

_CODES = {"uniform": 1, "normal": 2, "trunc_normal": 3}


def _exact_fma(a: float, b: float, c: float) -> float:
    """a*b + c rounded once: Python divides integers with correct rounding, subnormals included."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c  # the sign of an exact zero is IEEE's affair; a*b is exact here
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _same(x: float, y: float) -> bool:
    return np.float64(x).tobytes() == np.float64(y).tobytes()


def _hard_doubles(rng: np.random.Generator, count: int) -> np.ndarray:
    exponents = rng.choice([-1074, -1060, -1022, -600, -54, -53, -52, -1, 0, 1, 30, 52, 53, 500, 970], count)
    mantissas = rng.choice([0, 1, 2, 2**51, 2**52 - 1, 2**52 - 2, 2**26, 2**27 + 1], count)
    mantissas = np.where(rng.random(count) < 0.5, mantissas, rng.integers(0, 2**52, count))
    values = np.ldexp(1.0 + mantissas / 2.0**52, exponents)
    return np.where(rng.random(count) < 0.5, -values, values)


def test_soft_fma_fp64_is_exact() -> None:
    rng = np.random.default_rng(7)
    count = 60_000
    a, b, c = (_hard_doubles(rng, count) for _ in range(3))
    # Half of the addends lie near -a*b, where everything cancels.
    with np.errstate(all="ignore"):
        near = -a * b
        c[::2] = np.where(
            np.isfinite(near[::2]), np.nextafter(near[::2], rng.choice([-np.inf, np.inf], count // 2)), c[::2]
        )
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        assert _same(_native.soft_fma(x, y, z), _exact_fma(x, y, z)), (x.hex(), y.hex(), z.hex())
    specials = [0.0, -0.0, 5e-324, -5e-324, 2.0**-1022, 1.0, -1.0, 1.7976931348623157e308, -1.7976931348623157e308]
    for x, y, z in itertools.product(specials, repeat=3):
        assert _same(_native.soft_fma(x, y, z), _exact_fma(x, y, z)), (x.hex(), y.hex(), z.hex())


def test_soft_fma_fp32_is_exact() -> None:
    rng = np.random.default_rng(8)
    count = 60_000

    def floats() -> np.ndarray:
        patterns = rng.integers(0, 2**32, count, dtype=np.uint32)
        values = patterns.view(np.float32)
        return np.where(np.isfinite(values), values, np.float32(1.5)).astype(np.float32)

    a, b, c = floats(), floats(), floats()
    with np.errstate(all="ignore"):
        near = (-a.astype(np.float64) * b).astype(np.float32)
        c[::2] = np.where(np.isfinite(near[::2]), near[::2], c[::2])
        # Ties in fp32 that only a far smaller product breaks.
        a[1::4] = np.float32(2.0**-60) * rng.choice([-1, 1], count // 4)
        b[1::4] = np.float32(1.0)
        c[1::4] = np.float32(1.0) + np.float32(2.0**-23) * rng.integers(0, 3, count // 4)
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        got = _native.soft_fmaf(x, y, z)
        want = _round_to_fp32(exact) if exact else x * y + z
        assert _same(got, want), (x.hex(), y.hex(), z.hex(), got, want)


def _round_to_fp32(exact: Fraction) -> float:
    size = abs(exact)
    exponent = max(math.floor(math.log2(size)) if size >= Fraction(1, 2**1000) else -1000, -126)
    while Fraction(2) ** exponent > size and exponent > -126:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    rounded = float(round(size / unit) * unit)  # Fraction rounds half to even
    return math.copysign(math.inf if rounded >= 2.0**128 else rounded, exact)


def _words(rng: np.random.Generator, bits: int) -> np.ndarray:
    """Both ends of the range, its middle, all powers of two and their neighbours, and random ones."""
    top, span = 2**bits, 4096
    powers = [min(max(2**k + d, 0), top - 1) for k in range(bits) for d in (-2, -1, 0, 1)]
    special = [*range(span), *range(top - span, top), *range(top // 2 - span, top // 2 + span), *powers]
    random = rng.integers(0, top, 40_000, dtype=np.uint64)
    return np.concatenate([np.array(special, np.uint64), random])


@pytest.mark.parametrize("bits", [32, 64])
def test_normal_of_hard_words_equals_the_reference(isa: str, bits: int) -> None:
    rng = np.random.default_rng(9)
    p = _words(rng, bits)
    q = rng.permutation(_words(rng, bits))
    if bits == 64:
        p, q = p[::8].copy(), q[::8].copy()
    got = _native.transform(bits == 64, _CODES["normal"], [1.0, 0.0], p, q)
    pairs = reference.normal_pairs32 if bits == 32 else reference.normal_pairs64
    unsigned = np.uint32 if bits == 32 else np.uint64
    want = pairs(p.astype(unsigned), q.astype(unsigned))
    for side, values, wanted in zip(("even", "odd"), got, want, strict=True):
        result = values.astype(wanted.dtype)
        assert np.isfinite(result).all()
        assert_bitwise_equal(result.view(unsigned), wanted.view(unsigned), f"{isa} {side}")


@pytest.mark.parametrize(
    "interval", [(-2.0, 2.0), (-1.0, 0.5), (5.0, 6.0), (12.0, math.inf), (-math.inf, 8.0), (5.0, 5.001)]
)
@pytest.mark.parametrize("bits", [32, 64])
def test_trunc_normal_of_hard_words_equals_the_reference(isa: str, bits: int, interval: tuple[float, float]) -> None:
    words = _words(np.random.default_rng(10), bits)
    if bits == 64:
        words = words[::16].copy()
    unsigned = np.uint32 if bits == 32 else np.uint64
    params = reference.trunc_params(1.0, 0.0, *interval, dtype=f"float{bits}")
    transform = reference.trunc_normal32 if bits == 32 else reference.trunc_normal64
    want = transform(words.astype(unsigned), params)
    low = float(np.float32(interval[0])) if bits == 32 else interval[0]
    high = float(np.float32(interval[1])) if bits == 32 else interval[1]
    got, again = _native.transform(bits == 64, _CODES["trunc_normal"], [1.0, 0.0, low, high], words, words[::-1].copy())
    assert_bitwise_equal(got.astype(want.dtype).view(unsigned), want.view(unsigned), isa)
    assert_bitwise_equal(again[::-1].astype(want.dtype).view(unsigned), want.view(unsigned), isa)
    assert np.isfinite(want).all()
