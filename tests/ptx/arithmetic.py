"""Which operation an opcode with its modifiers and types is. What is not listed here is refused, never skipped."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import floats, integers
from .errors import UnsupportedInstruction
from .parse import Instruction, IntImmediate


@dataclass(frozen=True)
class Operation:
    """function takes one array per source and returns one per destination (a tuple where there are several).

    Arrays have the dtype of their type and the shape (threads,), or (1,) for a value that all threads share.
    wide: registers may be wider than the type, as conversions allow. carry_in, carry_out: the condition code is one
    more source or destination. seeded: one more source, the units by which rsqrt.approx is off.
    """

    destinations: tuple[str, ...]
    sources: tuple[str, ...]
    function: Callable[..., Any]
    wide: bool = False
    carry_in: bool = False
    carry_out: bool = False
    seeded: bool = False


class Modifiers:
    """Reads an instruction's modifiers from the left; each must be taken by somebody."""

    def __init__(self, instruction: Instruction) -> None:
        self.instruction = instruction
        self.left = list(instruction.modifiers)

    def refuse(self, why: str) -> UnsupportedInstruction:
        return UnsupportedInstruction(f"{'.'.join((self.instruction.opcode, *self.instruction.modifiers))}: {why}")

    def take(self, *names: str) -> str | None:
        if self.left and self.left[0] in names:
            return self.left.pop(0)
        return None

    def need(self, *names: str) -> str:
        found = self.take(*names)
        if found is None:
            raise self.refuse(f"expected one of {', '.join(names)}, got {self.left[0] if self.left else 'nothing'}")
        return found

    def last(self, *names: str) -> str:
        found = self.need(*names)
        self.end()
        return found

    def end(self) -> None:
        if self.left:
            raise self.refuse(f"modifier {self.left[0]} is not supported here")


def _types(kinds: str, *widths: int) -> tuple[str, ...]:
    return tuple(f"{kind}{width}" for kind in kinds for width in widths)


_INTEGERS = _types("us", 16, 32, 64)
_FLOATS = ("f32", "f64")
_BITS = _types("b", 16, 32, 64)


@functools.cache
def numpy_dtype(type_: str) -> np.dtype:
    if type_ == "pred":
        return np.dtype(bool)
    kind = {"u": "u", "b": "u", "s": "i", "f": "f"}[type_[0]]
    return np.dtype(f"{kind}{int(type_[1:]) // 8}")


def _same(type_: str, count: int, function: Callable[..., Any], **flags: bool) -> Operation:
    return Operation((type_,), (type_,) * count, function, **flags)


def _bits(type_: str) -> str:
    """The unsigned type of the same width: wrapping arithmetic does not see signs."""
    return "u" + type_[1:]


def _rounded(modifiers: Modifiers) -> None:
    if modifiers.left and modifiers.left[0] in _FLOATS:
        raise modifiers.refuse("without .rn ptxas may fuse it, so its result is not known")
    modifiers.need("rn")


# ---- arithmetic ---------------------------------------------------------------------------------------------------


def _sum(modifiers: Modifiers) -> Operation:
    name = modifiers.instruction.opcode
    plain, saturating, with_carry, of_floats = {
        "add": (operator.add, integers.add_saturate, integers.add_carry, floats.add),
        "sub": (operator.sub, integers.sub_saturate, integers.sub_borrow, floats.sub),
    }[name]
    if modifiers.left and modifiers.left[-1] in _FLOATS:
        _rounded(modifiers)
        return _same(modifiers.last(*_FLOATS), 2, of_floats)
    if modifiers.take("sat"):
        return _same(modifiers.last("s32"), 2, saturating)
    if modifiers.take("cc"):
        type_ = _bits(modifiers.last(*_types("us", 32, 64)))
        return _same(type_, 2, lambda a, b: with_carry(a, b, np.zeros(1, bool)), carry_out=True)
    return _same(_bits(modifiers.last(*_INTEGERS)), 2, plain)


