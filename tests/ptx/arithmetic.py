"""Arithmetic: what add, mul, fma and their like mean with each modifier and type."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from . import floats, integers
from .operation import FLOATS, INTEGERS, Modifiers, Operation, numpy_dtype, same, types, unsigned_type


def _rounded(modifiers: Modifiers) -> None:
    if modifiers.left and modifiers.left[0] in FLOATS:
        raise modifiers.refuse("without .rn ptxas may fuse it, so its result is not known")
    modifiers.need("rn")


def _sum(modifiers: Modifiers) -> Operation:
    name = modifiers.instruction.opcode
    plain, saturating, with_carry, of_floats = {
        "add": (operator.add, integers.add_saturate, integers.add_carry, floats.add),
        "sub": (operator.sub, integers.sub_saturate, integers.sub_borrow, floats.sub),
    }[name]
    if modifiers.left and modifiers.left[-1] in FLOATS:
        _rounded(modifiers)
        return same(modifiers.last(*FLOATS), 2, of_floats)
    if modifiers.take("sat"):
        return same(modifiers.last("s32"), 2, saturating)
    if modifiers.take("cc"):
        type_ = unsigned_type(modifiers.last(*types("us", 32, 64)))
        return same(type_, 2, lambda a, b: with_carry(a, b, np.zeros(1, bool)), carry_out=True)
    return same(unsigned_type(modifiers.last(*INTEGERS)), 2, plain)


def _sum_with_carry(modifiers: Modifiers) -> Operation:
    with_carry = integers.add_carry if modifiers.instruction.opcode == "addc" else integers.sub_borrow
    writes = modifiers.take("cc") is not None
    type_ = unsigned_type(modifiers.last(*types("us", 32, 64)))
    function = with_carry if writes else lambda a, b, carry: with_carry(a, b, carry)[0]
    return same(type_, 2, function, carry_in=True, carry_out=writes)


def _mul(modifiers: Modifiers) -> Operation:
    if modifiers.left and modifiers.left[-1] in FLOATS:
        _rounded(modifiers)
        return same(modifiers.last(*FLOATS), 2, floats.mul)
    half = modifiers.need("lo", "hi", "wide")
    if half == "wide":
        type_ = modifiers.last(*types("us", 16, 32))
        return Operation((_twice(type_),), (type_, type_), integers.mul_wide)
    type_ = modifiers.last(*INTEGERS)
    return same(unsigned_type(type_), 2, operator.mul) if half == "lo" else same(type_, 2, integers.mul_high)


def _twice(type_: str) -> str:
    return f"{type_[0]}{2 * int(type_[1:])}"


def _mad(modifiers: Modifiers) -> Operation:
    """mad, madc: a product's half plus a number, with or without carries."""
    carry_in = modifiers.instruction.opcode == "madc"
    if modifiers.left and modifiers.left[-1] in FLOATS:
        raise modifiers.refuse("only fma.rn is of one meaning")
    half = modifiers.need("lo", "hi") if carry_in else modifiers.need("lo", "hi", "wide")
    if half == "wide":
        type_ = modifiers.last(*types("us", 16, 32))
        return Operation((_twice(type_),), (type_, type_, _twice(type_)), lambda a, b, c: integers.mul_wide(a, b) + c)
    carry_out = modifiers.take("cc") is not None
    with_carry = carry_in or carry_out
    type_ = modifiers.last(*(types("us", 32, 64) if with_carry else INTEGERS))
    multiply = operator.mul if half == "lo" else integers.mul_high
    unsigned = integers.unsigned_of(numpy_dtype(type_))

    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray, carry: np.ndarray | None = None) -> Any:
        product = multiply(a, b).view(unsigned)
        if not with_carry:
            return product + c
        result = integers.add_carry(product, c, np.zeros(1, bool) if carry is None else carry)
        return result if carry_out else result[0]

    return Operation(
        (unsigned_type(type_),), (type_, type_, unsigned_type(type_)), function, carry_in=carry_in, carry_out=carry_out
    )


def _fma(modifiers: Modifiers) -> Operation:
    modifiers.need("rn")
    type_ = modifiers.last(*FLOATS)
    return same(type_, 3, floats.fma32 if type_ == "f32" else floats.fma64)


def _div(modifiers: Modifiers) -> Operation:
    if modifiers.left and modifiers.left[-1] in FLOATS:
        modifiers.need("rn")
        return same(modifiers.last(*FLOATS), 2, floats.div)
    return same(modifiers.last(*INTEGERS), 2, integers.divide)


def _rem(modifiers: Modifiers) -> Operation:
    return same(modifiers.last(*INTEGERS), 2, integers.remainder)


def _rounded_unary(function: Callable[..., Any]) -> Callable[[Modifiers], Operation]:
    def decode(modifiers: Modifiers) -> Operation:
        modifiers.need("rn")
        return same(modifiers.last(*FLOATS), 1, function)

    return decode


def _rsqrt(modifiers: Modifiers) -> Operation:
    modifiers.need("approx")
    flush = modifiers.take("ftz") is not None
    type_ = modifiers.last("f32")
    return same(type_, 1, lambda x, shift: floats.rsqrt_approx(x, shift, flush), seeded=True)


def _min_max(modifiers: Modifiers) -> Operation:
    name = modifiers.instruction.opcode
    type_ = modifiers.last(*FLOATS, *INTEGERS)
    if type_ in FLOATS:
        return same(type_, 2, floats.minimum if name == "min" else floats.maximum)
    return same(type_, 2, np.minimum if name == "min" else np.maximum)


def _neg_abs(modifiers: Modifiers) -> Operation:
    name = modifiers.instruction.opcode
    type_ = modifiers.last(*FLOATS, *types("s", 16, 32, 64))
    if type_ in FLOATS:
        return same(type_, 1, floats.neg if name == "neg" else floats.absolute)
    return same(type_, 1, np.negative if name == "neg" else np.abs)


def _copysign(modifiers: Modifiers) -> Operation:
    return same(modifiers.last(*FLOATS), 2, floats.copysign)


DECODERS = {
    "add": _sum,
    "sub": _sum,
    "addc": _sum_with_carry,
    "subc": _sum_with_carry,
    "mul": _mul,
    "mad": _mad,
    "madc": _mad,
    "fma": _fma,
    "div": _div,
    "rem": _rem,
    "sqrt": _rounded_unary(floats.sqrt),
    "rcp": _rounded_unary(floats.rcp),
    "rsqrt": _rsqrt,
    "min": _min_max,
    "max": _min_max,
    "neg": _neg_abs,
    "abs": _neg_abs,
    "copysign": _copysign,
}
