"""Errors of reference.py against the exact transforms.

`python -m tests.accuracy`, in the repository root, prints the trunc_normal table of docs/stream.md, section 7.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import mpmath
import numpy as np
from numpy.typing import NDArray

from torch_shardinit import reference as ref

INF = math.inf
# std, mean, a, b of trunc_normal
INTERVALS = [
    (1, 0, *ab)
    for ab in [
        (-2, 2), (-3, 3), (-1, 0.5), (0, 2), (-8, 8), (3, 4), (5, 6), (-6, -5), (5, 5.001), (0.5, 0.5001),
        (1, 1.000001), (8, 9), (12, 12.5), (-0.001, 0.001), (5, INF), (-INF, 0.5), (12, INF), (-INF, INF), (7.9, 8.1),
        (0, INF), (-1.8, -0.3), (0.3, 7), (-0.125, 0.125), (1.9, 2.15), (4.7, 4.8), (4.7, INF), (-5, -4.76),
        (11.98, 12), (2, 2.25), (-0.3, 9), (-9, 0.01), (1.5, 1.76), (-12, 12.5), (0.001, 0.0011),
        (-1e-6, 0.2499), (-20, -11.9),
    ]
] + [(0.02, 0, -2, 2), (0.02, 0, -0.04, 0.04), (0.5, 1, 0, 3), (3, -2, -10, 1), (1e-3, 100, 99.999, 100.002),
     (1e20, 1e20, 0, 3e20), (7, 0.1, 30, 31)]  # fmt: skip


def ulp(x: NDArray[np.float64], bits: int, emin: int) -> NDArray[np.float64]:
    return np.ldexp(1.0, np.maximum(np.frexp(np.abs(x))[1] - 1, emin) + 1 - bits)


def ulp32(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return ulp(x, 24, -126)


# ---- normal


def exact_normal32(p: NDArray[np.uint32], q: NDArray[np.uint32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The real formula in fp64 (libm errs by about 1 fp64 ulp, 2^-29 of an fp32 one)."""
    v = p.astype(np.float64)
    upper = p >= 1 << 31
    log = np.where(upper, np.log1p(np.where(upper, v - 2.0**32 + 0.5, 0.0) * 2.0**-32), np.log((v + 0.5) * 2.0**-32))
    r = np.sqrt(-2 * log)
    low = (q & np.uint32(0x3FFFFFFF)).astype(np.int64)
    angle = math.pi * np.where(low >= 1 << 29, low - (1 << 30), low).astype(np.float64) / 2.0**31
    x = r * np.cos(angle) * np.where(q >> np.uint32(31), -1.0, 1.0)
    y = r * np.sin(angle)
    swap = (q >> np.uint32(30)) & np.uint32(1) == 1
    return np.where(swap, y, x), np.where(swap, x, y)


def normal32_error(p: NDArray[np.uint32], q: NDArray[np.uint32]) -> float:
    """Largest error in fp32 ulp of the exact value; an exact 0 must be a 0."""
    worst = 0.0
    for got, want in zip(ref.normal_pairs32(p, q), exact_normal32(p, q), strict=True):
        worst = max(worst, float((np.abs(got - want) / ulp32(want)).max()))
    return worst


def exact_normal64(p: int, q: int) -> tuple[mpmath.mpf, mpmath.mpf]:
    r = mpmath.sqrt(-2 * mpmath.log((mpmath.mpf(p) + mpmath.mpf(1) / 2) / 2**64))
    s = q & (2**62 - 1)
    angle = mpmath.pi * (s - 2**62 if s >= 2**61 else s) / mpmath.mpf(2) ** 63
    pair = (r * mpmath.cos(angle) * (-1 if q >> 63 else 1), r * mpmath.sin(angle))
    return pair[::-1] if (q >> 62) & 1 else pair


def mp_ulp64(x: mpmath.mpf) -> mpmath.mpf:
    return mpmath.mpf(2) ** (max(int(mpmath.frexp(x)[1]) - 1, -1022) - 52) if x else mpmath.mpf(2) ** -1074


def normal64_error(p: NDArray[np.uint64], q: NDArray[np.uint64]) -> float:
    worst = 0.0
    got = ref.normal_pairs64(p, q)
    with mpmath.workdps(50):
        for k in range(len(p)):
            for z, want in zip((got[0][k], got[1][k]), exact_normal64(int(p[k]), int(q[k])), strict=True):
                worst = max(worst, float(abs(mpmath.mpf(float(z)) - want) / mp_ulp64(want)))
    return worst


# ---- trunc_normal


