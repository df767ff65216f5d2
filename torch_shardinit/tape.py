"""The tape: every aten operation of a recording on every storage, temporaries included.

A Node holds its operands as Refs (storage number, offset, sizes, strides, dtype), never as tensors, so that the tape
of a model costs kilobytes. Views are no nodes: which elements they mean is in the Refs. Node and storage numbers are
unique in the process, so that tapes of several recordings merge by concatenation.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import numpy as np
import torch

from .program import Ref

_node_numbers = itertools.count()
_storage_numbers = itertools.count()
# Storages of tensors that finished recordings left on modules: a later recording knows them by the same number, and
# needs the tapes that say what is in them.
_lasting: dict[int, tuple[weakref.ref[torch.Tensor], int, tuple[Tape, ...]]] = {}

# Results with storage of their own that nothing has written yet.
_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
# In-place operations that do not read what they overwrite. Every out= variant is one too.
_OVERWRITES = frozenset(
    {
        *("copy_", "fill_", "zero_", "uniform_", "normal_", "trunc_normal_", "bernoulli_", "random_", "exponential_"),
        *("log_normal_", "cauchy_", "geometric_", "orthogonal_", "sparse_", "dirac_"),
    }
)
# In-place operations that write elements which only values tell, and keep the others.
_SCATTERS = frozenset(
    {
        *("index_put_", "_index_put_impl_", "masked_fill_", "masked_scatter_", "scatter_", "index_fill_"),
        *("index_copy_", "put_", "_unsafe_index_put_"),
    }
)


class OpInfo:
    """What the tape needs to know about an operator; looked up once for each overload."""

    __slots__ = (
        "deterministic",
        "has_device",
        "has_dtype",
        "is_composite",
        "is_empty",
        "is_view",
        "label",
        "mutable",
        "name",
        "overwrites",
        "pointwise",
        "scatters",
    )

    def __init__(self, op: torch._ops.OpOverload) -> None:
        schema = op._schema
        self.label = schema.name + ("." + schema.overload_name if schema.overload_name else "")
        self.name = schema.name.rpartition("::")[2]
        self.mutable = [
            (None if arg.kwarg_only else index, arg.name)
            for index, arg in enumerate(schema.arguments)
            if arg.alias_info is not None and arg.alias_info.is_write
        ]
        # set_ and resize_ change what a tensor is a view of, and no element.
        inplace_view = torch.Tag.inplace_view in op.tags or self.name in ("set_", "resize_")
        aliases = [ret.alias_info for ret in schema.returns]
        self.is_view = inplace_view or (bool(aliases) and not self.mutable and all(a is not None for a in aliases))
        self.overwrites = self.name in _OVERWRITES or (
            bool(self.mutable) and all(position is None for position, _ in self.mutable)
        )
        self.scatters = self.name in _SCATTERS
        self.is_empty = self.name in _EMPTY
        self.deterministic = torch.Tag.nondeterministic_seeded not in op.tags
        self.pointwise = torch.Tag.pointwise in op.tags
        # Seen only where autograd's keys are off (inference_mode); its schema may say alias where it copies.
        self.is_composite = op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        names = {arg.name for arg in schema.arguments}
        self.has_device, self.has_dtype = "device" in names, "dtype" in names


class InitFunctionInfo(OpInfo):
    """Stands for a torch.nn.init function that does nothing on meta and is taped as one operation."""

    __slots__ = ()

    def __init__(self, name: str) -> None:
        self.label, self.name, self.mutable = f"init::{name}", name, [(0, "tensor")]
        self.is_view = self.scatters = self.is_empty = self.has_device = self.has_dtype = self.pointwise = False
        self.is_composite = False
        self.overwrites = True
        self.deterministic = name == "dirac_"


@dataclass(slots=True, eq=False)
class Node:
    """One operation. args and kwargs hold Refs for tensors; reads: what it needs; writes: what it changes in place;
    fresh: (which result, Ref) of results with storage of their own; where: (file, line) of the user's code."""

    index: int
    info: OpInfo
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    fresh: tuple[tuple[int, Ref], ...]
    where: tuple[str, int]
    default_dtype: torch.dtype

    @property
    def line(self) -> str:
        return f"{self.where[0]}:{self.where[1]}"

    def results(self) -> Iterator[Ref]:
        """Everything that this node writes."""
        yield from self.writes
        for _, ref in self.fresh:
            yield ref