def _sum_with_carry(modifiers: Modifiers) -> Operation:
    with_carry = integers.add_carry if modifiers.instruction.opcode == "addc" else integers.sub_borrow
    writes = modifiers.take("cc") is not None
    type_ = _bits(modifiers.last(*_types("us", 32, 64)))
    function = with_carry if writes else lambda a, b, carry: with_carry(a, b, carry)[0]
    return _same(type_, 2, function, carry_in=True, carry_out=writes)


def _mul(modifiers: Modifiers) -> Operation:
    if modifiers.left and modifiers.left[-1] in _FLOATS:
        _rounded(modifiers)
        return _same(modifiers.last(*_FLOATS), 2, floats.mul)
    half = modifiers.need("lo", "hi", "wide")
    if half == "wide":
        type_ = modifiers.last(*_types("us", 16, 32))
        return Operation((_twice(type_),), (type_, type_), integers.mul_wide)
    type_ = modifiers.last(*_INTEGERS)
    return _same(_bits(type_), 2, operator.mul) if half == "lo" else _same(type_, 2, integers.mul_high)


def _twice(type_: str) -> str:
    return f"{type_[0]}{2 * int(type_[1:])}"


def _mad(modifiers: Modifiers) -> Operation:
    """mad, madc: a product's half plus a number, with or without carries."""
    carry_in = modifiers.instruction.opcode == "madc"
    if modifiers.left and modifiers.left[-1] in _FLOATS:
        raise modifiers.refuse("only fma.rn is of one meaning")
    half = modifiers.need("lo", "hi") if carry_in else modifiers.need("lo", "hi", "wide")
    if half == "wide":
        type_ = modifiers.last(*_types("us", 16, 32))
        return Operation((_twice(type_),), (type_, type_, _twice(type_)), lambda a, b, c: integers.mul_wide(a, b) + c)
    carry_out = modifiers.take("cc") is not None
    with_carry = carry_in or carry_out
    type_ = modifiers.last(*(_types("us", 32, 64) if with_carry else _INTEGERS))
    multiply = operator.mul if half == "lo" else integers.mul_high
    unsigned = integers.unsigned_of(numpy_dtype(type_))

    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray, carry: np.ndarray | None = None) -> Any:
        product = multiply(a, b).view(unsigned)
        if not with_carry:
            return product + c
        result = integers.add_carry(product, c, np.zeros(1, bool) if carry is None else carry)
        return result if carry_out else result[0]

    return Operation((_bits(type_),), (type_, type_, _bits(type_)), function, carry_in=carry_in, carry_out=carry_out)


def _fma(modifiers: Modifiers) -> Operation:
    modifiers.need("rn")
    type_ = modifiers.last(*_FLOATS)
    return _same(type_, 3, floats.fma32 if type_ == "f32" else floats.fma64)


def _div(modifiers: Modifiers) -> Operation:
    if modifiers.left and modifiers.left[-1] in _FLOATS:
        modifiers.need("rn")
        return _same(modifiers.last(*_FLOATS), 2, floats.div)
    return _same(modifiers.last(*_INTEGERS), 2, integers.divide)


def _rem(modifiers: Modifiers) -> Operation:
    return _same(modifiers.last(*_INTEGERS), 2, integers.remainder)


def _rounded_unary(function: Callable[..., Any]) -> Callable[[Modifiers], Operation]:
    def decode(modifiers: Modifiers) -> Operation:
        modifiers.need("rn")
        return _same(modifiers.last(*_FLOATS), 1, function)

    return decode


def _rsqrt(modifiers: Modifiers) -> Operation:
    modifiers.need("approx")
    flush = modifiers.take("ftz") is not None
    type_ = modifiers.last("f32")
    return _same(type_, 1, lambda x, shift: floats.rsqrt_approx(x, shift, flush), seeded=True)


