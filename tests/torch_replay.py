"""A recording run again by stock torch: its operations one after the other, random ones from torch's own generator.

From that come two sets of values, to be compared with those of the model that is built without a recording from the
same seed: what the tape says, and what the exact programs of a Plan say where each random element is the number that
torch drew for it. Which number that is, is followed element by element through copies, casts, cats and arithmetic: a
second, slower way to what derive.py finds with boxes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn

from torch_shardinit import region as rg
from torch_shardinit.plan import Plan
from torch_shardinit.play import _run_op
from torch_shardinit.program import RANDOM, Exact, PlayedOp, Ref
from torch_shardinit.recording import own_tensors, record_of
from torch_shardinit.tape import Node, Tape

MOVES = frozenset({"clone", "_to_copy", "copy_"})
JOINS = frozenset({"cat", "stack"})
ARITHMETIC = frozenset(
    {"add", "sub", "rsub", "mul", "div", "clamp", "clamp_min", "clamp_max", "neg", "exp", "log", "sqrt", "erfinv"}
)
INIT_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "trunc_normal_": nn.init._no_grad_trunc_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": nn.init.sparse_,
    "dirac_": nn.init.dirac_,
}


class Replay:
    """origin: for each element of a storage, the place in `drawn` of the random number that it was made from; -1 where
    it was made from none, or from more than one."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.memory: dict[int, torch.UntypedStorage] = {}
        self.origin: dict[int, torch.Tensor] = {}
        self.drawn: list[torch.Tensor] = []
        self.num_drawn = 0
        read = {ref.storage for node in tape.nodes for ref in (*node.reads, *node.writes)}
        made = {ref.storage for node in tape.nodes for _, ref in node.fresh}
        self.unused = made - read - {ref.storage for ref in tape.owners}
        self._known: dict[int, int] = {}  # storage -> how many of its outside contents were put in

    def run(self, seed: int) -> None:
        threads = torch.get_num_threads()
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                for node in self.tape.nodes:
                    self._run(node)
        finally:
            torch.set_num_threads(threads)

    def at_end(self, ref: Ref) -> torch.Tensor:
        self._put_constants([ref], sys.maxsize)
        return self.view(ref)

    def view(self, ref: Ref) -> torch.Tensor:
        memory = self._memory(ref.storage)
        return torch.empty(0, dtype=ref.dtype).set_(memory, ref.offset, ref.sizes, ref.strides)  # type: ignore[call-overload]

    def origin_of(self, ref: Ref) -> torch.Tensor:
        size = self.tape.num_bytes[ref.storage] // ref.dtype.itemsize
        known = self.origin.get(ref.storage)
        if known is None or known.numel() != size:
            known = self.origin[ref.storage] = torch.full((size,), -1)
        return known.as_strided(ref.sizes, ref.strides, ref.offset)

    def numbers(self) -> torch.Tensor:
        return torch.cat([*self.drawn, torch.full((1,), float("nan"), dtype=torch.float64)])  # [-1] is no number

    def _memory(self, storage: int) -> torch.UntypedStorage:
        if storage not in self.memory:
            self.memory[storage] = torch.UntypedStorage(self.tape.num_bytes[storage])
        return self.memory[storage]

    def _put_constants(self, refs: Iterable[Ref], before: int) -> None:
        for ref in refs:
            constants = [one for one in self.tape.constants.get(ref.storage, ()) if one.since <= before]
            if len(constants) > self._known.get(ref.storage, 0):
                self._known[ref.storage] = len(constants)
                self._memory(ref.storage).copy_(constants[-1].data.untyped_storage())

    def _run(self, node: Node) -> None:
        self._put_constants((*node.reads, *node.writes), node.index)
        function = INIT_FUNCTIONS.get(node.info.name) if node.info.label.startswith("init::") else None
        if function is not None:
            wanted = inspect.signature(function).parameters
            arguments = {key: value for key, value in node.kwargs.items() if key in wanted}
            function(self.view(node.writes[0]), **arguments)
        else:
            op = PlayedOp(node.info.label, node.args, tuple(node.kwargs.items()), node.fresh, node.default_dtype)
            for ref in node.writes:
                self._memory(ref.storage)
            default = torch.get_default_dtype()
            _run_op(op, self.memory, self.tape.num_bytes, self.unused)
            torch.set_default_dtype(default)
        self._follow(node)

    def _follow(self, node: Node) -> None:
        name = node.info.name
        if not node.info.deterministic:
            for ref in node.results():
                values = self.view(ref)
                if values.is_complex():
                    self.origin_of(ref).fill_(-1)
                    continue
                self.drawn.append(values.double().flatten())
                self.origin_of(ref).copy_(torch.arange(ref.numel()).reshape(ref.sizes) + self.num_drawn)
                self.num_drawn += ref.numel()
            return
        results = [ref for ref in node.results() if ref.storage not in self.unused]
        if not results:
            return
        if name in MOVES:
            source = node.args[1] if name == "copy_" else node.args[0]
            self.origin_of(results[0]).copy_(self.origin_of(source))
        elif name in JOINS:
            sources = [self.origin_of(ref) for ref in node.args[0]]
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            self.origin_of(results[0]).copy_(getattr(torch, name)(sources, dim))
        elif name.removesuffix("_") in ARITHMETIC:
            others = [ref for ref in node.reads if ref != node.args[0]]
            mixed = any((self.origin_of(ref) >= 0).any() for ref in others)
            if mixed or not isinstance(node.args[0], Ref) or node.args[0].sizes != results[0].sizes:
                self.origin_of(results[0]).fill_(-1)
            else:
                self.origin_of(results[0]).copy_(self.origin_of(node.args[0]).clone())
        else:
            for ref in results:
                self.origin_of(ref).fill_(-1)


