"""Integer arithmetic on arrays whose dtype is the instruction's type; results wrap."""

from __future__ import annotations

import numpy as np

from .errors import DivisionByZero, LaneFault


def _signed(dtype: np.dtype) -> bool:
    return dtype.kind == "i"


def unsigned_of(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"u{dtype.itemsize}")


def mul_wide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
    return a.astype(wide) * b.astype(wide)


def mul_high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of the product of twice the width."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        return (mul_wide(a, b) >> bits).astype(a.dtype)
    x, y = a.view(np.uint64), b.view(np.uint64)
    low32, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, y0, y1 = x & low32, x >> shift, y & low32, y >> shift
    middle = x1 * y0 + ((x0 * y0) >> shift)
    other = x0 * y1 + (middle & low32)
    high = x1 * y1 + (middle >> shift) + (other >> shift)
    if _signed(a.dtype):  # of the unsigned product, for each negative factor, the other factor is too much
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


def _check_divisor(b: np.ndarray) -> None:
    zero = b == 0
    if zero.any():
        raise LaneFault(DivisionByZero, "integer division by zero", int(np.argmax(zero)))


def remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of the division that rounds towards zero: the sign is the dividend's."""
    _check_divisor(b)
    return np.fmod(a, b)


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rounds towards zero; the least value by -1 wraps."""
    _check_divisor(b)
    if not _signed(a.dtype):
        return a // b
    magnitude = np.abs(a).view(unsigned_of(a.dtype)) // np.abs(b).view(unsigned_of(a.dtype))
    return np.where((a < 0) != (b < 0), -magnitude.view(a.dtype), magnitude.view(a.dtype))


def shift_left(a: np.ndarray, n: np.ndarray) -> np.ndarray:
    """n is uint32; from the width on, the result is 0."""
    bits = 8 * a.dtype.itemsize
    return np.where(n >= bits, a.dtype.type(0), a << np.minimum(n, bits - 1).astype(a.dtype))


def shift_right(a: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Of a signed type the sign moves in; from the width on nothing else is left."""
    bits = 8 * a.dtype.itemsize
    if _signed(a.dtype):
        return a >> np.minimum(n, bits - 1).astype(a.dtype)
    return np.where(n >= bits, a.dtype.type(0), a >> np.minimum(n, bits - 1).astype(a.dtype))


def funnel_shift(a: np.ndarray, b: np.ndarray, n: np.ndarray, left: bool, wrap: bool) -> np.ndarray:
    """The upper (left) or lower (right) word of b:a shifted by n."""
    n = (n & np.uint32(31) if wrap else np.minimum(n, np.uint32(32))).astype(np.uint64)
    pair = (b.astype(np.uint64) << np.uint64(32)) | a
    if left:
        return ((pair << n) >> np.uint64(32)).astype(np.uint32)
    return (pair >> n).astype(np.uint32)


def _field_mask(pos: np.ndarray, length: np.ndarray, bits: int, dtype: np.dtype) -> np.ndarray:
    """Ones from bit pos, length of them, cut at the top."""
    one = dtype.type(1)
    ones = np.where(length >= bits, ~dtype.type(0), (one << np.minimum(length, bits - 1).astype(dtype)) - one)
    return np.where(pos >= bits, dtype.type(0), ones << np.minimum(pos, bits - 1).astype(dtype))


def bit_field_extract(a: np.ndarray, pos: np.ndarray, length: np.ndarray) -> np.ndarray:
    bits = 8 * a.dtype.itemsize
    unsigned = unsigned_of(a.dtype)
    x = a.view(unsigned)
    pos, length = pos & np.uint32(0xFF), length & np.uint32(0xFF)
    ones = _field_mask(np.zeros_like(pos), np.where(pos >= bits, 0, np.minimum(length, bits - pos)), bits, unsigned)
    result = shift_right(x, pos) & ones
    if _signed(a.dtype):
        top = np.minimum(pos + length - np.uint32(1), np.uint32(bits - 1))
        sign = (shift_right(x, np.where(length == 0, 0, top)) & unsigned.type(1)) & (length > 0)
        result = np.where(sign != 0, result | ~ones, result)
    return result.view(a.dtype)


def bit_field_insert(a: np.ndarray, b: np.ndarray, pos: np.ndarray, length: np.ndarray) -> np.ndarray:
    """a's low bits into b."""
    bits = 8 * a.dtype.itemsize
    pos, length = pos & np.uint32(0xFF), length & np.uint32(0xFF)
    mask = _field_mask(pos, length, bits, a.dtype)
    return (b & ~mask) | (shift_left(a, pos) & mask)


def permute_bytes(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt without a mode: each nibble picks a byte of b:a; its top bit spreads that byte's sign instead."""
    pair = (b.astype(np.uint64) << np.uint64(32)) | a
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, selector.shape), np.uint32)
    for byte in range(4):
        nibble = (selector >> np.uint32(4 * byte)) & np.uint32(0xF)
        value = ((pair >> (np.uint64(8) * (nibble & np.uint32(7)))) & np.uint64(0xFF)).astype(np.uint32)
        spread = np.where(value & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        result |= np.where(nibble & np.uint32(8), spread, value) << np.uint32(8 * byte)
    return result


def logic3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """lop3: bit (4 a + 2 b + c) of the table."""
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), a.dtype)
    for row in range(8):
        if table >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


def population_count(a: np.ndarray) -> np.ndarray:
    return np.bitwise_count(a).astype(np.uint32)


def leading_zeros(a: np.ndarray) -> np.ndarray:
    for shift in (1, 2, 4, 8, 16, 32)[: 5 if a.dtype.itemsize == 4 else 6]:
        a = a | (a >> a.dtype.type(shift))
    return population_count(~a)


def reverse_bits(a: np.ndarray) -> np.ndarray:
    ones = ~a.dtype.type(0)
    bits = 8 * a.dtype.itemsize
    shift = bits // 2
    mask = ones
    while shift:
        mask = mask ^ (mask << a.dtype.type(shift))
        a = ((a >> a.dtype.type(shift)) & mask) | ((a << a.dtype.type(shift)) & ~mask)
        shift //= 2
    return a


def add_carry(a: np.ndarray, b: np.ndarray, carry: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a + b + carry and the carry out; unsigned arrays, carry is bool."""
    s = a + b
    total = s + carry.astype(a.dtype)
    return total, (s < a) | (total < s)


def sub_borrow(a: np.ndarray, b: np.ndarray, borrow: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a - (b + borrow) and the borrow out."""
    d = a - b
    total = d - borrow.astype(a.dtype)
    return total, (a < b) | (d < total)


def convert(a: np.ndarray, dtype: np.dtype, saturate: bool) -> np.ndarray:
    if saturate:
        source, target = np.iinfo(a.dtype), np.iinfo(dtype)
        a = np.clip(a, a.dtype.type(max(source.min, target.min)), a.dtype.type(min(source.max, target.max)))
    return a.astype(dtype)


def add_saturate(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """int32, clamped."""
    return convert(a.astype(np.int64) + b.astype(np.int64), a.dtype, True)


def sub_saturate(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return convert(a.astype(np.int64) - b.astype(np.int64), a.dtype, True)