def exact_trunc32(w: NDArray[np.uint32], p: ref.TruncParams) -> NDArray[np.float64]:
    """The quantile in fp64: NormalDist.inv_cdf, then one Newton step on libm's erfc, in the nearer tail.

    Its error is below 1e-15 relative in z, plus 1e-16 in an interval's probability.
    """
    alpha, beta = (p.a - p.mean) / p.std, (p.b - p.mean) / p.std
    r2 = math.sqrt(0.5)
    if alpha > 0:
        mass = 0.5 * (math.erfc(alpha * r2) - math.erfc(beta * r2))
    elif beta < 0:
        mass = 0.5 * (math.erfc(-beta * r2) - math.erfc(-alpha * r2))
    else:
        mass = 0.5 * (math.erf(beta * r2) + math.erf(-alpha * r2))
    low, high = 0.5 * math.erfc(-alpha * r2), 0.5 * math.erfc(beta * r2)  # below a, above b
    v = (w.astype(np.float64) + 0.5) * 2.0**-32
    below = low + v * mass
    above = high + (1 - v) * mass
    side = np.where(below < above, 1.0, -1.0)  # z -> side * z puts the nearer tail below
    inverse = NormalDist().inv_cdf
    z = np.empty(len(w))
    for k, t in enumerate(np.minimum(below, above).tolist()):
        x = inverse(t)
        z[k] = x - (0.5 * math.erfc(-x * r2) - t) * math.sqrt(2 * math.pi) * math.exp(0.5 * x * x)
    return np.clip(side * z * p.std + p.mean, p.a, p.b)