def recorded_refs(model: nn.Module) -> tuple[Tape, dict[str, Ref]]:
    """The tape that a recorded model carries, and where on it each tensor is, under every name."""
    tapes: dict[int, Tape] = {}
    refs: dict[str, Ref] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        record = record_of(module)
        for name, *_ in own_tensors(module):
            assert record is not None and name in record.tensors, f"{prefix}.{name} was not recorded"
            refs[f"{prefix}.{name}" if prefix else name] = record.tensors[name].ref
        if record is not None:
            tapes.update((id(tape), tape) for tape in record.tapes)
    return Tape.merged(list(tapes.values())), refs


def exact_values(shape: tuple[int, ...], dtype: torch.dtype, program: Exact, numbers: torch.Tensor) -> torch.Tensor:
    """An exact program step by step. numbers: fp64, of the tensor's shape: torch's number for each random element."""
    is_double = dtype == torch.float64
    work = torch.full(shape, float("nan"), dtype=torch.float64 if is_double else torch.float32)
    for step in program.steps:
        box = rg.full_box(shape) if step.region is None else step.region
        view = work[rg.slices(box)] if box else work
        if step.op in RANDOM:
            view.copy_(numbers[rg.slices(box)] if box else numbers)
        elif step.op == "clamp":
            view.clamp_(*step.args)
        elif step.op == "eye":
            grid = torch.meshgrid(*(torch.arange(size) for size in view.shape), indexing="ij")
            view.copy_(grid[int(step.args[0])] == grid[int(step.args[1])])
        else:
            getattr(view, f"{step.op}_")(*step.args)
    return work.to(dtype)


def replayed(model: nn.Module, plan: Plan, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(by the tape, by exact programs) of a recorded model: the values of its tensors under every name."""
    tape, refs = recorded_refs(model)
    replay = Replay(tape)
    replay.run(seed)
    numbers = replay.numbers()
    by_tape = {name: replay.at_end(ref) for name, ref in refs.items()}
    by_program = {}
    for name, ref in refs.items():
        entry = plan.lookup(name)
        assert entry is not None, name
        if isinstance(entry.program, Exact) and ref.numel():
            drawn = numbers[replay.origin_of(ref)] if entry.program.is_random else numbers[-1].expand(ref.sizes)
            by_program[name] = exact_values(entry.shape, entry.dtype, entry.program, drawn)
    return by_tape, by_program