def _min_max(modifiers: Modifiers) -> Operation:
    name = modifiers.instruction.opcode
    type_ = modifiers.last(*_FLOATS, *_INTEGERS)
    if type_ in _FLOATS:
        return _same(type_, 2, floats.minimum if name == "min" else floats.maximum)
    return _same(type_, 2, np.minimum if name == "min" else np.maximum)


def _neg_abs(modifiers: Modifiers) -> Operation:
    name = modifiers.instruction.opcode
    type_ = modifiers.last(*_FLOATS, *_types("s", 16, 32, 64))
    if type_ in _FLOATS:
        return _same(type_, 1, floats.neg if name == "neg" else floats.absolute)
    return _same(type_, 1, np.negative if name == "neg" else np.abs)


def _copysign(modifiers: Modifiers) -> Operation:
    return _same(modifiers.last(*_FLOATS), 2, floats.copysign)


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
    if type_ in _FLOATS:
        function = _float_comparison(name)
    elif type_ in _BITS:
        function = _ORDERED[name] if name in ("eq", "ne") else None
    elif type_ in _types("u", 16, 32, 64):
        function = _ORDERED.get(_UNSIGNED_NAMES.get(name, name))
    elif type_ in _types("s", 16, 32, 64):
        function = _ORDERED.get(name)
    if function is None:
        raise modifiers.refuse(f"there is no comparison {name} of {type_}")
    return function, combine


def _setp(modifiers: Modifiers) -> Operation:
    """Always two destinations: the comparison and its opposite, each combined with the third source."""
    compare, combine = _comparison(modifiers)
    type_ = modifiers.last(*_FLOATS, *_BITS, *_INTEGERS)
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
    type_ = modifiers.last(*_FLOATS, *_BITS, *_INTEGERS)
    yes, no = (np.float32(1), np.float32(0)) if target == "f32" else (np.uint32(0xFFFFFFFF), np.uint32(0))

    def function(a: np.ndarray, b: np.ndarray, *c: np.ndarray) -> np.ndarray:
        result = compare(a, b)
        return np.where(merge(result, c[0]) if merge else result, yes, no)

    return Operation(
        (_bits(target) if target != "f32" else target,), (type_, type_) + ("pred",) * bool(merge), function
    )


def _selp(modifiers: Modifiers) -> Operation:
    type_ = modifiers.last(*_FLOATS, *_BITS, *_INTEGERS)
    return Operation((_bits(type_),), (_bits(type_), _bits(type_), "pred"), lambda a, b, c: np.where(c, a, b))


def _slct(modifiers: Modifiers) -> Operation:
    type_ = modifiers.need(*_FLOATS, *_BITS, *_INTEGERS)
    judge = modifiers.last("s32", "f32")
    return Operation((_bits(type_),), (_bits(type_), _bits(type_), judge), lambda a, b, c: np.where(c >= 0, a, b))


