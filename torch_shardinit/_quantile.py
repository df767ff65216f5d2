"""The normal quantile of docs/stream.md, sections 6.2 and 6.3, for reference*.py."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torch_shardinit._exact import fma64, horner32, horner64, split
from torch_shardinit._tables import AS241, K64, L64, QUANTILE_CENTRAL, QUANTILE_ROWS


def ratio32(w: NDArray) -> NDArray[np.float32]:
    """z / c of section 6.2."""
    f32 = np.float32
    h = horner32(w - f32(2.5), QUANTILE_CENTRAL)
    root = np.sqrt(np.maximum(w, f32(0)))
    lower = 5.0
    for bound, mid, table in QUANTILE_ROWS:
        here = (w >= f32(lower)) & (w < f32(bound))
        h = np.where(here, horner32(root - f32(mid), table), h)
        lower = bound
    return h


def quantile64(c: NDArray, t: NDArray) -> NDArray[np.float64]:
    """z of section 6.3."""
    central = np.abs(c) <= 0.425
    r = fma64(-c, c, 0.180625)
    middle = c * (horner64(r, AS241["A"]) / horner64(r, AS241["B"]))
    m, n = split(np.where(central, 0.25, t))
    tt = m - 2.0
    r = np.sqrt(0.5 * fma64((n + 1).astype(np.float64), K64, tt * horner64(tt, L64)))
    near, far = r - 1.6, r - 5.0
    tail = np.where(
        r <= 5,
        horner64(near, AS241["C"]) / horner64(near, AS241["D"]),
        horner64(far, AS241["E"]) / horner64(far, AS241["F"]),
    )
    return np.where(central, middle, np.where(c < 0, -tail, tail))