def trunc_words(seed: int, num: int, bits: int) -> NDArray[np.uint64]:
    """Random words, both ends, the middle, and words log-spaced from both ends."""
    rng = np.random.default_rng(seed)
    top = 2**bits - 1
    spaced = (2.0 ** np.linspace(0, bits - 1, num)).astype(np.uint64)
    end = np.arange(num, dtype=np.uint64)
    parts = [rng.integers(0, top, 4 * num, np.uint64, endpoint=True), end, np.uint64(top) - end, spaced,
             np.uint64(top) - spaced, np.uint64(top // 2 - num // 2) + end]  # fmt: skip
    return np.concatenate(parts)


@dataclass
class TruncError:
    """Largest errors: in ulp where |x| > 0.01 std; in std elsewhere; and over all, in the unit that the bound is in:
    the largest of ulp(x), std * ulp(z) and 2^-24 std (fp64: 2^-53 std), z being the standardised quantile.

    ulp(x) alone can't bound it: where x is near 0 but not at the quantile's own zero (mean != 0, a > 0), or where the
    interval isn't symmetric, the word's 24 bits are the limit, and they are worth 2^-24 of a probability.
    """

    ulps: float = 0.0
    near: float = 0.0
    units: float = 0.0


def trunc32_error(w: NDArray[np.uint32], p: ref.TruncParams) -> TruncError:
    want = exact_trunc32(w, p)
    err = np.abs(ref.trunc_normal32(w, p) - want)
    assert not np.isnan(err).any()
    far = np.abs(want) > 0.01 * p.std
    unit = np.maximum(np.maximum(ulp32(want), p.std * ulp32((want - p.mean) / p.std)), 2.0**-24 * p.std)
    return TruncError(
        float((err / ulp32(want))[far].max(initial=0.0)),
        float(err[~far].max(initial=0.0)) / p.std,
        float((err / unit).max()),
    )


def exact_trunc64(w: int, p: ref.TruncParams, start: float) -> mpmath.mpf:
    """The quantile by Newton's method in mpmath from a nearby value."""
    mp = mpmath.mpf
    alpha, beta = ((mp(x) - mp(p.mean)) / mp(p.std) for x in (p.a, p.b))
    upper = alpha + beta > 0 if math.isfinite(p.a) and math.isfinite(p.b) else p.b == INF
    # P(Z > x) is small-relative only on the right: mirror the left
    sign = 1 if upper else -1
    near, far = (alpha, beta) if upper else (-beta, -alpha)
    v = (mp(w) + mp(1) / 2) / 2**64

    def tail(x: mpmath.mpf) -> mpmath.mpf:
        return mpmath.erfc(x / mpmath.sqrt(2)) / 2

    target = tail(far) + (1 - v if upper else v) * (tail(near) - tail(far))
    z = sign * (mp(start) - mp(p.mean)) / mp(p.std)
    for _ in range(8):
        step = (tail(z) - target) * mpmath.sqrt(2 * mpmath.pi) * mpmath.exp(z * z / 2)
        z += step
        if abs(step) < mp(10) ** -25:  # Newton: the next one is its square
            break
    return mp(p.mean) + mp(p.std) * sign * z


def trunc64_error(w: NDArray[np.uint64], p: ref.TruncParams) -> TruncError:
    got = ref.trunc_normal64(w, p)
    out = TruncError()
    with mpmath.workdps(60):
        for k in range(len(w)):
            want = exact_trunc64(int(w[k]), p, float(got[k]))
            err = abs(mpmath.mpf(float(got[k])) - want)
            if abs(want) > 0.01 * p.std:
                out.ulps = max(out.ulps, float(err / mp_ulp64(want)))
            else:
                out.near = max(out.near, float(err / p.std))
            unit = max(mp_ulp64(want), p.std * mp_ulp64((want - p.mean) / p.std), mpmath.mpf(2) ** -53 * p.std)
            out.units = max(out.units, float(err / unit))
    return out


def words_between(p: ref.TruncParams, x: float | mpmath.mpf, y: float | mpmath.mpf) -> float:
    """How many of the 2^32 words the exact quantile takes into [x, y]."""
    with mpmath.workdps(50):
        mp = mpmath.mpf

        def mass(x: mpmath.mpf, y: mpmath.mpf) -> mpmath.mpf:
            x, y = ((mp(t) - mp(p.mean)) / mp(p.std) / mpmath.sqrt(2) for t in (x, y))
            return mpmath.erfc(x) - mpmath.erfc(y)

        return float(mass(x, y) / mass(p.a, p.b) * 2**32)


def mass_at_ends(p: ref.TruncParams) -> tuple[int, int, float, float]:
    """Numbers of words of 2^32 that give exactly a and b, and those of the exact quantile rounded to fp32.

    Counted by bisection, which monotone ends justify.
    """
    f32 = np.float32

    def count(is_end: Callable[[int], bool]) -> int:
        low, high = 0, 2**32
        while low < high:
            mid = (low + high) // 2
            low, high = (mid + 1, high) if is_end(mid) else (low, mid)
        return low

    def at(w: int) -> float:
        return float(ref.trunc_normal32(np.array([w], np.uint32), p)[0])

    num_a = count(lambda k: at(k) <= p.a)
    num_b = count(lambda k: at(2**32 - 1 - k) >= p.b)
    inner_a = (mpmath.mpf(p.a) + mpmath.mpf(float(np.nextafter(f32(p.a), f32(INF))))) / 2
    inner_b = (mpmath.mpf(p.b) + mpmath.mpf(float(np.nextafter(f32(p.b), f32(-INF))))) / 2
    want_a = words_between(p, p.a, inner_a) if math.isfinite(p.a) else 0.0
    want_b = words_between(p, inner_b, p.b) if math.isfinite(p.b) else 0.0
    return num_a, num_b, want_a, want_b


def descents32(p: ref.TruncParams, num_windows: int = 64, width: int = 4096) -> tuple[int, float]:
    """Decreasing steps between neighbouring words, in windows over the whole range, and the largest in ulp."""
    num, worst = 0, 0.0
    for start in np.linspace(0, 2**32 - width, num_windows).astype(np.uint64):
        x = ref.trunc_normal32((start + np.arange(width, dtype=np.uint64)).astype(np.uint32), p).astype(np.float64)
        step = np.diff(x)
        num += int((step < 0).sum())
        worst = max(worst, float((-step / ulp32(x[1:])).max(initial=0.0)))
    return num, worst


def main() -> None:
    print("| std, mean, a, b | form | fp32 units | ulp, x > 0.01 std | std, elsewhere | at a (exact) | at b (exact) "
          "| descents, ulp | fp64 units | ulp | std |")  # fmt: skip
    for std, mean, a, b in INTERVALS:
        p32, p64 = ref.trunc_params(std, mean, a, b), ref.trunc_params(std, mean, a, b, "float64")
        e32 = trunc32_error(trunc_words(1, 1 << 14, 32).astype(np.uint32), p32)
        e64 = trunc64_error(trunc_words(2, 60, 64), p64)
        na, nb, wa, wb = mass_at_ends(p32)
        num, drop = descents32(p32)
        form = "narrow" if p32.narrow else "wide"
        cells = [
            f"{std:g}, {mean:g}, {a:.7g}, {b:.7g}", form, f"{e32.units:.2f}", f"{e32.ulps:.2f}", f"{e32.near:.1e}",
            f"{na} ({wa:.0f})", f"{nb} ({wb:.0f})", f"{num}, {drop:.0f}",
            f"{e64.units:.2f}", f"{e64.ulps:.2f}", f"{e64.near:.1e}",
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