@dataclass(eq=False)
class Constant:
    """The contents of a storage that came from outside the tape, copied when it was first used.

    since: the number of the next node then. shared: the storage itself where other code (NumPy) may still write it
    without the tape's knowledge; it is compared again at each use."""

    data: torch.Tensor  # 1-D uint8
    since: int
    shared: torch.UntypedStorage | None = None


@dataclass(eq=False)
class Tape:
    """nodes in order; num_bytes and constants of storages; owners: the tensors that modules held at the end;
    num_registered: by how many modules and names."""

    nodes: list[Node] = field(default_factory=list)
    num_bytes: dict[int, int] = field(default_factory=dict)
    constants: dict[int, list[Constant]] = field(default_factory=dict)
    owners: set[Ref] = field(default_factory=set)
    num_registered: dict[Ref, int] = field(default_factory=dict)
    _writers: dict[int, list[tuple[Node, Ref]]] = field(default_factory=dict)
    _num_indexed: int = 0

    def writers(self, storage: int) -> list[tuple[Node, Ref]]:
        """(node, what it writes there) of a storage, in order."""
        while self._num_indexed < len(self.nodes):
            node = self.nodes[self._num_indexed]
            for ref in node.results():
                self._writers.setdefault(ref.storage, []).append((node, ref))
            self._num_indexed += 1
        return self._writers.get(storage, [])

    def constant(self, storage: int, before: int) -> Constant | None:
        """The latest known contents of an outside storage that a node numbered `before` saw."""
        found = None
        for constant in self.constants.get(storage, ()):
            if found is None or constant.since <= before:
                found = constant
        return found

    @staticmethod
    def merged(tapes: Sequence[Tape]) -> Tape:
        whole = Tape()
        for tape in tapes:
            whole.nodes += tape.nodes
            whole.num_bytes.update(tape.num_bytes)
            for storage, constants in tape.constants.items():
                whole.constants.setdefault(storage, []).extend(constants)
            whole.owners |= tape.owners
            for ref, count in tape.num_registered.items():
                whole.num_registered[ref] = max(count, whole.num_registered.get(ref, 0))
        for constants in whole.constants.values():
            constants.sort(key=lambda constant: constant.since)
        whole.nodes.sort(key=lambda node: node.index)
        return whole


def keep_number(tensor: torch.Tensor, number: int, tapes: tuple[Tape, ...]) -> None:
    _lasting[tensor.untyped_storage()._cdata] = weakref.ref(tensor), number, tapes


def drop_dead_numbers() -> None:
    for key in [key for key, (tensor, *_) in _lasting.items() if tensor() is None]:
        del _lasting[key]


def _lasting_number(key: int) -> tuple[int, tuple[Tape, ...]] | None:
    entry = _lasting.get(key)
    tensor = entry[0]() if entry is not None else None
    if entry is None or tensor is None or tensor.untyped_storage()._cdata != key:
        return None
    return entry[1:]


