"""What an instruction does to arrays, and the reading of its modifiers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import UnsupportedInstruction
from .parse import Instruction


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


def types(kinds: str, *widths: int) -> tuple[str, ...]:
    return tuple(f"{kind}{width}" for kind in kinds for width in widths)


INTEGERS = types("us", 16, 32, 64)
FLOATS = ("f32", "f64")
BITS = types("b", 16, 32, 64)


@functools.cache
def numpy_dtype(type_: str) -> np.dtype:
    if type_ == "pred":
        return np.dtype(bool)
    kind = {"u": "u", "b": "u", "s": "i", "f": "f"}[type_[0]]
    return np.dtype(f"{kind}{int(type_[1:]) // 8}")


def same(type_: str, count: int, function: Callable[..., Any], **flags: bool) -> Operation:
    return Operation((type_,), (type_,) * count, function, **flags)


def unsigned_type(type_: str) -> str:
    """The unsigned type of the same width: wrapping arithmetic does not see signs."""
    return "u" + type_[1:]
