"""The distributions' parameters: which there are, what must hold of them (docs/stream.md, sections 3 to 6 and 12), and
what the kernels get of them."""

from __future__ import annotations

import math
import numbers
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from . import _native

FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
DTYPE_CODES = {name: code for code, name in enumerate(FLOAT_DTYPES)}
BITS_DTYPES = {"int32": 6, "uint32": 6, "int64": 7, "uint64": 7}

# Integers as the kernels see them: by size.
INTEGER_DTYPES = {
    **BITS_DTYPES,
    **dict.fromkeys(("bool", "uint8", "int8"), 8),
    **dict.fromkeys(("uint16", "int16"), 9),
}

# Those that the kernels have themselves; lower makes the others of them.
DISTRIBUTION_CODES = {
    "fill": 0,
    "uniform": 1,
    "normal": 2,
    "trunc_normal": 3,
    "random_bits": 4,
    "exponential": 5,
    "cauchy": 6,
    "bernoulli": 7,
    "random": 8,
}
UNARY_CODES = {
    name: code
    for code, name in enumerate(
        ("add", "sub", "mul", "div", "clamp_min", "clamp_max", "neg", "exp", "log", "sqrt", "erfinv", "round_up")
    )
}
# Draws that tensors of integers can have, bool among them.
INTEGER_DRAWS = frozenset({"bernoulli", "random"})
UnaryCode = tuple[int, float]

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


def _positive(p: _Parameters, name: str, value: object) -> float:
    number = p.finite(name, value)
    if number <= 0:
        raise ValueError(f"{p.function}: {name} must be > 0, got {value!r}")
    return number


def _exponential(p: _Parameters, lambd: object) -> tuple[float, ...]:
    return (_positive(p, "lambd", lambd),)


def _log_normal(p: _Parameters, mean: object, std: object) -> tuple[float, ...]:
    return p.finite("mean", mean), _positive(p, "std", std)


def _cauchy(p: _Parameters, median: object, sigma: object) -> tuple[float, ...]:
    return p.finite("median", median), _positive(p, "sigma", sigma)


def _geometric(p: _Parameters, probability: object) -> tuple[float, ...]:
    """p stays in fp64; what must fit in the working precision is -ln(1 - p)."""
    number = real_number(probability, f"{p.function}: p")
    if not 0 < number < 1:
        raise ValueError(f"{p.function}: p must be > 0 and < 1, got {probability!r}")
    if not p.is_double and not _native.round_to_fp32(_native.geometric_rate(number)):
        raise ValueError(f"{p.function}: p must not vanish in fp32, got {probability!r}")
    return (number,)


def _bernoulli(p: _Parameters, probability: object) -> tuple[float, ...]:
    number = real_number(probability, f"{p.function}: p")
    if not 0 <= number <= 1:
        raise ValueError(f"{p.function}: p must be in [0, 1], got {probability!r}")
    return (number,)


def _random(p: _Parameters, low: object, high: object) -> tuple[float, ...]:
    bounds = []
    for name, value in (("low", low), ("high", high)):
        number = real_number(value, f"{p.function}: {name}")
        if not -(2.0**63) <= number <= 2.0**64 or number != int(number) or number != value:
            raise ValueError(
                f"{p.function}: {name} must be an integer in [-2^63, 2^64] that fp64 holds exactly, got {value!r}"
            )
        bounds.append(number)
    if not 0 < int(bounds[1]) - int(bounds[0]) < 1 << 64:
        raise ValueError(f"{p.function}: high - low must be in [1, 2^64), got low={low!r}, high={high!r}")
    if p.dtype in INTEGER_DTYPES:
        least, most = (0, 1) if p.dtype == "bool" else (int(np.iinfo(p.dtype).min), int(np.iinfo(p.dtype).max))
        if bounds[0] < least or int(bounds[1]) > most + 1:
            raise ValueError(f"{p.function}: {p.dtype} must hold [low, high), got low={low!r}, high={high!r}")
    return tuple(bounds)


_CHECKS: dict[str, Callable[..., tuple[float, ...]]] = {
    "fill": _fill,
    "uniform": _uniform,
    "normal": _normal,
    "trunc_normal": _trunc_normal,
    "exponential": _exponential,
    "log_normal": _log_normal,
    "cauchy": _cauchy,
    "geometric": _geometric,
    "bernoulli": _bernoulli,
    "random": _random,
}


_DOUBLES = [struct.Struct(f"{count}d") for count in range(5)]
_MAX_CHECKED = 4096
_checked: dict[tuple[str, str, str, bytes], tuple[float, ...]] = {}


def check_draw(distribution: str, params: tuple[object, ...], dtype: str, function: str) -> tuple[float, ...]:
    """The parameters of a fill, checked and rounded to the working precision of ``dtype``.

    Args:
        distribution: "fill" (value), "uniform" (a, b), "normal" (std, mean), "trunc_normal" (std, mean, a, b),
            "exponential" (lambd), "log_normal" (mean, std), "cauchy" (median, sigma), "geometric" (p), "bernoulli" (p),
            "random" (low, high).
        dtype: one of FLOAT_DTYPES; for INTEGER_DRAWS any of INTEGER_DTYPES too.
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


class Lowered(NamedTuple):
    """What the kernels get for a distribution: a draw of their own, and steps after it."""

    code: int
    params: tuple[float, ...]
    unary: tuple[UnaryCode, ...] = ()


def _lower_geometric(p: float) -> Lowered:
    steps = (("div", _native.geometric_rate(p)), ("round_up", 0.0), ("clamp_min", 1.0))
    return Lowered(DISTRIBUTION_CODES["exponential"], (), tuple((UNARY_CODES[op], number) for op, number in steps))


_LOWER: dict[str, Callable[..., Lowered]] = {
    "exponential": lambda lambd: Lowered(DISTRIBUTION_CODES["exponential"], (), ((UNARY_CODES["div"], lambd),)),
    "log_normal": lambda mean, std: Lowered(DISTRIBUTION_CODES["normal"], (std, mean), ((UNARY_CODES["exp"], 0.0),)),
    "cauchy": lambda median, sigma: Lowered(
        DISTRIBUTION_CODES["cauchy"], (), ((UNARY_CODES["mul"], sigma), (UNARY_CODES["add"], median))
    ),
    "geometric": _lower_geometric,
    "bernoulli": lambda p: Lowered(DISTRIBUTION_CODES["bernoulli"], (float(math.ceil(p * 2**32)),)),
}


def lower(distribution: str, params: tuple[float, ...]) -> Lowered:
    """A distribution whose params have passed check_draw, as the kernels have it (docs/stream.md, section 12)."""
    make = _LOWER.get(distribution)
    return Lowered(DISTRIBUTION_CODES[distribution], params) if make is None else make(*params)