def _testp(modifiers: Modifiers) -> Operation:
    name = modifiers.need("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    type_ = modifiers.last(*_FLOATS)

    def function(a: np.ndarray) -> np.ndarray:
        least_normal = np.finfo(a.dtype).tiny
        return {
            "finite": lambda: np.isfinite(a),
            "infinite": lambda: np.isinf(a),
            "number": lambda: ~np.isnan(a),
            "notanumber": lambda: np.isnan(a),
            "normal": lambda: np.isfinite(a) & (np.abs(a) >= least_normal),
            "subnormal": lambda: (np.abs(a) < least_normal) & (a != 0),
        }[name]()

    return Operation(("pred",), (type_,), function)


# ---- bits ---------------------------------------------------------------------------------------------------------


def _logic(modifiers: Modifiers) -> Operation:
    name = modifiers.instruction.opcode
    type_ = modifiers.last("pred", *_BITS)
    type_ = type_ if type_ == "pred" else _bits(type_)
    return _same(type_, 1, operator.invert) if name == "not" else _same(type_, 2, _COMBINE[name])


def _shift(modifiers: Modifiers) -> Operation:
    if modifiers.instruction.opcode == "shl":
        type_ = _bits(modifiers.last(*_BITS))
        return Operation((type_,), (type_, "u32"), integers.shift_left)
    type_ = modifiers.last(*_BITS, *_INTEGERS)
    return Operation((type_,), (type_, "u32"), integers.shift_right)


def _shf(modifiers: Modifiers) -> Operation:
    left = modifiers.need("l", "r") == "l"
    wrap = modifiers.need("wrap", "clamp") == "wrap"
    return _same(_bits(modifiers.last("b32")), 3, lambda a, b, n: integers.funnel_shift(a, b, n, left, wrap))


def _bfe(modifiers: Modifiers) -> Operation:
    type_ = modifiers.last(*_types("us", 32, 64))
    return Operation((type_,), (type_, "u32", "u32"), integers.bit_field_extract)


def _bfi(modifiers: Modifiers) -> Operation:
    type_ = _bits(modifiers.last("b32", "b64"))
    return Operation((type_,), (type_, type_, "u32", "u32"), integers.bit_field_insert)


def _prmt(modifiers: Modifiers) -> Operation:
    return _same(_bits(modifiers.last("b32")), 3, integers.permute_bytes)


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
        return Operation(("u32",), (_bits(modifiers.last("b32", "b64")),), function)

    return decode


def _brev(modifiers: Modifiers) -> Operation:
    return _same(_bits(modifiers.last("b32", "b64")), 1, integers.reverse_bits)


# ---- conversion ---------------------------------------------------------------------------------------------------

_ALL_INTEGERS = _types("us", 8, 16, 32, 64)
_NARROW = {"bf16": (floats.to_bf16, floats.from_bf16), "f16": (floats.to_f16, floats.from_f16)}


def _pack(narrow: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """The first source goes into the upper half."""
    return lambda a, b: (narrow(a).astype(np.uint32) << np.uint32(16)) | narrow(b)


def _cvt(modifiers: Modifiers) -> Operation:
    rounding = modifiers.take("rn", *floats.ROUNDINGS)
    saturate = modifiers.take("sat") is not None
    target = modifiers.need(*_ALL_INTEGERS, *_FLOATS, "bf16", "f16", "bf16x2", "f16x2")
    source = modifiers.last(*_ALL_INTEGERS, *_FLOATS, "bf16", "f16")
    to_int, from_int = target in _ALL_INTEGERS, source in _ALL_INTEGERS

    if saturate and not (to_int and from_int):
        raise modifiers.refuse("sat is supported between integers only")
    if to_int and from_int and rounding is None:
        dtype = numpy_dtype(target)
        return Operation((target,), (source,), lambda a: integers.convert(a, dtype, saturate), wide=True)
    if to_int and source in _FLOATS and rounding in floats.ROUNDINGS:
        dtype, how = numpy_dtype(target), rounding
        return Operation((target,), (source,), lambda a: floats.float_to_int(a, how, dtype), wide=True)
    if target in _FLOATS and from_int and rounding == "rn":
        dtype = numpy_dtype(target)
        return Operation((target,), (source,), lambda a: a.astype(dtype), wide=True)
    if target == source and target in _FLOATS and rounding in floats.ROUNDINGS:
        how = rounding
        return _same(target, 1, lambda a: floats.round_to_integral(a, how))
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


_DECODERS: dict[str, Callable[[Modifiers], Operation]] = {
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
    "cvt": _cvt,
}


def decode(instruction: Instruction) -> Operation:
    decoder = _DECODERS.get(instruction.opcode)
    if decoder is None:
        raise UnsupportedInstruction(f"opcode {instruction.opcode} is not supported")
    return decoder(Modifiers(instruction))
