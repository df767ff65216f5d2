"""The registers of a group of threads that run one instruction together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import LaneFault, UndefinedRegister
from .memory import Buffer, Memory
from .parse import Register

# What stands in a register of a thread that never wrote it, so that a result that depends on it is wrong.
_POISON = {1: 1, 2: 0xDEAD, 4: 0xDEADBEEF, 8: 0x5EADBEEFCAFEF00D}


_STORAGE = {1: np.dtype(bool), **{bits: np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}}


def storage_dtype(register: Register) -> np.dtype:
    """Registers are kept as unsigned integers of their width, predicates as bool."""
    return _STORAGE[register.bits]


def poison(register: Register) -> np.ndarray:
    dtype = storage_dtype(register)
    return np.array([_POISON[dtype.itemsize]]).astype(dtype)


@dataclass
class Context:
    """What all threads of a launch share."""

    registers: list[Register]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    memory: Memory
    parameters: list[Buffer]  # in parameter space
    generic: list[Buffer]  # global memory and the window on the parameters
    seed_error: Callable[[np.ndarray], np.ndarray]
    sizes: dict[str, np.ndarray] = field(default_factory=dict, init=False)  # by special register

    def __post_init__(self) -> None:
        for name, triple in (("ntid", self.block), ("nctaid", self.grid)):
            for axis, size in zip("xyz", triple, strict=True):
                self.sizes[f"%{name}.{axis}"] = np.array([size], np.uint32)

    def thread(self, number: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """((block x, y, z), (thread x, y, z)) of a thread's number in the launch."""
        num_threads = self.block[0] * self.block[1] * self.block[2]
        return _unravel(number // num_threads, self.grid), _unravel(number % num_threads, self.block)


def _unravel(number: Any, sizes: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    """x runs fastest. number: an int or an array of them."""
    return number % sizes[0], number // sizes[0] % sizes[1], number // (sizes[0] * sizes[1])


class Lanes(dict[int, np.ndarray]):
    """Values by a register's index: arrays of shape (size,), or (1,) where all threads hold the same. An array is never
    changed once it stands here, so that registers may share one."""

    def __init__(self, context: Context, threads: np.ndarray) -> None:
        super().__init__()
        self.context = context
        self.threads = threads
        self.size = int(threads.size)
        self._special: dict[str, np.ndarray] = {}

    def __missing__(self, index: int) -> np.ndarray:
        raise LaneFault(UndefinedRegister, f"register {self.context.registers[index].name} was never written")

    def spread(self, value: np.ndarray) -> np.ndarray:
        """One element a thread."""
        return value if value.shape[0] == self.size else np.repeat(value, self.size)

    def special(self, name: str) -> np.ndarray:
        size = self.context.sizes.get(name)
        if size is not None:
            return size
        if name not in self._special:
            x, y, z = self.context.block
            block, thread = np.divmod(self.threads, x * y * z)
            if name == "%laneid":
                value = thread % 32
            else:
                kind, axis = name[1:].split(".")
                number, sizes = (thread, self.context.block) if kind == "tid" else (block, self.context.grid)
                value = _unravel(number, sizes)["xyz".index(axis)]
            self._special[name] = value.astype(np.uint32)
        return self._special[name]

    def merge(self, register: Register, index: np.ndarray, value: np.ndarray) -> None:
        """The threads at `index` have written `value`."""
        try:
            old = self[register.index]
        except LaneFault:
            old = poison(register)
        new = old.copy() if old.shape[0] == self.size else np.repeat(old, self.size)
        new[index] = value
        self[register.index] = new


class Subset(Lanes):
    """Some threads of a parent. Reads are gathered once; writes reach the parent at flush."""

    def __init__(self, parent: Lanes, index: np.ndarray) -> None:
        super().__init__(parent.context, parent.threads[index])
        self.parent = parent
        self.index = index

    def __missing__(self, index: int) -> np.ndarray:
        value = self.parent[index]
        if value.shape[0] == self.parent.size and value.shape[0] != 1:
            value = value[self.index]
        self[index] = value
        return value

    def flush(self, written: Iterable[Register]) -> None:
        for register in written:
            self.parent.merge(register, self.index, self[register.index])
