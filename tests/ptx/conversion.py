"""cvt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import floats, integers
from .operation import FLOATS, Modifiers, Operation, numpy_dtype, same, types

_ALL_INTEGERS = types("us", 8, 16, 32, 64)
_NARROW = {"bf16": (floats.to_bf16, floats.from_bf16), "f16": (floats.to_f16, floats.from_f16)}


def _pack(narrow: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """The first source goes into the upper half."""
    return lambda a, b: (narrow(a).astype(np.uint32) << np.uint32(16)) | narrow(b)


def _cvt(modifiers: Modifiers) -> Operation:
    rounding = modifiers.take("rn", *floats.ROUNDINGS)
    saturate = modifiers.take("sat") is not None
    target = modifiers.need(*_ALL_INTEGERS, *FLOATS, "bf16", "f16", "bf16x2", "f16x2")
    source = modifiers.last(*_ALL_INTEGERS, *FLOATS, "bf16", "f16")
    to_int, from_int = target in _ALL_INTEGERS, source in _ALL_INTEGERS

    if saturate and not (to_int and from_int):
        raise modifiers.refuse("sat is supported between integers only")
    if to_int and from_int and rounding is None:
        dtype = numpy_dtype(target)
        return Operation((target,), (source,), lambda a: integers.convert(a, dtype, saturate), wide=True)
    if to_int and source in FLOATS and rounding in floats.ROUNDINGS:
        dtype, how = numpy_dtype(target), rounding
        return Operation((target,), (source,), lambda a: floats.float_to_int(a, how, dtype), wide=True)
    if target in FLOATS and from_int and rounding == "rn":
        dtype = numpy_dtype(target)
        return Operation((target,), (source,), lambda a: a.astype(dtype), wide=True)
    if target == source and target in FLOATS and rounding in floats.ROUNDINGS:
        how = rounding
        return same(target, 1, lambda a: floats.round_to_integral(a, how))
    if (target, source, rounding) in (("f64", "f32", None), ("f32", "f64", "rn")):
        dtype = numpy_dtype(target)
        return Operation((target,), (source,), lambda a: floats.canonical(a.astype(dtype)))
    if target in _NARROW and source == "f32" and rounding == "rn":
        return Operation(("u16",), ("f32",), _NARROW[target][0])
    if target == "f32" and source in _NARROW and rounding is None:
        return Operation(("f32",), ("u16",), _NARROW[source][1])
    if target in ("bf16x2", "f16x2") and source == "f32" and rounding == "rn":
        return Operation(("u32",), ("f32", "f32"), _pack(_NARROW[target[:-2]][0]))
    raise modifiers.refuse("this conversion is not supported")


DECODERS = {
    "cvt": _cvt,
}
