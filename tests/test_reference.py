"""reference.py: known answers, golden files, exact arithmetic and accuracy."""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]

import accuracy  # noqa: E402
import make_golden  # noqa: E402

from torch_shardinit import _exact  # noqa: E402
from torch_shardinit import reference as ref  # noqa: E402

INF = math.inf
U32, U64 = np.uint32, np.uint64

# ---- words

# Random123's kat_vectors for philox4x32 10: counter, key, result
KAT = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def plain_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 again, in Python integers and another arrangement: keys by round number, products as divmod."""
    x = list(counter)
    for n in range(10):
        high0, low0 = divmod(0xD2511F53 * x[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * x[2], 2**32)
        k = [(key[0] + n * 0x9E3779B9) % 2**32, (key[1] + n * 0xBB67AE85) % 2**32]
        x = [high1 ^ x[1] ^ k[0], low1, high0 ^ x[3] ^ k[1], low0]
    return tuple(x)


@pytest.mark.parametrize("counter, key, want", KAT)
def test_philox_known_answers(counter, key, want):
    assert tuple(int(w) for w in ref.philox4x32(counter, key)) == want
    assert plain_philox(counter, key) == want


def test_words_against_plain_integers():
    rng = np.random.default_rng(1)
    index = [0, 1, 2, 3, 4, 2**32 - 1, 2**32, 2**34 - 1, 2**34, 2**63 - 1, *rng.integers(0, 2**63, 40).tolist()]
    for n, seed in enumerate((0, 1, -1, -(2**63), 2**64 - 1, 0x123456789ABCDEF)):
        ident, plane = int(rng.integers(0, 2**64, dtype=U64)), n % 8
        got = ref.words(index, plane, seed=seed, tensor_id=ident)
        key = seed % 2**64
        for i, word in zip(index, got, strict=True):
            block = plane * 2**61 + i // 4
            counter = (block % 2**32, block >> 32, ident % 2**32, ident >> 32)
            assert int(word) == plain_philox(counter, (key % 2**32, key >> 32))[i % 4]


def test_tensor_id():
    assert ref.tensor_id("") != ref.tensor_id("", 1)
    assert ref.tensor_id("layers.0.weight") == 17802539300865993107
    assert 0 <= ref.tensor_id("é", 2**64 - 1) < 2**64


# ---- golden files


@pytest.mark.parametrize("op", list(make_golden.PARAMS))
def test_golden(op):
    lines = (make_golden.DATA / f"golden_{op}.txt").read_text().splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    assert len(lines) > 20
    for line in lines:
        name, dtype, params, seed, ident, start, count, data = make_golden.parse(line)
        got = make_golden.fill(name, dtype, params, seed, ident, start, count)
        assert make_golden.hex_bytes(got) == data.hex(), line


# ---- exact arithmetic


def rounded(x: Fraction, bits: int, emin: int, emax: int) -> float:
    """x to nearest even in integers; bits of significand, exponents emin to emax."""
    if x == 0:
        return 0.0
    mag = abs(x)
    e = mag.numerator.bit_length() - mag.denominator.bit_length()
    if mag < Fraction(2) ** e:
        e -= 1
    unit = Fraction(2) ** (max(e, emin) - bits + 1)
    k, rest = divmod(mag, unit)
    if rest * 2 > unit or (rest * 2 == unit and k % 2 == 1):
        k += 1
    sign = 1 if x > 0 else -1
    if k * unit >= Fraction(2) ** (emax + 1):
        return sign * INF
    return sign * float(k * unit)  # float is exact here


def hard_cases(real, num: int, seed: int) -> tuple[np.ndarray, ...]:
    """a, b, c with c near -a*b (cancellation), near half a unit of a*b (ties), or at random, over all exponents."""
    rng = np.random.default_rng(seed)
    bits, emin, emax = (24, -126, 127) if real is np.float32 else (53, -1022, 1023)
    out = []
    with np.errstate(all="ignore"):
        while len(out) < num:
            few = int(rng.integers(1, bits + 1))  # short significands make ties
            a, b = (
                real(np.ldexp(float(s * rng.integers(1, 2**few)), int(rng.integers(emin - bits, emax + 1) // 2) - few))
                for s in rng.choice([-1, 1], 2)
            )
            kind = len(out) % 5
            if kind == 0:
                c = -a * b * (real(1) + real(rng.integers(-2, 3) * 2.0 ** (1 - bits)))
            elif kind == 1:
                c = a * b * real(2.0 ** rng.integers(-bits - 3, bits + 4))
            elif kind == 2:  # subnormal or underflowing product
                a, b = a * real(2.0 ** (emin // 2)), b * real(2.0 ** (emin // 2))
                c = real(np.ldexp(float(rng.integers(-8, 9)), emin - bits + 1))
            elif kind == 3:  # near overflow
                a = real(np.finfo(real).max) / b if rng.random() < 0.9 else a * real(2.0 ** (emax // 2))
                c = real(np.finfo(real).max) * real(rng.choice([-1, 1]) * 2.0 ** -rng.integers(0, bits + 4))
            else:
                c = real(np.ldexp(rng.normal(), int(rng.integers(emin, emax) // 2)))
            if np.isfinite([a, b, c]).all():
                out.append((real(a), real(b), real(c)))
    return tuple(np.array(v, real) for v in zip(*out, strict=True))


@pytest.mark.parametrize("real, fma", [(np.float32, _exact.fma32), (np.float64, _exact.fma64)])
def test_fma(real, fma):
    bits, emin, emax = (24, -126, 127) if real is np.float32 else (53, -1022, 1023)
    a, b, c = hard_cases(real, 20000, 2)
    got = fma(a, b, c)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    want = np.array([rounded(x, bits, emin, emax) for x in exact])
    bad = np.nonzero(got.astype(np.float64) != want)[0]
    assert not bad.size, (len(bad), a[bad[0]], b[bad[0]], c[bad[0]], got[bad[0]], want[bad[0]])
    assert np.isinf(want).any() and (np.abs(want) < np.finfo(real).tiny).sum() > 100 and (want == 0).any()


def test_fma64_midrange_is_the_fast_path():
    """Exponents where no element goes through rational arithmetic, cancellation and ties included."""
    rng = np.random.default_rng(3)
    a, b = (rng.normal(size=20000) * 2.0 ** rng.integers(-30, 30, 20000) for _ in range(2))
    c = -a * b * (1 + rng.integers(-3, 4, 20000) * 2.0**-52) * 2.0 ** rng.choice([0, 0, -53, 53, 1], 20000)
    got = _exact.fma64(a, b, c)
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        assert r == rounded(Fraction(x) * Fraction(y) + Fraction(z), 53, -1022, 1023)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_narrow_rounding(dtype):
    """Every value of the type, every midpoint and its fp32 neighbours, against the nearest value in a plain search."""
    ebits, mbits, has_inf = _exact.FORMATS[dtype]
    width = 1 + ebits + mbits
    every = _exact.values_of(np.arange(1 << (width - 1)), dtype)
    every = every[np.isfinite(every)]
    top = every[-1] + (every[-1] - every[-2]) if has_inf else every[-1]  # where the next value would be
    grid = np.append(every, top)
    mid = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    x = np.concatenate([every.astype(np.float32), mid, *(np.nextafter(mid, np.float32(end)) for end in (0, INF))])
    k = np.searchsorted(grid, x, side="right") - 1
    k = np.minimum(k, len(grid) - 2)
    below, above = x - grid[k], grid[k + 1] - x
    want = np.where((below > above) | ((below == above) & (k % 2 == 1)), k + 1, k)
    if not has_inf:
        want = np.minimum(want, len(every) - 1)
    got = _exact.round_to(x, dtype)
    assert np.array_equal(got, want)
    assert np.array_equal(_exact.round_to(-x, dtype), got | (1 << (width - 1)))
    big = np.array([np.finfo(np.float32).max, INF], np.float32)
    want_big = INF if has_inf else 448.0
    assert (_exact.values_of(_exact.round_to(big, dtype), dtype) == want_big).all()


def test_int_conversions_round_to_even():
    w = np.array([0, 1, 2**24 + 1, 2**24 + 3, 2**31 - 1, 2**31, 2**32 - 1, 0x80000040, 0x800000C0], U32)
    want = [rounded(Fraction(int(v) - 2**32 if v >= 2**31 else int(v)), 24, -126, 127) for v in w]
    assert np.array_equal(ref._i32(w), np.array(want, np.float32))
    w64 = np.array([2**53 + 1, 2**53 + 3, 2**63 - 1, 2**63, 2**64 - 1, 2**63 + 1025, 2**64 - 1024, 2**64 - 1025], U64)
    assert w64.astype(np.float64).tolist() == [float(int(v)) for v in w64]
    assert ref._i64(w64).tolist() == [float(int(v) - 2**64 if v >= 2**63 else int(v)) for v in w64]


# ---- uniform


@pytest.mark.parametrize("dtype", list(_exact.FORMATS))
def test_uniform_range(dtype):
    index = np.arange(4096)
    for a, b in [(0.0, 1.0), (-1.0, 1.0), (1.0, 1.001), (-3e-3, 2e-3), (5.0, 6.0), (-70000.0, 1e5), (-1e-44, 1e-44)]:
        x = _exact.values_of(ref.uniform(index, a, b, dtype=dtype), dtype)
        assert (x < (b if dtype == "float64" else np.float32(b))).all()
    assert len(set(ref.uniform(index, 0.25, 0.25, dtype=dtype).tolist())) == 1


# ---- errors

ERRORS = [
    lambda: ref.words([-1], 0),
    lambda: ref.words([2**63], 0),
    lambda: ref.words([0.5], 0),
    lambda: ref.words([0], 8),
    lambda: ref.words([0], 0, seed=2**64),
    lambda: ref.words([0], 0, seed=-(2**63) - 1),
    lambda: ref.words([0], 0, tensor_id=2**64),
    lambda: ref.tensor_id("x", -1),
    lambda: ref.tensor_id("\ud800"),
    lambda: ref.random_bits([0], dtype="float32"),
    lambda: ref.uniform([0], 1, 0),
    lambda: ref.uniform([0], 0, INF),
    lambda: ref.uniform([0], -3e38, 3e38),
    lambda: ref.uniform([0], -500, -448, dtype="float8_e4m3fn"),
    lambda: ref.uniform([0], dtype="int32"),
    lambda: ref.normal([0], -1),
    lambda: ref.normal([0], 1e39),
    lambda: ref.normal([0], math.nan),
    lambda: ref.normal([0], 1, INF),
    lambda: ref.trunc_normal([0], 0),
    lambda: ref.trunc_normal([0], 1e-50),
    lambda: ref.trunc_normal([0], 1, 0, 2, 1),
    lambda: ref.trunc_normal([0], 1, 0, 12.01, 13),
    lambda: ref.trunc_normal([0], 1, 0, -INF, -12.5),
    lambda: ref.trunc_normal([0], 1, INF, 0, 1),
]


@pytest.mark.parametrize("case", ERRORS)
def test_error_value(case):
    with pytest.raises(ValueError):
        case()


# ---- accuracy; docs/stream.md section 7 has the measured worst cases


def bits32(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.integers(0, 2**32, num, dtype=U32)


def test_normal32_random_pairs():
    rng = np.random.default_rng(4)
    worst = max(accuracy.normal32_error(bits32(rng, 1 << 16), bits32(rng, 1 << 16)) for _ in range(256))
    assert worst < 7  # fp32 ulp; the contract is 8


def test_normal32_ends_and_sweeps():
    rng = np.random.default_rng(5)
    num = 1 << 17
    run = np.arange(num, dtype=np.int64)
    worst = 0.0
    for base in (0, 2**32 - num, 2**31 - num // 2, 2**30 - num // 2):
        worst = max(worst, accuracy.normal32_error((base + run).astype(U32), bits32(rng, num)))
    for low in (0, 1, 0x5555, 0x7FFF, 0x8000, 0xFFFF):
        q = ((np.arange(1 << 16, dtype=np.int64) << 16) + low).astype(U32)
        worst = max(worst, accuracy.normal32_error(bits32(rng, 1 << 16), q))
    for base in range(0, 2**32, 2**29):  # ends of s and its zero, under each sign and swap
        q = ((base - num // 2 + run) % 2**32).astype(U32)
        worst = max(worst, accuracy.normal32_error(bits32(rng, num), q))
    assert worst < 7  # fp32 ulp; the contract is 8


def test_normal64():
    rng = np.random.default_rng(6)
    run = np.arange(100, dtype=U64)
    spaced = (2.0 ** np.linspace(0, 63.9, 300)).astype(U64)
    special = np.concatenate([run, ~run, run + U64(2**63 - 50), run + U64(2**62 - 50), spaced, ~spaced])
    worst = 0.0
    for p, q in ((special, None), (None, special), (None, rng.integers(0, 2**64, 3000, dtype=U64))):
        num = len(p if p is not None else q)
        drawn = rng.integers(0, 2**64, num, dtype=U64)
        worst = max(worst, accuracy.normal64_error(drawn if p is None else p, drawn if q is None else q))
    assert worst < 5  # fp64 ulp; the contract is 8


@pytest.mark.parametrize("std, mean, a, b", accuracy.INTERVALS)
def test_trunc_normal(std, mean, a, b):
    p = ref.trunc_params(std, mean, a, b)
    assert accuracy.trunc32_error(accuracy.trunc_words(7, 1 << 12, 32).astype(U32), p).units < 8
    num_a, num_b, _, _ = accuracy.mass_at_ends(p)

    def allowed(end: float, sign: int) -> float:
        """Words within 8 units of the end, and 512 for the 24 bits of the word near probability 0 and 1."""
        z = (end - p.mean) / p.std
        unit = max(*accuracy.ulp32(np.array([end, 0.0])), p.std * accuracy.ulp32(np.float64(z)), 2.0**-24 * p.std)
        inner = min(max(end + sign * 8 * float(unit), p.a), p.b)
        return abs(accuracy.words_between(p, end, inner)) + 512

    assert num_a <= (allowed(p.a, 1) if math.isfinite(p.a) else 0)
    assert num_b <= (allowed(p.b, -1) if math.isfinite(p.b) else 0)
    _, drop = accuracy.descents32(p, 16)
    assert drop <= 8  # ulp
    p64 = ref.trunc_params(std, mean, a, b, "float64")
    assert accuracy.trunc64_error(accuracy.trunc_words(8, 12, 64), p64).units < 10


def test_trunc_normal_random_intervals():
    rng = np.random.default_rng(9)
    words32, words64 = accuracy.trunc_words(10, 64, 32).astype(U32), np.array([0, 2**40, 2**63, 2**64 - 1], U64)
    done = 0
    for _ in range(1200):
        m, h = rng.uniform(-12, 12), 10 ** rng.uniform(-7, 1)
        if rng.random() < 0.3:
            h = 0.25 / abs(m) * rng.uniform(0.9, 1.1)  # around the edge of the narrow form
        std, mean = 1.0, 0.0
        if rng.random() < 0.3:
            std, mean = 10 ** rng.uniform(-3, 3), rng.normal() * 10 ** rng.uniform(-3, 3)
        ends = (mean + std * (m - h), mean + std * (m + h))
        if m - h > 11.99 or m + h < -11.99:
            continue
        p = ref.trunc_params(std, mean, *ends)
        if p.a < p.b:
            assert accuracy.trunc32_error(words32, p).units < 8, (std, mean, *ends)
            done += 1
        units64 = accuracy.trunc64_error(words64, ref.trunc_params(std, mean, *ends, "float64")).units
        assert units64 < 16, (std, mean, *ends)  # measured 8.5, in the wide form
    assert done > 1000


def test_trunc_normal_branches_meet():
    """Around W = 5, 16, 40, c = 0 and powers of two of t, neighbouring words never go down by more than a few ulp."""
    for a, b in [(-8, 8), (-INF, INF), (5, INF), (-6, -5), (3, 4), (0.3, 7)]:
        p = ref.trunc_params(1, 0, a, b)
        centres = (2.0 ** np.linspace(0, 31, 300)).astype(np.int64)
        for centre in np.concatenate([centres, 2**32 - centres]):
            start = int(min(max(centre - 1024, 0), 2**32 - 2048))
            x = ref.trunc_normal32((start + np.arange(2048, dtype=np.int64)).astype(U32), p).astype(np.float64)
            assert (np.diff(x) >= -8 * accuracy.ulp32(x[1:])).all()
