"""The stream of docs/stream.md, written from that page alone, in NumPy and Python numbers.

Slow and plain: this is what the golden vectors come from and what the C++ and CUDA fills are compared with. It shares
no code with csrc/. Fills return bit patterns (unsigned integers of the type's width), so that equal means bytes.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_shardinit._exact import FORMATS, below, fma32, fma64, horner32, horner64, round_to, split
from torch_shardinit._quantile import quantile64, ratio32
from torch_shardinit._tables import C32, C64, K32, K64, L32, L64, LN2, S32, S64

_U32 = np.uint32
_MASK = 0xFFFFFFFF


# ---- 1. words


def philox4x32(counter: tuple[ArrayLike, ...], key: tuple[int, int]) -> tuple[NDArray[np.uint32], ...]:
    """Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC'11) of four uint32 arrays and a key of two words."""
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = (int(k) for k in key)
    low, shift = np.uint64(_MASK), np.uint64(32)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & low, (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0.astype(_U32), c1.astype(_U32), c2.astype(_U32), c3.astype(_U32)


def tensor_id(name: str, draw: int = 0) -> int:
    """The u64 id of a tensor's name, and of its draw-th temporary."""
    if not 0 <= draw < 2**64:
        raise ValueError(f"tensor_id: draw must be in [0, 2^64), got {draw}")
    try:
        raw = name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("tensor_id: name has no UTF-8 form") from error
    digest = hashlib.sha256(b"torch_shardinit stream 1\0" + draw.to_bytes(8, "little") + raw).digest()
    return int.from_bytes(digest[:8], "little")


def _indices(index: ArrayLike) -> NDArray[np.uint64]:
    i = np.asarray(index)
    if i.size == 0:
        return np.zeros(i.shape, np.uint64)
    if i.dtype.kind not in "iu" and not (i.dtype == object and all(type(v) is int for v in i.flat)):
        raise ValueError(f"index: must be integers, got {i.dtype}")
    if i.min() < 0 or i.max() >= 2**63:
        raise ValueError("index: must be in [0, 2^63)")
    return i.astype(np.uint64)


def words(index: ArrayLike, plane: int, *, seed: int = 0, tensor_id: int = 0) -> NDArray[np.uint32]:
    """word(i, plane) for every index i."""
    i = _indices(index)
    if not 0 <= plane < 8:
        raise ValueError(f"words: plane must be in [0, 8), got {plane}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed: must be in [-2^63, 2^64), got {seed}")
    if not 0 <= tensor_id < 2**64:
        raise ValueError(f"tensor_id: must be in [0, 2^64), got {tensor_id}")
    key = seed % 2**64
    block = np.uint64(plane << 61) + (i >> np.uint64(2))
    ident = [np.full(i.shape, half, np.uint64) for half in (tensor_id & _MASK, tensor_id >> 32)]
    out = philox4x32((block & np.uint64(_MASK), block >> np.uint64(32), *ident), (key & _MASK, key >> 32))
    return np.choose((i & np.uint64(3)).astype(np.intp), out)


def _words64(index: ArrayLike, plane: int, *, seed: int, tensor_id: int) -> NDArray[np.uint64]:
    high, low = (words(index, p, seed=seed, tensor_id=tensor_id).astype(np.uint64) for p in (plane, plane + 1))
    return (high << np.uint64(32)) | low


# ---- 2. parameters


def _params(op: str, dtype: str, **values: float) -> list[float]:
    """The parameters in working precision, -0 made +0."""
    if dtype not in FORMATS:
        raise ValueError(f"{op}: dtype must be one of {', '.join(FORMATS)}, got {dtype}")
    out = []
    for name, value in values.items():
        x = float(value)
        if math.isnan(x):
            raise ValueError(f"{op}: {name} must not be NaN")
        if dtype != "float64":
            with np.errstate(over="ignore", under="ignore"):
                r = float(np.float32(x))
            if math.isinf(r) and not math.isinf(x):
                raise ValueError(f"{op}: {name} must be within fp32, got {x}")
            x = r
        out.append(x + 0.0)
    return out


def _finite(op: str, **values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"{op}: {name} must be finite, got {value}")


# ---- 3, 4. random_bits and uniform


def random_bits(index: ArrayLike, *, dtype: str = "uint32", seed: int = 0, tensor_id: int = 0) -> NDArray:
    """Raw words: uint32 for int32 and uint32, uint64 for int64 and uint64."""
    if dtype not in ("int32", "uint32", "int64", "uint64"):
        raise ValueError(f"random_bits: dtype must be int32, uint32, int64 or uint64, got {dtype}")
    draw = words if dtype.endswith("32") else _words64
    return draw(index, 0, seed=seed, tensor_id=tensor_id)


def uniform(
    index: ArrayLike, a: float = 0.0, b: float = 1.0, *, dtype: str = "float32", seed: int = 0, tensor_id: int = 0
) -> NDArray:
    """Uniform on [a, b)."""
    a, b = _params("uniform", dtype, a=a, b=b)
    _finite("uniform", a=a, b=b)
    if a > b:
        raise ValueError(f"uniform: a must be <= b, got {a} and {b}")
    real = np.float64 if dtype == "float64" else np.float32
    with np.errstate(over="ignore"):
        d = real(b) - real(a)
    _finite("uniform", **{"b - a": float(d)})
    top = below(b, dtype)
    if top is None and a < b:
        raise ValueError(f"uniform: {dtype} has no value below b, got {b}")
    value: NDArray
    if dtype == "float64":
        u64 = (_words64(index, 0, seed=seed, tensor_id=tensor_id) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        value = fma64(u64, d, a)
    else:
        u32 = (words(index, 0, seed=seed, tensor_id=tensor_id) >> _U32(8)).astype(np.float32) * np.float32(2.0**-24)
        value = fma32(u32, d, a)
    if a < b:
        value = np.where(value > real(top), real(top), value)
    return round_to(value, dtype)


# ---- 5. normal


def _i32(w: ArrayLike) -> NDArray[np.float32]:
    """float(int32(w)), through fp64, where every int32 is exact."""
    return np.asarray(w, _U32).view(np.int32).astype(np.float64).astype(np.float32)


def _i64(w: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(w, np.uint64).view(np.int64).astype(np.float64)


def normal_pairs32(p: ArrayLike, q: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(z of element 2j, z of element 2j+1), fp32, for words p and q."""
    f32 = np.float32
    p, q = np.asarray(p, _U32), np.asarray(q, _U32)
    w = fma32(_i32(p), 2.0**-31, 2.0**-32)
    top = (p >> _U32(31)) == 1
    m, n = split(np.where(top, f32(1), w))
    t = np.where(top, w, m - f32(2))
    n = np.where(top, 0, n)
    r = np.sqrt(fma32(n.astype(f32), K32, t * horner32(t, L32)))
    a = _i32(q << _U32(2)) * f32(2.0**-31)
    x = a * a
    s = horner32(x, S32) * a
    c = horner32(x, C32)
    c = np.where((q >> _U32(31)) == 1, -c, c)
    swap = ((q >> _U32(30)) & _U32(1)) == 1
    return np.where(swap, r * s, r * c), np.where(swap, r * c, r * s)


def normal_pairs64(p: ArrayLike, q: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(z of element 2j, z of element 2j+1), fp64, for 64-bit words p and q."""
    u64 = np.uint64
    p, q = np.asarray(p, u64), np.asarray(q, u64)
    w = fma64(_i64(p), 2.0**-63, 2.0**-64)
    top = (p >> u64(63)) == 1
    m, n = split(np.where(top, 1.0, w))
    t = np.where(top, w, m - 2.0)
    n = np.where(top, 0, n)
    r = np.sqrt(fma64(n.astype(np.float64), K64, t * horner64(t, L64)))
    a = _i64(q << u64(2)) * 2.0**-63
    x = a * a
    s = horner64(x, S64) * a
    c = horner64(x, C64)
    c = np.where((q >> u64(63)) == 1, -c, c)
    swap = ((q >> u64(62)) & u64(1)) == 1
    return np.where(swap, r * s, r * c), np.where(swap, r * c, r * s)


def normal(
    index: ArrayLike, std: float = 1.0, mean: float = 0.0, *, dtype: str = "float32", seed: int = 0, tensor_id: int = 0
) -> NDArray:
    """Normal with the given standard deviation and mean."""
    std, mean = _params("normal", dtype, std=std, mean=mean)
    _finite("normal", std=std, mean=mean)
    if std < 0:
        raise ValueError(f"normal: std must be >= 0, got {std}")
    i = _indices(index)
    even = i & ~np.uint64(1)
    draw, pairs, fma = (_words64, normal_pairs64, fma64) if dtype == "float64" else (words, normal_pairs32, fma32)
    p, q = (draw(e, 2, seed=seed, tensor_id=tensor_id) for e in (even, even + np.uint64(1)))
    z = np.where((i & np.uint64(1)) == 0, *pairs(p, q))
    return round_to(fma(z, std, mean), dtype)


# ---- 6. trunc_normal


def _exp_neg(y: float) -> float:
    n = math.floor(y * float.fromhex("0x1.71547652b82fep+0") + 0.5)
    r = (y - n * float.fromhex("0x1.62e42feep-1")) - n * float.fromhex("0x1.a39ef35793c76p-33")
    s = 1.0
    for k in range(17, 0, -1):
        s = 1.0 - s * (r / k)
    return s * 2.0**-n


def _tail(x: float) -> float:
    """P(Z > x), x >= 0: the series of phi * (x + x^3/3 + x^5/15 + ...) below 1, the continued fraction above."""
    if x > 37:
        return 0.0
    phi = _exp_neg(x * x * 0.5) * float.fromhex("0x1.9884533d43651p-2")
    if x < 1:
        s = t = x
        for k in range(1, 41):
            t = t * (x * x) / (2 * k + 1)
            s = s + t
        return 0.5 - phi * s
    f = x
    for k in range(400 if x < 2 else 100, 0, -1):
        f = x + k / f
    return phi / f


@dataclass(frozen=True)
class TruncParams:
    """What section 6.1 computes once a fill; already rounded to the working precision."""

    std: float
    mean: float
    a: float
    b: float
    d: float
    narrow: bool = False
    center: float = 0.0
    width: float = 0.0
    y: tuple[float, ...] = ()
    dp: float = 0.0
    cm: float = 0.0
    plo: float = 0.0
    qhi: float = 0.0
    dt: float = 0.0
    k: int = 0


def _narrow(m: float, h: float) -> tuple[float, float, list[float]]:
    """center, width and Y: the inverse of G(s), the integral of exp(-(A s + B s^2)), as a Taylor series."""
    a, b = m * h, h * h * 0.5
    g = [1.0, -a]
    for k in range(2, 40):
        g.append(-(a * g[k - 1] + 2 * b * g[k - 2]) / k)
    gp = gm = 0.0
    for k in range(39, -1, -1):
        t = g[k] / (k + 1)
        gp = gp + t
        gm = gm - t if k % 2 == 0 else gm + t
    u, s, v = [1.0], [0.0], []
    for k in range(31):
        s.append(u[k] / (k + 1))
        vk = c = 0.0
        for j in range(k + 1):
            vk = vk + u[j] * u[k - j]
        v.append(vk)
        for j in range(k + 1):
            c = c + s[j] * v[k - j]
        u.append((a * v[k] + 2 * b * c) / (k + 1))
    s.append(u[31] / 32)
    return (gp + gm) * 0.5, gp - gm, [s[k + 1] * 0.5 for k in range(32)]


def trunc_params(std: float, mean: float, a: float, b: float, dtype: str = "float32") -> TruncParams:
    """Check the parameters of trunc_normal and prepare them for trunc_normal32 (fp64: trunc_normal64)."""
    std, mean, a, b = _params("trunc_normal", dtype, std=std, mean=mean, a=a, b=b)
    _finite("trunc_normal", std=std, mean=mean)
    if std <= 0:
        raise ValueError(f"trunc_normal: std must be > 0, got {std}")
    if a > b:
        raise ValueError(f"trunc_normal: a must be <= b, got {a} and {b}")
    with np.errstate(all="ignore"):  # numpy scalars: a division that overflows is infinite, and no exception
        alpha, beta = (float((np.float64(x) - np.float64(mean)) / np.float64(std)) for x in (a, b))
    if alpha > 12 or beta < -12:
        raise ValueError(f"trunc_normal: [a, b] must come within 12 std of mean, got [{a}, {b}]")
    double = dtype == "float64"

    def cast(x: float) -> float:
        return x if double else float(np.float32(x))

    with np.errstate(all="ignore"):
        d = b - a if double else float(np.float32(b) - np.float32(a))
    m, h = (alpha + beta) * 0.5, (beta - alpha) * 0.5
    if h <= 0.125 and abs(m) * h <= 0.25:
        center, width, y = _narrow(m, h)
        return TruncParams(std, mean, a, b, d, True, cast(center), cast(width), tuple(cast(c) for c in y))
    tail_a, tail_b = _tail(abs(alpha)), _tail(abs(beta))
    pa = tail_a if alpha <= 0 else 1 - tail_a
    qb = tail_b if beta >= 0 else 1 - tail_b
    if alpha > 0:
        dp, nearest = tail_a - tail_b, tail_a
    elif beta < 0:
        dp, nearest = tail_b - tail_a, tail_b
    else:
        dp, nearest = (0.5 - tail_a) + (0.5 - tail_b), 0.5
    k = 64 if nearest < 2.0**-20 and not double else 0
    dp, cm, plo, qhi, dt = (cast(x) for x in (dp, (pa - qb) * 0.5, pa * 2.0**k, qb * 2.0**k, dp * 2.0**k))
    return TruncParams(std, mean, a, b, d, dp=dp, cm=cm, plo=plo, qhi=qhi, dt=dt, k=k)


def _clamp(value: NDArray, p: TruncParams) -> NDArray:
    a, b = value.dtype.type(p.a), value.dtype.type(p.b)
    value = np.where(value > a, value, a)  # so that -0 becomes an a of +0
    return np.where(value > b, b, value)


def trunc_normal32(w: ArrayLike, p: TruncParams) -> NDArray[np.float32]:
    """fp32 values for words w."""
    f32 = np.float32
    w = np.asarray(w, _U32)
    if p.a == p.b:
        return np.full(w.shape, p.a, f32)
    vc = fma32(_i32(w ^ _U32(0x80000000)), 2.0**-32, 2.0**-33)
    if p.narrow:
        tau = fma32(vc, p.width, p.center)
        return _clamp(fma32(fma32(tau, horner32(tau, p.y[:12]), 0.5), p.d, p.a), p)
    c = fma32(vc, p.dp, p.cm)
    low = c < 0
    u = fma32(np.where(low, w, ~w).astype(np.float64).astype(f32), 2.0**-32, 2.0**-33)
    t = fma32(u, p.dt, np.where(low, f32(p.plo), f32(p.qhi)))
    t4 = f32(4) * t
    m, n = split(fma32(-t4, t * f32(2.0**-p.k), t4))
    tt = m - f32(2)
    big_w = fma32((n + 1 - p.k).astype(f32), -LN2, f32(0.5) * (tt * horner32(tt, L32)))
    return _clamp(fma32(c * ratio32(big_w), p.std, p.mean), p)


def trunc_normal64(w: ArrayLike, p: TruncParams) -> NDArray[np.float64]:
    """fp64 values for 64-bit words w."""
    w = np.asarray(w, np.uint64)
    if p.a == p.b:
        return np.full(w.shape, p.a)
    vc = fma64(_i64(w ^ np.uint64(1 << 63)), 2.0**-64, 2.0**-65)
    if p.narrow:
        tau = fma64(vc, p.width, p.center)
        return _clamp(fma64(fma64(tau, horner64(tau, p.y), 0.5), p.d, p.a), p)
    c = fma64(vc, p.dp, p.cm)
    low = c < 0
    u = fma64(np.where(low, w, ~w).astype(np.float64), 2.0**-64, 2.0**-65)
    z = quantile64(c, fma64(u, p.dp, np.where(low, p.plo, p.qhi)))
    return _clamp(fma64(z, p.std, p.mean), p)


def trunc_normal(
    index: ArrayLike, std: float = 1.0, mean: float = 0.0, a: float = -2.0, b: float = 2.0, *,
    dtype: str = "float32", seed: int = 0, tensor_id: int = 0,
) -> NDArray:  # fmt: skip
    """Normal conditioned on [a, b], by the quantile of one word."""
    params = trunc_params(std, mean, a, b, dtype)
    if dtype == "float64":
        return round_to(trunc_normal64(_words64(index, 0, seed=seed, tensor_id=tensor_id), params), dtype)
    return round_to(trunc_normal32(words(index, 0, seed=seed, tensor_id=tensor_id), params), dtype)


# ---- 10. digests

_DIGEST_KEY = (0x65676964, 0x31207473)  # "dige", "st 1"


def digest_mix(index: ArrayLike, word: ArrayLike) -> NDArray[np.uint32]:
    """The four words that each word of a tensor adds to its sum: shape (words, 4)."""
    j, x = np.asarray(index, np.uint64).ravel(), np.asarray(word, np.uint64).ravel()
    mask, shift, mul = np.uint64(_MASK), np.uint64(32), np.uint64(0xD256D193)
    zero = np.zeros(j.shape, np.uint64)
    keys = [k.astype(np.uint64) for k in philox4x32((j >> shift, zero, zero, zero), _DIGEST_KEY)]
    product = (j & mask) * mul
    chain = [(product >> shift) ^ x ^ keys[0]]
    for r in range(1, 7):
        low = product & mask
        product = chain[-1] * mul
        chain.append((product >> shift) ^ low ^ keys[r % 4])
    return np.stack(chain[3:], axis=1).astype(_U32)


def digest_sum(data: bytes, size: int, index: ArrayLike) -> bytes:
    """The sum of elements of `size` bytes, little-endian, whose global indices are `index`: 16 bytes."""
    elements = np.frombuffer(data, f"<u{min(size, 4)}").astype(np.uint64)
    width = max(size // 4, 1)
    i = np.repeat(np.asarray(index, np.uint64).ravel(), width)
    j = i * np.uint64(width) + np.tile(np.arange(width, dtype=np.uint64), i.size // width)
    return digest_mix(j, elements).sum(axis=0, dtype=np.uint32).astype("<u4").tobytes()


def tensor_digest(dtype: str, shape: tuple[int, ...], total: bytes) -> str:
    """The digest of a whole tensor, 32 hex digits, from its sum."""
    text = f"torch_shardinit digest 1\0{dtype}\0{','.join(map(str, shape))}\0".encode()
    return hashlib.sha256(text + total).hexdigest()[:32]


def combined_digest(tensors: dict[str, str]) -> str:
    """The digest of named tensors, 32 hex digits, from theirs."""
    state = hashlib.sha256(b"torch_shardinit digest 1 of tensors\0")
    for name in sorted(tensors):
        raw = name.encode("utf-8")
        state.update(len(raw).to_bytes(8, "little") + raw + bytes.fromhex(tensors[name]))
    return state.hexdigest()[:32]
