"""Comparisons, selections, logic, shifts and bit fields."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from . import integers
from .operation import BITS, FLOATS, INTEGERS, Modifiers, Operation, same, types, unsigned_type
from .parse import IntImmediate

# ---- comparison and selection -------------------------------------------------------------------------------------

_ORDERED = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_COMBINE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def _float_comparison(name: str) -> Callable[..., np.ndarray] | None:
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name == "ne":  # ordered, unlike NumPy's
        return lambda a, b: (a < b) | (a > b)
    if name in _ORDERED:
        return _ORDERED[name]
    opposite = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}.get(name)
    if opposite is None:
        return None
    ordered = _float_comparison(opposite)
    assert ordered is not None
    return lambda a, b: ~ordered(a, b)


def _comparison(modifiers: Modifiers) -> tuple[Callable[..., np.ndarray], str | None]:
    """The function, and which way it is combined with a third source. The type is left over."""
    if len(modifiers.left) < 2:
        raise modifiers.refuse("expected a comparison and a type")
    name, type_ = modifiers.left.pop(0), modifiers.left[-1]
    combine = modifiers.take(*_COMBINE)
    function = None
    if type_ in FLOATS:
        function = _float_comparison(name)
    elif type_ in BITS:
        function = _ORDERED[name] if name in ("eq", "ne") else None
    elif type_ in types("u", 16, 32, 64):
        function = _ORDERED.get(_UNSIGNED_NAMES.get(name, name))
    elif type_ in types("s", 16, 32, 64):
        function = _ORDERED.get(name)
    if function is None:
        raise modifiers.refuse(f"there is no comparison {name} of {type_}")
    return function, combine


def _setp(modifiers: Modifiers) -> Operation:
    """Always two destinations: the comparison and its opposite, each combined with the third source."""
    compare, combine = _comparison(modifiers)
    type_ = modifiers.last(*FLOATS, *BITS, *INTEGERS)
    if combine is None:
        return Operation(("pred", "pred"), (type_, type_), lambda a, b: (compare(a, b), ~compare(a, b)))
    merge = _COMBINE[combine]

    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        result = compare(a, b)
        return merge(result, c), merge(~result, c)

    return Operation(("pred", "pred"), (type_, type_, "pred"), function)


def _set(modifiers: Modifiers) -> Operation:
    compare, combine = _comparison(modifiers)
    merge = _COMBINE[combine] if combine else None
    target = modifiers.need("u32", "s32", "f32")
    type_ = modifiers.last(*FLOATS, *BITS, *INTEGERS)
    yes, no = (np.float32(1), np.float32(0)) if target == "f32" else (np.uint32(0xFFFFFFFF), np.uint32(0))

    def function(a: np.ndarray, b: np.ndarray, *c: np.ndarray) -> np.ndarray:
        result = compare(a, b)
        return np.where(merge(result, c[0]) if merge else result, yes, no)

    return Operation(
        (unsigned_type(target) if target != "f32" else target,), (type_, type_) + ("pred",) * bool(merge), function
    )


def _selp(modifiers: Modifiers) -> Operation:
    type_ = modifiers.last(*FLOATS, *BITS, *INTEGERS)
    return Operation(
        (unsigned_type(type_),), (unsigned_type(type_), unsigned_type(type_), "pred"), lambda a, b, c: np.where(c, a, b)
    )


def _slct(modifiers: Modifiers) -> Operation:
    type_ = modifiers.need(*FLOATS, *BITS, *INTEGERS)
    judge = modifiers.last("s32", "f32")
    return Operation(
        (unsigned_type(type_),),
        (unsigned_type(type_), unsigned_type(type_), judge),
        lambda a, b, c: np.where(c >= 0, a, b),
    )


def _testp(modifiers: Modifiers) -> Operation:
    name = modifiers.need("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    type_ = modifiers.last(*FLOATS)

    def function(a: np.ndarray) -> np.ndarray:
        least_normal = np.finfo(a.dtype).tiny
        return {
            "finite": lambda: np.isfinite(a),
            "infinite": lambda: np.isinf(a),
            "number": lambda: ~np.isnan(a),
            "notanumber": lambda: np.isnan(a),
            "normal": lambda: np.isfinite(a) & ((np.abs(a) >= least_normal) | (a == 0)),  # as the ISA says
            "subnormal": lambda: (np.abs(a) < least_normal) & (a != 0),
        }[name]()

    return Operation(("pred",), (type_,), function)


# ---- bits ---------------------------------------------------------------------------------------------------------


def _logic(modifiers: Modifiers) -> Operation:
    name = modifiers.instruction.opcode
    type_ = modifiers.last("pred", *BITS)
    type_ = type_ if type_ == "pred" else unsigned_type(type_)
    return same(type_, 1, operator.invert) if name == "not" else same(type_, 2, _COMBINE[name])


def _shift(modifiers: Modifiers) -> Operation:
    if modifiers.instruction.opcode == "shl":
        type_ = unsigned_type(modifiers.last(*BITS))
        return Operation((type_,), (type_, "u32"), integers.shift_left)
    type_ = modifiers.last(*BITS, *INTEGERS)
    return Operation((type_,), (type_, "u32"), integers.shift_right)


def _shf(modifiers: Modifiers) -> Operation:
    left = modifiers.need("l", "r") == "l"
    wrap = modifiers.need("wrap", "clamp") == "wrap"
    return same(unsigned_type(modifiers.last("b32")), 3, lambda a, b, n: integers.funnel_shift(a, b, n, left, wrap))


def _bfe(modifiers: Modifiers) -> Operation:
    type_ = modifiers.last(*types("us", 32, 64))
    return Operation((type_,), (type_, "u32", "u32"), integers.bit_field_extract)


def _bfi(modifiers: Modifiers) -> Operation:
    type_ = unsigned_type(modifiers.last("b32", "b64"))
    return Operation((type_,), (type_, type_, "u32", "u32"), integers.bit_field_insert)


def _prmt(modifiers: Modifiers) -> Operation:
    return same(unsigned_type(modifiers.last("b32")), 3, integers.permute_bytes)


def _lop3(modifiers: Modifiers) -> Operation:
    modifiers.last("b32")
    operands = modifiers.instruction.operands
    table = operands[4] if len(operands) == 5 else None
    if not isinstance(table, IntImmediate) or not 0 <= table.value <= 255:
        raise modifiers.refuse("the table must be an immediate in 0..255")
    value = table.value
    return Operation(("u32",), ("u32", "u32", "u32", "u32"), lambda a, b, c, _: integers.logic3(a, b, c, value))


def _count_bits(function: Callable[..., Any]) -> Callable[[Modifiers], Operation]:
    def decode(modifiers: Modifiers) -> Operation:
        return Operation(("u32",), (unsigned_type(modifiers.last("b32", "b64")),), function)

    return decode


def _brev(modifiers: Modifiers) -> Operation:
    return same(unsigned_type(modifiers.last("b32", "b64")), 1, integers.reverse_bits)


DECODERS = {
    "setp": _setp,
    "set": _set,
    "selp": _selp,
    "slct": _slct,
    "testp": _testp,
    "and": _logic,
    "or": _logic,
    "xor": _logic,
    "not": _logic,
    "shl": _shift,
    "shr": _shift,
    "shf": _shf,
    "bfe": _bfe,
    "bfi": _bfi,
    "prmt": _prmt,
    "lop3": _lop3,
    "popc": _count_bits(integers.population_count),
    "clz": _count_bits(integers.leading_zeros),
    "brev": _brev,
}
