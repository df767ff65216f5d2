"""Runs a kernel's PTX on the CPU, all threads of a chunk at once.

Threads of our kernels never wait for one another, so chunks of threads run one after the other. Inside a chunk each
thread has its own place in the program; the threads at the least place run next, until they branch apart or meet
others.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from .errors import BudgetExceeded, ExecutionError, LaneFault, LaunchError, UnsupportedInstruction
from .lanes import Context, Lanes, Subset, poison
from .memory import Buffer, Memory
from .parse import Instruction, KernelText, Register, Symbol, parse_module
from .steps import PARAMETER_WINDOW, Step, StepBuilder

SeedError = int | np.random.Generator | Callable[[np.ndarray], np.ndarray]

# More threads cost less overhead each, until their registers leave the cache.
CHUNK_THREADS = 16384
_DONE = np.iinfo(np.int64).max


@dataclass
class Block:
    """Instructions that run one after another. target: where its branch goes, _DONE to leave, None without branch."""

    steps: list[Step]
    end: int
    target: int | None = None
    guard: Register | None = None
    negated: bool = False
    length: int = 0
    written: frozenset[Register] = frozenset()


@dataclass
class Statistics:
    """Of a launch: threads, instructions that ran (for any number of threads at once), and once for each thread."""

    threads: int = 0
    instructions: int = 0
    thread_instructions: int = 0


@dataclass
class Kernel:
    """name; parameters (name, type, offset, size, alignment); instructions; labels (to an instruction's index);
    registers."""

    text: KernelText
    blocks: dict[int, Block] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.text.name
        self.parameters = self.text.parameters
        self.instructions = self.text.instructions
        self.labels = self.text.labels
        self.registers = self.text.registers
        self.parameter_bytes = max((p.offset + p.size for p in self.parameters), default=0)
        # Each parameter apart from the others, aligned as declared and no better: a load that relies on more is found.
        self.parameter_space = {
            p.name: (number + 1) * 0x1_0000 + p.alignment for number, p in enumerate(self.parameters)
        }
        builder = StepBuilder(self.text, self.parameter_space)
        self.storage = [*self.registers, builder.carry]
        self._build_blocks(builder)

    def _build_blocks(self, builder: StepBuilder) -> None:
        starts = {0, *self.labels.values()}
        starts |= {i + 1 for i, x in enumerate(self.instructions) if x.opcode in ("bra", "ret", "exit")}
        ordered = sorted(start for start in starts if start < len(self.instructions))
        for start, end in zip(ordered, [*ordered[1:], len(self.instructions)], strict=True):
            block = Block([], end, length=end - start)
            for instruction in self.instructions[start:end]:
                try:
                    if instruction.opcode in ("bra", "ret", "exit"):
                        block.target = self._target(instruction)
                        block.guard, block.negated = instruction.guard, instruction.guard_negated
                    else:
                        block.steps.append(builder.build(instruction))
                except UnsupportedInstruction as error:
                    raise UnsupportedInstruction(
                        f"{self.name}, line {instruction.line}: {instruction.text}: {error}"
                    ) from None
            block.written = frozenset(register for step in block.steps for register in step.written)
            self.blocks[start] = block
        last = self.instructions[-1] if self.instructions else None
        if last is None or last.opcode not in ("bra", "ret", "exit", "trap") or last.guard is not None:
            raise UnsupportedInstruction(f"{self.name}: the last instruction must be ret, exit, trap or a branch")

    def _target(self, instruction: Instruction) -> int:
        if instruction.opcode in ("ret", "exit"):
            if instruction.modifiers not in ((), ("uni",)) or instruction.operands:
                raise UnsupportedInstruction("ret and exit have no operands")
            return _DONE
        operands = instruction.operands
        if instruction.modifiers not in ((), ("uni",)) or len(operands) != 1 or not isinstance(operands[0], Symbol):
            raise UnsupportedInstruction("a branch must name one label")
        target = self.labels.get(operands[0].name)
        if target is None or target >= len(self.instructions):
            raise UnsupportedInstruction(f"label {operands[0].name} is not defined before an instruction")
        return target


def _triple(size: int | tuple[int, ...], what: str) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    sizes += (1,) * (3 - len(sizes))
    if len(sizes) != 3 or min(sizes) < 1:
        raise LaunchError(f"{what} must be one to three positive sizes, got {size}")
    return sizes  # type: ignore[return-value]


def _seed_error(rsqrt_ulp: SeedError) -> Callable[[np.ndarray], np.ndarray]:
    if isinstance(rsqrt_ulp, np.random.Generator):
        generator = rsqrt_ulp
        return lambda x: generator.integers(-8, 9, size=x.shape, dtype=np.int32)
    if callable(rsqrt_ulp):
        return rsqrt_ulp
    return lambda x: np.array([rsqrt_ulp], np.int32)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Python's garbage collector would walk through hundreds of thousands of small new objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Module:
    """All kernels of a PTX file. Raises ParseError or UnsupportedInstruction for anything it does not know."""

    def __init__(self, ptx_text: str) -> None:
        with _without_collector():
            text = parse_module(ptx_text)
            self.kernels = {name: Kernel(kernel) for name, kernel in text.kernels.items()}
        self.version = text.version
        self.target = text.target

    def launch(
        self,
        name: str,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        params: bytes,
        memory: Memory,
        rsqrt_ulp: SeedError = 0,
        max_instructions: int = 10_000_000,
        blocks: range | None = None,
    ) -> Statistics:
        """Runs a kernel to its end.

        blocks: only those of the grid's thread blocks, numbered x first: a part of a launch too large to run whole.

        params: the whole parameter block. rsqrt_ulp: by how many units rsqrt.approx is off: always the same number; a
        Generator, drawn from [-8, 8] for each thread and execution; or a function of the float32 operands that returns
        one int each. max_instructions: that a chunk of threads may take, each group of threads that run apart counting.

        Raises LaunchError, ExecutionError (MemoryFault, Misaligned, Race, UndefinedRegister, ...) or BudgetExceeded.
        """
        kernel = self.kernels.get(name)
        if kernel is None:
            raise LaunchError(f"there is no kernel {name}; there are {', '.join(self.kernels)}")
        grid, block = _triple(grid, "grid"), _triple(block, "block")
        num_threads = block[0] * block[1] * block[2]
        limit = min(1024, kernel.text.max_threads or 1024)
        if num_threads > limit:
            raise LaunchError(f"{name}: a block must have at most {limit} threads, got {num_threads}")
        if kernel.text.required_threads not in (None, num_threads):
            raise LaunchError(f"{name}: a block must have {kernel.text.required_threads} threads, got {num_threads}")
        if len(params) != kernel.parameter_bytes:
            raise LaunchError(f"{name}: the parameters have {kernel.parameter_bytes} bytes, got {len(params)}")

        parameters, window = [], []
        for p in kernel.parameters:
            array = np.frombuffer(params, np.uint8, p.size, p.offset)
            address = kernel.parameter_space[p.name]
            parameters.append(Buffer(array, address, writable=False, count_writes=False))
            window.append(Buffer(array, address + PARAMETER_WINDOW, writable=False, count_writes=False))
        context = Context(
            registers=kernel.storage,
            grid=grid,
            block=block,
            memory=memory,
            parameters=parameters,
            generic=[*memory.buffers, *window],
            seed_error=_seed_error(rsqrt_ulp),
        )
        chosen = range(grid[0] * grid[1] * grid[2]) if blocks is None else blocks
        begin, end = chosen.start * num_threads, chosen.stop * num_threads
        statistics = Statistics(threads=end - begin)
        with np.errstate(all="ignore"):
            for first in range(begin, end, CHUNK_THREADS):
                threads = np.arange(first, min(first + CHUNK_THREADS, end))
                _Chunk(kernel, context, threads, max_instructions, statistics).run()
        return statistics


class _Chunk:
    """Some threads of a launch, from start to end."""

    def __init__(
        self, kernel: Kernel, context: Context, threads: np.ndarray, budget: int, statistics: Statistics
    ) -> None:
        self.kernel = kernel
        self.lanes = Lanes(context, threads)
        for register in kernel.registers:
            if register.name in kernel.text.undefined:
                self.lanes[register.index] = poison(register)
        self.budget = budget
        self.left = budget
        self.statistics = statistics
        self.place = np.zeros(threads.size, np.int64)

    def run(self) -> None:
        while (place := int(self.place.min())) != _DONE:
            here = self.place == place
            if here.all():
                self._run_together(self.lanes, None, place, _DONE)
            else:
                index = np.flatnonzero(here)
                others = int(self.place[~here].min())
                self._run_together(Subset(self.lanes, index), index, place, others)

    def _run_together(self, lanes: Lanes, index: np.ndarray | None, place: int, others: int) -> None:
        """From `place` until the group parts, leaves or comes to where others wait. index: which threads it is."""
        where = slice(None) if index is None else index
        written: set[Register] = set()
        while True:
            block = self.kernel.blocks[place]
            self._run_block(lanes, block)
            if index is not None:
                written |= block.written
            place = block.end
            if block.target is not None:
                taken = self._taken(lanes, block)
                if taken is None:
                    self.place[where] = np.where(self._predicate(lanes, block), block.target, block.end)
                    break
                if taken:
                    place = block.target
            if place >= others or place == _DONE:
                self.place[where] = place
                break
        if isinstance(lanes, Subset):
            lanes.flush(written)

    @staticmethod
    def _predicate(lanes: Lanes, block: Block) -> np.ndarray:
        assert block.guard is not None
        value = lanes[block.guard.index]
        return ~value if block.negated else value

    def _taken(self, lanes: Lanes, block: Block) -> bool | None:
        """Whether the branch is taken by all lanes (True), none (False), or some (None)."""
        if block.guard is None:
            return True
        value = self._predicate(lanes, block)
        if value.all():
            return True
        return None if value.any() else False

    def _run_block(self, lanes: Lanes, block: Block) -> None:
        self.left -= block.length
        if self.left < 0:
            raise BudgetExceeded(f"{self.kernel.name}: more than {self.budget} instructions: an endless loop?")
        self.statistics.instructions += block.length
        self.statistics.thread_instructions += block.length * lanes.size
        number = 0
        try:
            for number, step in enumerate(block.steps):  # noqa: B007
                step.run(lanes)
        except LaneFault as fault:
            raise self._located(fault, lanes, block.steps[number].instruction) from None

    def _located(self, fault: LaneFault, lanes: Lanes, instruction: Instruction) -> ExecutionError:
        thread = self.lanes.context.thread(int(lanes.threads[min(fault.lane, lanes.size - 1)]))
        return fault.kind(fault.problem, self.kernel.name, instruction.line, instruction.text, thread, fault.address)
