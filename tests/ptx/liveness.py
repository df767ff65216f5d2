"""Which registers a thread may still read from a place in the program on: the others need not be kept when threads
part or meet."""

from __future__ import annotations

from collections.abc import Iterator

from .parse import Address, Instruction, Negated, Operand, PredicatePair, Register, Vector


def _registers(operand: Operand) -> Iterator[Register]:
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Negated):
        yield operand.register
    elif isinstance(operand, Address):
        yield from _registers(operand.base)
    elif isinstance(operand, Vector):
        for element in operand.elements:
            yield from _registers(element)
    elif isinstance(operand, PredicatePair):
        yield from _registers(operand.first)
        yield from _registers(operand.second)


def _mask(operands: Iterator[Operand] | tuple[Operand, ...]) -> int:
    mask = 0
    for operand in operands:
        for register in _registers(operand):
            mask |= 1 << register.index
    return mask


def read_and_written(instruction: Instruction) -> tuple[int, int]:
    """Registers as bits of an int: those it reads, and those it writes in every thread that runs it.

    The first operand is the destination, but for the address of a store. The condition code is left out.
    """
    operands = instruction.operands
    has_destination = bool(operands) and not isinstance(operands[0], Address) and instruction.opcode != "bra"
    read = _mask(operands[1:] if has_destination else operands)
    written = _mask(operands[:1]) if has_destination else 0
    if instruction.guard is not None:
        return read | 1 << instruction.guard.index, 0
    return read, written


def live_registers(blocks: dict[int, tuple[list[Instruction], list[int]]]) -> dict[int, int]:
    """blocks: by place, its instructions and the places that may follow. Returns what is live at each place."""
    effects = {}
    for place, (instructions, _) in blocks.items():
        read = written = 0
        for instruction in reversed(instructions):
            reads, writes = read_and_written(instruction)
            read = read & ~writes | reads
            written |= writes
        effects[place] = (read, written)
    live = dict.fromkeys(blocks, 0)
    changed = True
    while changed:
        changed = False
        for place in sorted(blocks, reverse=True):
            read, written = effects[place]
            after = 0
            for following in blocks[place][1]:
                after |= live.get(following, 0)
            now = read | after & ~written
            if now != live[place]:
                live[place], changed = now, True
    return live
