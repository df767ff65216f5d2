"""The tables Q0 and (M, Q) of docs/stream.md, section 6.2. Run: python tools/fit_quantile.py (needs numpy, mpmath).

With t the nearer tail's probability, W = -ln(4 t (1 - t)) and c = probability - 1/2, the normal quantile is
z = c * F(W), F smooth: a polynomial in W near the middle, in sqrt(W) outside (the idea is Giles, "Approximating the
erfinv function", GPU Computing Gems 2011, which divides by x = 2c in the same way). Fits are relative minimax, by
Lawson's reweighted least squares at Chebyshev nodes; coefficients are rounded to fp32 one at a time, lowest power
first, the rest being fitted again after each. float64 and long double steps limit how exactly this repeats on another
machine: where long double is not 80 bits wide, last digits may differ.
"""

from __future__ import annotations

import mpmath as mp
import numpy as np
from numpy.typing import NDArray

LD = np.longdouble
NUM_NODES = 400


def quotient(w: mp.mpf) -> mp.mpf:
    """z / c at W = w. 1 - u = (1 - 2t)^2 with u = exp(-w), and 2|c| = sqrt(1 - u)."""
    u = mp.e ** (-mp.mpf(w))
    s = mp.sqrt(-mp.expm1(-mp.mpf(w)))
    t = u / (2 * (1 + s))  # (1 - s) / 2 without its cancellation
    return 2 * mp.sqrt(2) * mp.erfinv(1 - 2 * t) / s


def nodes(low: mp.mpf, high: mp.mpf) -> list[mp.mpf]:
    return [
        (mp.mpf(low) + high) / 2 + (mp.mpf(high) - low) / 2 * mp.cos(mp.pi * (i + mp.mpf(1) / 2) / NUM_NODES)
        for i in range(NUM_NODES)
    ]


def lawson(
    x: NDArray[LD], y: NDArray[LD], num: int, fixed: list[LD], weight: NDArray[LD], num_iterations: int = 80
) -> list[LD]:
    """Minimax coefficients fixed[0], ..., then free ones up to num in all."""
    k = len(fixed)
    scale = np.max(np.abs(x))
    rest = y - sum((LD(c) * x**i for i, c in enumerate(fixed)), LD(0) * x)
    basis = np.stack([(x / scale) ** i for i in range(k, num)], 1) * weight[:, None]
    target = rest * weight
    lam = np.ones(len(x)) / len(x)
    best_error, best = np.inf, LD(0) * np.zeros(num - k, LD)
    for _ in range(num_iterations):
        root = np.sqrt(lam)
        scaled = basis * root[:, None]
        c, residual = LD(0) * np.zeros(num - k, LD), target.copy()
        for _ in range(3):  # lstsq works in float64: iterative refinement in long double
            step, *_rest = np.linalg.lstsq(scaled.astype(float), (residual * root).astype(float), rcond=None)
            c = c + step.astype(LD)
            residual = target - basis @ c
        error = np.abs(residual).astype(float)
        if error.max() < best_error:
            best_error, best = error.max(), c.copy()
        lam = lam * (error / error.max() + 1e-9)
        lam /= lam.sum()
    return [LD(v) for v in fixed] + [best[i] / LD(scale) ** (i + k) for i in range(num - k)]


def short_hex(x: float) -> str:
    """float.hex without trailing zeros, as docs/stream.md writes constants."""
    digits, exponent = float(x).hex().split("p")
    return f"{digits.rstrip('0').rstrip('.')}p{exponent}"


def fit(low: int, high: int, num: int, of_root: bool) -> None:
    """Print the centre and num coefficients for W in [low, high]."""
    low_x, high_x = (mp.sqrt(low), mp.sqrt(high)) if of_root else (mp.mpf(low), mp.mpf(high))
    centre = np.float32((low_x + high_x) / 2)
    at = nodes(low_x, high_x)
    y = np.array([LD(mp.nstr(quotient(v * v if of_root else v), 30)) for v in at])
    x = np.array([LD(mp.nstr(v - mp.mpf(float(centre)), 30)) for v in at])
    fixed: list[LD] = []
    while len(fixed) < num:
        fixed.append(LD(np.float32(lawson(x, y, num, fixed, 1 / np.abs(y))[len(fixed)])))
    error = float(np.max(np.abs(sum(c * x**i for i, c in enumerate(fixed)) / y - 1)))
    name = "sqrt(W)" if of_root else "W"
    print(f"W in [{low}, {high}], powers of {name} - {short_hex(centre)}, log2 relative error {np.log2(error):.2f}")
    print("   ", " ".join(short_hex(v) for v in fixed), flush=True)


def main() -> None:
    mp.mp.dps = 90
    fit(0, 5, 9, False)
    for low, high, num in ((5, 16, 9), (16, 40, 8), (40, 100, 8)):
        fit(low, high, num, True)


if __name__ == "__main__":
    main()