class Writer:
    """Fills a Tape while a recording is on. Holds every storage seen, so that no address is used twice."""

    def __init__(self) -> None:
        self.tape = Tape()
        self._infos: dict[Any, OpInfo] = {}
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._born: set[int] = set()  # storages whose contents the tape makes itself
        self.earlier: dict[int, Tape] = {}  # by id: the tapes of storages that earlier recordings left
        self.last_number = -1

    def info(self, op: Any) -> OpInfo:
        found = self._infos.get(op)
        if found is None:
            found = self._infos[op] = OpInfo(op)
        return found

    def adopt(self, storage: torch.UntypedStorage, number: int) -> None:
        """Makes a storage known under the number that it had in an earlier tape."""
        self._numbers[storage._cdata] = number
        self._storages[number] = storage
        self._born.add(number)

    def number_of(self, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        number = self._numbers.get(key)
        if number is None:
            lasting = _lasting_number(key)
            if lasting is None:
                number = next(_storage_numbers)
            else:
                number, tapes = lasting
                self.earlier.update((id(tape), tape) for tape in tapes)
                # Memory from outside that no tape wrote is looked at again: it may hold other values now.
                if any(tape.writers(number) for tape in tapes) or not any(number in t.constants for t in tapes):
                    self._born.add(number)
            self._numbers[key] = number
            self._storages[number] = storage
            self.tape.num_bytes[number] = storage.nbytes()
        return number

    def known_number(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor's storage if an operation has met it."""
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.layout is not torch.strided:
            return None
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def resized(self, tensor: torch.Tensor) -> None:
        """An operation may have given the tensor's storage another size."""
        storage = tensor.untyped_storage()
        self.tape.num_bytes[self.number_of(storage)] = storage.nbytes()

    def ref(self, tensor: torch.Tensor) -> Ref:
        return Ref(
            self.number_of(tensor.untyped_storage()),
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
        )

    def capture(self, tensor: torch.Tensor) -> None:
        """Copies the contents of a real tensor from outside the tape, before an operation uses it."""
        storage = tensor.untyped_storage()
        number = self.number_of(storage)
        if number in self._born:
            return
        if number not in self.tape.constants:
            self.set_constant(number, storage, shared=storage)
        else:
            self.recheck(number)

    def set_constant(
        self, number: int, storage: torch.UntypedStorage, *, shared: torch.UntypedStorage | None = None
    ) -> None:
        data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu().clone()
        self.tape.constants.setdefault(number, []).append(Constant(data, self.last_number + 1, shared))

    def recheck(self, number: int) -> None:
        """Looks again at memory that NumPy may have changed since it was captured."""
        known = self.tape.constants.get(number)
        if known and known[-1].shared is not None and number not in self._born:
            now = torch.empty(0, dtype=torch.uint8).set_(known[-1].shared)
            if not torch.equal(now, known[-1].data):
                known.append(Constant(now.clone(), self.last_number + 1, known[-1].shared))

    def add(
        self,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reads: tuple[Ref, ...],
        writes: tuple[Ref, ...],
        fresh: tuple[tuple[int, Ref], ...],
    ) -> Node:
        self.last_number = next(_node_numbers)
        dtype = torch.get_default_dtype()
        node = Node(self.last_number, info, args, kwargs, reads, writes, fresh, user_line(), dtype)
        self.tape.nodes.append(node)
        self._born.update(ref.storage for _, ref in fresh)
        self._born.update(ref.storage for ref in writes)
        return node

    def finish(self) -> Tape:
        """The tape, with what must be known of storages that may now go."""
        for number, constants in self.tape.constants.items():
            self.recheck(number)
            for constant in constants:
                constant.shared = None
        for number, storage in self._storages.items():
            self.tape.num_bytes[number] = storage.nbytes()
        self._storages.clear()
        self._numbers.clear()
        return self.tape


_TORCH_ROOT = os.path.dirname(torch.__file__) + os.sep
_OWN_ROOT = os.path.dirname(os.path.abspath(__file__)) + os.sep
_NUMPY_ROOT = os.path.dirname(np.__file__) + os.sep
_is_internal: dict[CodeType, bool] = {}


def is_internal(code: CodeType) -> bool:
    """Whether code is torch's, NumPy's, ours, or generated."""
    internal = _is_internal.get(code)
    if internal is None:
        name = code.co_filename
        internal = _is_internal[code] = (
            name.startswith((_TORCH_ROOT, _OWN_ROOT, _NUMPY_ROOT))
            or (name.startswith("<") and "stdin" not in name)
            or ("contextlib" in name or name.endswith("copy.py") or name == random.__file__)
        )
    return internal


def user_line() -> tuple[str, int]:
    """(file, line) of the innermost frame that is neither torch's, NumPy's, ours nor generated code."""
    frame: Any = sys._getframe(1)
    last = frame
    while frame is not None:
        code = frame.f_code
        if not is_internal(code):
            return code.co_filename, frame.f_lineno
        last, frame = frame, frame.f_back
    return last.f_code.co_filename, last.f_lineno
