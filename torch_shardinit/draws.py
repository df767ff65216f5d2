"""The distributions' parameters: which there are, and what must hold of them (docs/stream.md, sections 3 to 6)."""

from __future__ import annotations

import math
import numbers
import struct
from collections.abc import Callable

import numpy as np

from . import _native

FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
DTYPE_CODES = {name: code for code, name in enumerate(FLOAT_DTYPES)}
BITS_DTYPES = {"int32": 6, "uint32": 6, "int64": 7, "uint64": 7}

DISTRIBUTION_CODES = {"fill": 0, "uniform": 1, "normal": 2, "trunc_normal": 3, "random_bits": 4}

# Beyond this many standard deviations from the mean an interval's probability leaves no digits to draw from.
_MAX_SIGMA = 12.0


def real_number(value: object, what: str) -> float:
    """``value`` as a float: Python and NumPy real numbers count, bools, strings and tensors do not."""
    if type(value) is float:
        return value
    refused = (bool, np.bool_, np.timedelta64)  # NumPy counts a duration among its integers
    if isinstance(value, refused) or not isinstance(value, (numbers.Real, np.integer, np.floating)):
        raise TypeError(f"{what} must be a real number, got {value!r} ({type(value).__name__})")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{what} must fit in a float, got an int beyond its range") from None


class _Parameters:
    """Reads parameters in a tensor's working precision: fp64 for fp64, else fp32.

    The rounding is the native module's, since NumPy's follows the caller's rounding and flush-to-zero modes.
    """

    def __init__(self, function: str, dtype: str) -> None:
        self.function = function
        self.dtype = dtype
        self.is_double = dtype == "float64"

    def read(self, name: str, value: object) -> float:
        what = f"{self.function}: {name}"
        number = real_number(value, what)
        if math.isnan(number):
            raise ValueError(f"{what} must not be NaN")
        if self.is_double:
            return number
        rounded = _native.round_to_fp32(number)
        if math.isinf(rounded) and not math.isinf(number):
            raise ValueError(f"{what} must fit in fp32, got {number!r}")
        return rounded

    def finite(self, name: str, value: object) -> float:
        number = self.read(name, value)
        if math.isinf(number):
            raise ValueError(f"{self.function}: {name} must be finite, got {number!r}")
        return number

    def width(self, a: float, b: float) -> float:
        return b - a if self.is_double else _native.round_to_fp32(b - a)


def _fill(p: _Parameters, value: object) -> tuple[float, ...]:
    """A constant is no draw: infinities and NaN are values like others, and out of range rounds to infinity."""
    number = real_number(value, f"{p.function}: value")
    return (number if p.is_double else _native.round_to_fp32(number),)


def _uniform(p: _Parameters, a: object, b: object) -> tuple[float, ...]:
    low, high = p.finite("a", a), p.finite("b", b)
    if low > high:
        raise ValueError(f"{p.function}: a must be <= b, got a={low!r}, b={high!r}")
    if math.isinf(p.width(low, high)):
        kind = "fp64" if p.is_double else "fp32"
        raise ValueError(f"{p.function}: b - a must be finite in {kind}, got a={low!r}, b={high!r}")
    if low < high and not _native.has_value_below(DTYPE_CODES[p.dtype], high):
        raise ValueError(f"{p.function}: {p.dtype} must have a value below b, got b={high!r}")
    return low, high


def _std(p: _Parameters, std: object, least: str) -> float:
    number = p.read("std", std)
    if math.isinf(number) or number < 0 or (least == "> 0" and number == 0):
        raise ValueError(f"{p.function}: std must be finite and {least}, got {std!r}")
    return number


def _normal(p: _Parameters, std: object, mean: object) -> tuple[float, ...]:
    return _std(p, std, ">= 0"), p.finite("mean", mean)


def _trunc_normal(p: _Parameters, std: object, mean: object, a: object, b: object) -> tuple[float, ...]:
    scale, center = _std(p, std, "> 0"), p.finite("mean", mean)
    low, high = p.read("a", a), p.read("b", b)
    if low > high:
        raise ValueError(f"{p.function}: a must be <= b, got a={low!r}, b={high!r}")
    nearest = max((low - center) / scale, (center - high) / scale)
    if nearest > _MAX_SIGMA:
        raise ValueError(
            f"{p.function}: [a, b] must come within {_MAX_SIGMA:g} std of the mean, "
            f"got [{low!r}, {high!r}] with mean={center!r}, std={scale!r}"
        )
    return scale, center, low, high


_CHECKS: dict[str, Callable[..., tuple[float, ...]]] = {
    "fill": _fill,
    "uniform": _uniform,
    "normal": _normal,
    "trunc_normal": _trunc_normal,
}


_DOUBLES = [struct.Struct(f"{count}d") for count in range(5)]
_MAX_CHECKED = 4096
_checked: dict[tuple[str, str, str, bytes], tuple[float, ...]] = {}


def check_draw(distribution: str, params: tuple[object, ...], dtype: str, function: str) -> tuple[float, ...]:
    """The parameters of a fill, checked and rounded to the working precision of ``dtype``.

    Args:
        distribution: "fill" (value), "uniform" (a, b), "normal" (std, mean), "trunc_normal" (std, mean, a, b).
        dtype: one of FLOAT_DTYPES.
        function: what the caller is called, for messages.

    Raises:
        TypeError, ValueError: a parameter is not what docs/stream.md asks for; the message says what must hold and
            what came.
    """
    # Models and loops of raw fills use few distinct parameters. Keyed by their bits, which tell -0.0 from 0.0.
    for value in params:
        if type(value) is not float:
            return _CHECKS[distribution](_Parameters(function, dtype), *params)
    key = distribution, dtype, function, _DOUBLES[len(params)].pack(*params)
    found = _checked.get(key)
    if found is None:
        found = _CHECKS[distribution](_Parameters(function, dtype), *params)
        if len(_checked) >= _MAX_CHECKED:
            _checked.clear()
        _checked[key] = found
    return found
