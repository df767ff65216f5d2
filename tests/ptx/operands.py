"""How an instruction's operands are read from lanes and written to them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .errors import UnsupportedInstruction
from .lanes import Lanes, storage_dtype
from .operation import numpy_dtype
from .parse import TYPE_BITS, FloatImmediate, IntImmediate, Negated, Operand, Register, Sink, SpecialRegister

Read = Callable[[Lanes], np.ndarray]
Write = Callable[[Lanes, np.ndarray], None]

_SPECIAL = {f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"} | {"%laneid"}


def reader(operand: Operand, type_: str, wide: bool = False) -> Read:
    """The operand's value as an array of the type's dtype."""
    dtype = numpy_dtype(type_)
    if isinstance(operand, Register):
        return _register_reader(operand, type_, dtype, wide)
    if isinstance(operand, Negated) and type_ == "pred":
        index = operand.register.index
        if operand.register.type != "pred":
            raise UnsupportedInstruction(f"!{operand.register.name} must be a predicate")
        return lambda lanes: ~lanes[index]
    if isinstance(operand, SpecialRegister):
        name = operand.name
        if name not in _SPECIAL:
            raise UnsupportedInstruction(f"special register {name} is not supported, or it is not declared")
        if TYPE_BITS[type_] != 32:
            raise UnsupportedInstruction(f"special register {name} has 32 bits, but is read as {type_}")
        return lambda lanes: lanes.special(name).view(dtype)
    constant = _constant(operand, type_, dtype)
    return lambda lanes: constant


def writer(operand: Operand, type_: str, wide: bool = False) -> tuple[Write, tuple[Register, ...]]:
    if isinstance(operand, Sink):
        return (lambda lanes, value: None), ()
    if not isinstance(operand, Register):
        raise UnsupportedInstruction(f"a destination must be a register, got {operand}")
    index, stored, bits = operand.index, storage_dtype(operand), TYPE_BITS[type_]
    if (type_ == "pred") != (operand.type == "pred") or operand.bits < bits or (operand.bits > bits and not wide):
        raise UnsupportedInstruction(f"{operand.name} is {operand.type}: no place for a value of type {type_}")
    if operand.bits > bits:
        if type_[0] == "f":
            raise UnsupportedInstruction(f"{operand.name} is {operand.type}: it must be as wide as {type_}")
        extended = np.dtype(f"{'i' if type_[0] == 's' else 'u'}{stored.itemsize}")

        def write_wide(lanes: Lanes, value: np.ndarray) -> None:
            lanes[index] = value.astype(extended).view(stored)

        return write_wide, (operand,)

    def write(lanes: Lanes, value: np.ndarray) -> None:
        lanes[index] = value if value.dtype == stored else value.view(stored)

    return write, (operand,)


def _register_reader(register: Register, type_: str, dtype: np.dtype, wide: bool) -> Read:
    index, stored, bits = register.index, storage_dtype(register), TYPE_BITS[type_]
    if (type_ == "pred") != (register.type == "pred") or register.bits < bits or (register.bits > bits and not wide):
        raise UnsupportedInstruction(f"{register.name} is {register.type}, but is read as {type_}")
    if register.bits > bits:
        if type_[0] == "f":
            raise UnsupportedInstruction(f"{register.name} is {register.type}: it must be as wide as {type_}")
        narrow = np.dtype(f"u{bits // 8}")
        return lambda lanes: lanes[index].astype(narrow).view(dtype)
    if dtype == stored:
        return lambda lanes: lanes[index]
    return lambda lanes: lanes[index].view(dtype)


def _constant(operand: Operand, type_: str, dtype: np.dtype) -> np.ndarray:
    bits = TYPE_BITS[type_]
    if isinstance(operand, IntImmediate) and type_ == "pred":
        return np.array([operand.value != 0])
    if isinstance(operand, IntImmediate) and type_[0] != "f":
        if not -(1 << (bits - 1)) <= operand.value < 1 << bits:
            raise UnsupportedInstruction(f"{operand.value} does not fit into {type_}")
        return np.array([operand.value & ((1 << bits) - 1)], f"u{bits // 8}").view(dtype)
    if isinstance(operand, FloatImmediate) and bits == operand.bits:
        return np.array([operand.pattern], f"u{bits // 8}").view(dtype)
    raise UnsupportedInstruction(f"operand {operand} is not a value of type {type_}")
