"""What an initialisation costs, counted from outside: collectives, seconds, memory, torch's generator."""

from __future__ import annotations

import contextlib
import ctypes
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

# One byte of what memory holds before an init: nothing that init leaves unwritten looks right by chance.
_GARBAGE = 0xA5


# A functional collective does not show the c10d operator that it is made of.
_NAMESPACES = ("c10d", "_c10d_functional")
# Their operators that send nothing.
_NOT_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")


class CollectiveOps(TorchDispatchMode):
    """Counts collectives as operators, and the bytes of the tensors that they are called on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []  # operator, bytes of all its tensors

    @property
    def count(self) -> int:
        return len(self.calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _NAMESPACES and not func.__name__.startswith(_NOT_COLLECTIVES):
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(args))
            self.calls.append((func.__name__, num_bytes))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def sequence_numbers() -> int:
    """How many collectives all process groups of this process have begun, as the groups themselves count them."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


class CollectiveCounter:
    """Collectives between entry and exit: the larger of two independent counts, by operator and by the groups."""

    def __init__(self) -> None:
        self._ops = CollectiveOps()
        self._by_groups = 0

    @property
    def count(self) -> int:
        return max(self._ops.count, self._by_groups)

    @property
    def counts(self) -> tuple[int, int]:
        """By operator, by the groups' own numbers."""
        return self._ops.count, self._by_groups

    @property
    def calls(self) -> list[tuple[str, int]]:
        """(operator, bytes of all its tensors) of each."""
        return self._ops.calls

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        before = sequence_numbers()
        with self._ops:
            yield
        self._by_groups += sequence_numbers() - before


def check_counter() -> None:
    """Both counts must see a collective, or their zeros mean nothing.

    Raises:
        AssertionError: one doesn't.
    """
    counter = CollectiveCounter()
    with counter.counting():
        dist.all_reduce(torch.ones(1))
    if min(counter.counts) != 1:
        raise AssertionError(f"one collective must be counted by operator and by group, got {counter.counts}")


def _status(field: str) -> int | None:
    """A field of /proc/self/status in bytes; None where there is none."""
    try:
        with open("/proc/self/status") as status:
            found = re.search(rf"^{field}:\s+(\d+) kB", status.read(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) * 1024 if found else None


def _reset_peak() -> bool:
    # Memory that malloc keeps for later counts as resident: temporaries could hide in it.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")
    except OSError:
        return False
    return True


def local_tensors(module: nn.Module) -> list[torch.Tensor]:
    """What this rank holds of every parameter and buffer."""
    tensors = [*module.parameters(), *module.buffers()]
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


def _storages(module: nn.Module) -> dict[int, torch.UntypedStorage]:
    """Storages with memory, by address."""
    real = [tensor.untyped_storage() for tensor in local_tensors(module) if not tensor.is_meta]
    return {storage.data_ptr(): storage for storage in real if storage.nbytes()}


def fill_with_garbage(module: nn.Module) -> None:
    """Overwrites all memory of the parameters and buffers, padding included."""
    for storage in _storages(module).values():
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(_GARBAGE)


@dataclass
class InitMeter:
    """Totals of the calls that together are one model's init."""

    seconds: float = 0.0
    extra_bytes: int | None = 0  # None: the system does not tell
    moved_generator: bool = False

    def __post_init__(self) -> None:
        self.collectives = CollectiveCounter()

    @contextlib.contextmanager
    def around(self, module: nn.Module) -> Iterator[None]:
        """Measures an init of ``module``. Extra memory is the peak beyond what was resident before and beyond the
        memory that parameters and buffers themselves get in here."""
        before = set(_storages(module))
        generator = torch.get_rng_state()
        can_measure = _reset_peak()
        resident = _status("VmRSS")
        started = time.perf_counter()
        with self.collectives.counting():
            yield
        self.seconds += time.perf_counter() - started
        peak = _status("VmHWM")
        fresh = sum(storage.nbytes() for address, storage in _storages(module).items() if address not in before)
        if not can_measure or peak is None or resident is None:
            self.extra_bytes = None
        elif self.extra_bytes is not None:
            self.extra_bytes = max(self.extra_bytes, peak - resident - fresh)
        self.moved_generator |= not torch.equal(generator, torch.get_rng_state())
