"""What can go wrong while PTX is read or run. Errors name the kernel, the line and the instruction where known."""

from __future__ import annotations


class PtxError(Exception):
    """The root of all errors of this package."""


class ParseError(PtxError):
    """Text that is not PTX, or a directive that this interpreter does not know."""


class UnsupportedInstruction(PtxError):
    """An opcode, modifier, type or operand that the interpreter does not implement exactly."""


class LaunchError(PtxError):
    """A launch that a GPU would refuse: wrong parameter block, too many threads in a block."""


class ExecutionError(PtxError):
    """An error of one thread at one instruction.

    kernel, line, instruction: where. thread: ((block x, y, z), (thread x, y, z)). address: of the access, or None.
    """

    def __init__(
        self,
        problem: str,
        kernel: str,
        line: int,
        instruction: str,
        thread: tuple[tuple[int, int, int], tuple[int, int, int]],
        address: int | None,
    ) -> None:
        block_idx, thread_idx = thread
        where = "" if address is None else f" at address {address:#x}"
        super().__init__(
            f"{kernel}, line {line}: {instruction}: {problem}{where}, block {block_idx}, thread {thread_idx}"
        )
        self.kernel = kernel
        self.line = line
        self.instruction = instruction
        self.thread = thread
        self.address = address


class MemoryFault(ExecutionError):
    """An access to a byte that no buffer maps, or a write to memory that is read-only."""


class Misaligned(ExecutionError):
    """An address that is no multiple of the size of its access."""


class Race(ExecutionError):
    """Two threads store to the same byte in one instruction."""


class UndefinedRegister(ExecutionError):
    """A register is read that no instruction has written."""


class DivisionByZero(ExecutionError):
    """An integer division by zero: its result is unspecified."""


class Trap(ExecutionError):
    """A trap instruction was reached."""


class BudgetExceeded(PtxError):
    """More instructions than the budget allows: most likely an endless loop."""


class LaneFault(Exception):
    """Raised inside an instruction, which knows the lane but not where it stands: machine.py tells the rest."""

    def __init__(self, kind: type[ExecutionError], problem: str, lane: int = 0, address: int | None = None) -> None:
        super().__init__(problem)
        self.kind = kind
        self.problem = problem
        self.lane = lane
        self.address = address
