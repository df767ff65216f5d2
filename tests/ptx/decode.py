"""Which operation an opcode with its modifiers and types is. What is not listed is refused, never skipped."""

from __future__ import annotations

from collections.abc import Callable

from . import arithmetic, bits, conversion
from .errors import UnsupportedInstruction
from .operation import Modifiers, Operation
from .parse import Instruction

_DECODERS: dict[str, Callable[[Modifiers], Operation]] = {
    **arithmetic.DECODERS,
    **bits.DECODERS,
    **conversion.DECODERS,
}


def decode(instruction: Instruction) -> Operation:
    """Raises UnsupportedInstruction."""
    decoder = _DECODERS.get(instruction.opcode)
    if decoder is None:
        raise UnsupportedInstruction(f"opcode {instruction.opcode} is not supported")
    return decoder(Modifiers(instruction))
