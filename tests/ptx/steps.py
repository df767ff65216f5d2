"""From an instruction to a function that runs it on lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import memory
from .arithmetic import Modifiers, Operation, decode, numpy_dtype
from .errors import LaneFault, MemoryFault, Trap, UnsupportedInstruction
from .lanes import Lanes, Subset, storage_dtype
from .parse import (
    TYPE_BITS,
    Address,
    FloatImmediate,
    Instruction,
    IntImmediate,
    KernelText,
    Negated,
    Operand,
    PredicatePair,
    Register,
    Sink,
    SpecialRegister,
    Symbol,
    Vector,
)

Run = Callable[[Lanes], None]
Read = Callable[[Lanes], np.ndarray]
Write = Callable[[Lanes, np.ndarray], None]

# The parameter block as ld.param sees it, and as generic addresses do. Neither is an address of a buffer.
PARAMETER_WINDOW = 0x7E00_0000_0000_0000

_SPECIAL = {f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"} | {"%laneid"}
_CACHE_HINTS = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")
_LEVEL_HINTS = {
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::64B",
    "L2::128B",
    "L2::256B",
}
_MEMORY_TYPES = tuple(type_ for type_ in TYPE_BITS if type_ != "pred")


@dataclass(frozen=True)
class Step:
    """run works on the lanes that are active; written are the registers it may change."""

    instruction: Instruction
    run: Run
    written: tuple[Register, ...]


class StepBuilder:
    """Builds the steps of one kernel. parameter_space: name of a parameter -> its address in parameter space."""

    def __init__(self, kernel: KernelText, parameter_space: dict[str, int]) -> None:
        self.parameter_space = parameter_space
        # The condition code is one more register.
        self.carry = Register(len(kernel.registers), "CC.CF", "pred")

    def build(self, instruction: Instruction) -> Step:
        """Raises UnsupportedInstruction for what is not implemented."""
        name = instruction.opcode
        if name == "mov":
            run, written = self._mov(instruction)
        elif name in ("ld", "st"):
            run, written = self._access(instruction)
        elif name == "cvta":
            run, written = self._cvta(instruction)
        elif name == "trap":
            run, written = self._trap(instruction)
        else:
            run, written = self._operate(instruction)
        if instruction.guard is not None:
            run = _guarded(run, instruction.guard, instruction.guard_negated, written)
        return Step(instruction, run, written)

    # ---- operands -------------------------------------------------------------------------------------------------

    def _reader(self, operand: Operand, type_: str, wide: bool = False) -> Read:
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

    def _writer(self, operand: Operand, type_: str, wide: bool = False) -> tuple[Write, tuple[Register, ...]]:
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

    # ---- arithmetic -----------------------------------------------------------------------------------------------

    def _operate(self, instruction: Instruction) -> tuple[Run, tuple[Register, ...]]:
        operation = decode(instruction)
        operands = list(instruction.operands)
        if operands and isinstance(operands[0], PredicatePair):
            operands[0:1] = [operands[0].first, operands[0].second]
        elif len(operation.destinations) == 2:  # setp with one destination
            operands.insert(1, Sink())
        num_written = len(operation.destinations)
        expected = num_written + len(operation.sources)
        if len(operands) != expected:
            raise UnsupportedInstruction(f"expected {expected} operands, got {len(operands)}")
        writes: list[Write] = []
        written: list[Register] = []
        for operand, type_ in zip(operands, operation.destinations, strict=False):
            write, registers = self._writer(operand, type_, operation.wide)
            writes.append(write)
            written.extend(registers)
        reads = [
            self._reader(operand, type_, operation.wide)
            for operand, type_ in zip(operands[num_written:], operation.sources, strict=True)
        ]
        if operation.carry_in:
            reads.append(_register_reader(self.carry, "pred", np.dtype(bool), False))
        if operation.carry_out:
            write, registers = self._writer(self.carry, "pred")
            writes.append(write)
            written.extend(registers)
        return _apply(operation, reads, writes), tuple(written)

    # ---- mov ------------------------------------------------------------------------------------------------------

    def _mov(self, instruction: Instruction) -> tuple[Run, tuple[Register, ...]]:
        modifiers = Modifiers(instruction)
        type_ = modifiers.last("pred", *(t for t in _MEMORY_TYPES if TYPE_BITS[t] > 8))
        if len(instruction.operands) != 2:
            raise modifiers.refuse(f"expected 2 operands, got {len(instruction.operands)}")
        target, source = instruction.operands
        if isinstance(target, Vector):
            return self._unpack(modifiers, type_, target, source)
        write, written = self._writer(target, type_)
        if isinstance(source, Vector):
            read = self._packer(modifiers, type_, source)
        elif isinstance(source, Symbol):
            if TYPE_BITS[type_] != 64:
                raise modifiers.refuse(f"the address of {source.name} has 64 bits")
            address = np.array([self._symbol(source)], np.uint64)
            read = lambda lanes: address  # noqa: E731
        else:
            read = self._reader(source, type_)
        return (lambda lanes: write(lanes, read(lanes))), written

    def _part(self, modifiers: Modifiers, type_: str, vector: Vector) -> str:
        width = TYPE_BITS[type_] // len(vector.elements)
        if type_[0] != "b" or len(vector.elements) not in (2, 4) or width < 16:
            raise modifiers.refuse(f"{len(vector.elements)} elements in a mov of {type_}")
        return f"u{width}"

    def _unpack(
        self, modifiers: Modifiers, type_: str, target: Vector, source: Operand
    ) -> tuple[Run, tuple[Register, ...]]:
        part = self._part(modifiers, type_, target)
        read = self._reader(source, type_)
        width, dtype, whole = TYPE_BITS[part], numpy_dtype(part), numpy_dtype(type_)
        pairs = [self._writer(element, part) for element in target.elements]

        def run(lanes: Lanes) -> None:
            value = read(lanes)
            for number, (write, _) in enumerate(pairs):
                write(lanes, (value >> whole.type(width * number)).astype(dtype))

        return run, tuple(register for _, registers in pairs for register in registers)

    def _packer(self, modifiers: Modifiers, type_: str, source: Vector) -> Read:
        part = self._part(modifiers, type_, source)
        reads = [self._reader(element, part) for element in source.elements]
        width, whole = TYPE_BITS[part], numpy_dtype(type_)

        def read(lanes: Lanes) -> np.ndarray:
            result = reads[0](lanes).astype(whole)
            for number, element in enumerate(reads[1:], 1):
                result = result | (element(lanes).astype(whole) << whole.type(width * number))
            return result

        return read

    # ---- memory ---------------------------------------------------------------------------------------------------

    def _symbol(self, symbol: Symbol) -> int:
        if symbol.name not in self.parameter_space:
            raise UnsupportedInstruction(f"{symbol.name} is not a parameter: no other memory has a name")
        return self.parameter_space[symbol.name]

    def _address(self, operand: Operand) -> Read:
        if not isinstance(operand, Address):
            raise UnsupportedInstruction(f"expected an address, got {operand}")
        offset = np.uint64(operand.offset & (2**64 - 1))
        if isinstance(operand.base, Symbol):
            constant = np.array([self._symbol(operand.base)], np.uint64) + offset
            return lambda lanes: constant
        if operand.base.type == "pred" or operand.base.bits != 64:
            raise UnsupportedInstruction(f"an address must be a 64-bit register, {operand.base.name} is not")
        index = operand.base.index
        return lambda lanes: lanes[index] + offset

    def _access(self, instruction: Instruction) -> tuple[Run, tuple[Register, ...]]:
        modifiers = Modifiers(instruction)
        is_load = instruction.opcode == "ld"
        modifiers.take("weak")
        space = modifiers.take("global", "param", "param::entry") or "generic"
        space = space.split("::")[0]
        modifiers.take(*_CACHE_HINTS)
        while modifiers.take(*_LEVEL_HINTS):
            pass
        vector = modifiers.take("v2", "v4", "v8")
        type_ = modifiers.last(*_MEMORY_TYPES)
        if len(instruction.operands) != 2:
            raise modifiers.refuse(f"expected 2 operands, got {len(instruction.operands)}")
        value, address = instruction.operands if is_load else reversed(instruction.operands)
        elements = value.elements if isinstance(value, Vector) else (value,)
        count = int(vector[1]) if vector else 1
        if len(elements) != count or isinstance(value, Vector) != bool(vector) or count * TYPE_BITS[type_] > 256:
            raise modifiers.refuse(f"{len(elements)} elements of {type_}")
        if isinstance(address, Address) and isinstance(address.base, Symbol) and space != "param":
            raise modifiers.refuse("a parameter's name is an address in parameter space only")
        if is_load:
            return self._load(self._address(address), elements, type_, space)
        if space == "param":
            return self._refuse_store(self._address(address))
        return self._store(self._address(address), elements, type_, space), ()

    def _load(
        self, address: Read, elements: tuple[Operand, ...], type_: str, space: str
    ) -> tuple[Run, tuple[Register, ...]]:
        pairs = [self._writer(element, type_, wide=True) for element in elements]
        size, count, dtype = TYPE_BITS[type_] // 8, len(elements), numpy_dtype(type_)

        def run(lanes: Lanes) -> None:
            context = lanes.context
            buffers = {
                "global": context.memory.buffers,
                "param": context.parameters,
                "generic": context.generic,
            }[space]
            rows = memory.load(buffers, address(lanes), size, count)
            for number, (write, _) in enumerate(pairs):
                write(lanes, np.ascontiguousarray(rows[:, number]).view(dtype))

        return run, tuple(register for _, registers in pairs for register in registers)

    def _store(self, address: Read, elements: tuple[Operand, ...], type_: str, space: str) -> Run:
        plain = f"u{TYPE_BITS[type_]}"
        if type_[0] == "f" and any(isinstance(e, Register) and e.bits != TYPE_BITS[type_] for e in elements):
            raise UnsupportedInstruction(f"a register must be as wide as {type_}")
        reads = [self._reader(element, plain, wide=True) for element in elements]
        dtype = numpy_dtype(plain)

        def run(lanes: Lanes) -> None:
            values = np.empty((lanes.size, len(reads)), dtype)
            for number, read in enumerate(reads):
                values[:, number] = read(lanes)
            buffers = lanes.context.memory.buffers if space == "global" else lanes.context.generic
            memory.store(buffers, lanes.spread(address(lanes)), values)

        return run

    def _refuse_store(self, address: Read) -> tuple[Run, tuple[Register, ...]]:
        def run(lanes: Lanes) -> None:
            raise LaneFault(MemoryFault, "parameters are read-only", 0, int(address(lanes)[0]))

        return run, ()

    def _cvta(self, instruction: Instruction) -> tuple[Run, tuple[Register, ...]]:
        """cvta.space: an address of a space to a generic one; cvta.to.space: back. Global ones are generic already."""
        modifiers = Modifiers(instruction)
        back = modifiers.take("to") is not None
        space = modifiers.need("global", "param", "param::entry").split("::")[0]
        modifiers.last("u64")
        target, source = instruction.operands
        write, written = self._writer(target, "u64")
        if isinstance(source, Symbol):
            constant = np.array([self._symbol(source)], np.uint64)
            if space != "param":
                raise modifiers.refuse(f"{source.name} is a parameter")
            read: Read = lambda lanes: constant  # noqa: E731
        else:
            read = self._reader(source, "u64")
        shift = np.uint64(0 if space == "global" else PARAMETER_WINDOW)
        if back:
            return (lambda lanes: write(lanes, read(lanes) - shift)), written
        return (lambda lanes: write(lanes, read(lanes) + shift)), written

    def _trap(self, instruction: Instruction) -> tuple[Run, tuple[Register, ...]]:
        if instruction.modifiers or instruction.operands:
            raise UnsupportedInstruction("trap has no operands")

        def run(lanes: Lanes) -> None:
            raise LaneFault(Trap, "trap")

        return run, ()


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


def _apply(operation: Operation, reads: list[Read], writes: list[Write]) -> Run:
    """One closure for each usual number of sources: this is the interpreter's inner loop."""
    function = operation.function
    if operation.seeded:
        (read,), (write,) = reads, writes

        def run_seeded(lanes: Lanes) -> None:
            x = lanes.spread(read(lanes))
            write(lanes, function(x, lanes.context.seed_error(x)))

        return run_seeded
    if len(writes) > 1:

        def run_several(lanes: Lanes) -> None:
            for write, value in zip(writes, function(*[read(lanes) for read in reads]), strict=True):
                write(lanes, value)

        return run_several
    (write,) = writes
    if len(reads) == 1:
        (a,) = reads
        return lambda lanes: write(lanes, function(a(lanes)))
    if len(reads) == 2:
        a, b = reads
        return lambda lanes: write(lanes, function(a(lanes), b(lanes)))
    if len(reads) == 3:
        a, b, c = reads
        return lambda lanes: write(lanes, function(a(lanes), b(lanes), c(lanes)))
    return lambda lanes: write(lanes, function(*[read(lanes) for read in reads]))


def _guarded(run: Run, guard: Register, negated: bool, written: tuple[Register, ...]) -> Run:
    """Only the lanes whose predicate allows it."""
    index = guard.index

    def guarded(lanes: Lanes) -> None:
        allowed = ~lanes[index] if negated else lanes[index]
        if allowed.all():
            run(lanes)
        elif allowed.any():
            some = Subset(lanes, np.flatnonzero(allowed))
            try:
                run(some)
            except LaneFault as fault:
                fault.lane = int(some.index[min(fault.lane, some.size - 1)])
                raise
            some.flush(written)

    return guarded
