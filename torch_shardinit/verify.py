"""verify: one model in every layout, in real processes, compared byte for byte with the unsharded one."""

from __future__ import annotations

import gc
import hashlib
import importlib
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from .errors import ShardInitError
from .record import record, reset_parameters
from .verify_layouts import LAYOUTS, Factory, gathered, init_unsharded, wrap_fsdp2
from .verify_meter import InitMeter, check_counter
from .verify_processes import run_gloo
from .verify_reference import ValueChecks, check_values

TODAY = "torch today, fsdp2"


class VerifyError(ShardInitError):
    """verify could not be run on this model."""


@dataclass
class Row:
    """One layout. Elements, compared and differing, are summed over the ranks; costs are the worst rank's."""

    layout: str
    init_by: str
    num_compared: int = 0
    num_differing: int = 0
    collectives: int | None = 0
    seconds: float = 0.0
    extra_bytes: int | None = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.num_differing or self.collectives or self.problems) and self.num_compared > 0

    def merged(self, other: Row) -> Row:
        extra = None
        if self.extra_bytes is not None and other.extra_bytes is not None:
            extra = max(self.extra_bytes, other.extra_bytes)
        return Row(
            self.layout,
            self.init_by,
            self.num_compared + other.num_compared,
            self.num_differing + other.num_differing,
            None if self.collectives is None else max(self.collectives, other.collectives or 0),
            max(self.seconds, other.seconds),
            extra,
            [*self.problems, *(problem for problem in other.problems if problem not in self.problems)],
        )


@dataclass
class Report:
    """What a run found; ``today`` is informative."""

    model: str
    num_parameters: int
    world: int
    seed: int
    rows: list[Row]
    values: ValueChecks
    today: Row | None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows) and not self.values.problems

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok, "torch": torch.__version__}


def factory_of(text: str) -> Factory:
    """The callable that "package.module:factory" names.

    Raises:
        ValueError: there is none; the message says what must hold and what came.
    """
    module_name, colon, attribute = text.partition(":")
    if not (colon and module_name and attribute):
        raise ValueError(f"--model must be package.module:factory, got {text!r}")
    try:
        value: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"--model must name a module that can be imported, got {text!r}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ValueError(f"--model must name something in {module_name}, got {text!r}: it has no {part}")
        value = getattr(value, part)
    if not callable(value):
        kind = type(value).__name__
        raise ValueError(f"--model must name a callable that returns a module, got {text!r}, of type {kind}")
    return value


@dataclass
class Truth:
    """The unsharded model of rank 0. tensors: by the first of its names; aliases: every name -> that name."""

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """One number an element, equal where the bytes are."""
    signed = {16: torch.int64, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return tensor.detach().contiguous().view(-1).view(signed[tensor.element_size()])


def _truth_of(model: nn.Module) -> Truth:
    """This rank's unsharded model, overwritten with the values of rank 0's.

    Raises:
        VerifyError: the ranks built models of other names, shapes or dtypes.
    """
    first_of: dict[object, str] = {}
    truth = Truth({}, {})
    with gathered(model) as found:
        for name, (memory, tensor) in sorted(found.items()):
            first = truth.aliases[name] = first_of.setdefault((memory, tensor.dtype), name)
            if first == name:
                truth.tensors[name] = tensor.clone()
    mine = [(name, first, str(truth.tensors[first].dtype), tuple(truth.tensors[first].shape))
            for name, first in truth.aliases.items()]  # fmt: skip
    theirs = [mine]
    dist.broadcast_object_list(theirs, src=0)
    if theirs[0] != mine:
        differing = sorted(set(mine) ^ set(theirs[0]))[:4]
        raise VerifyError(f"every rank must build the same model, got other tensors than rank 0: {differing}")
    for tensor in truth.tensors.values():
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)  # gloo does not take every dtype
    return truth


def _compare(model: nn.Module, truth: Truth, row: Row) -> None:
    """Every parameter and buffer of a wrapped model, gathered by the framework, with the truth."""
    by_first: dict[str, object] = {}
    with gathered(model) as found:
        for name in sorted(found.keys() ^ truth.aliases.keys()):
            row.problems.append(f"{name} is in {'this layout' if name in found else 'the unsharded model'} only")
        for name, (memory, tensor) in found.items():
            if name not in truth.aliases:
                continue
            first = truth.aliases[name]
            if first in by_first:
                if by_first[first] != memory:
                    row.problems.append(f"{name} and {first} must be one tensor, and are two")
                continue
            by_first[first] = memory
            expected = truth.tensors[first]
            if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
                row.problems.append(f"{name} must be {expected.dtype} {list(expected.shape)}, "
                                    f"got {tensor.dtype} {list(tensor.shape)}")  # fmt: skip
                continue
            got, want = _bits(tensor), _bits(expected)
            row.num_compared += expected.numel()
            if not torch.equal(got, want):
                differs = (got != want).view(expected.numel(), -1).any(1)
                row.num_differing += int(differs.sum())
                row.problems.append(f"{name}: element {int(differs.nonzero()[0])} is the first that differs")


def _row_of(name: str, factory: Factory, seed: int, truth: Truth) -> Row:
    layout, meter = LAYOUTS[name], InitMeter()
    model = layout.init(factory, seed, meter)
    row = Row(name, layout.init_by)
    if meter.moved_generator:
        row.problems.append("the init moved torch's generator")
    row.collectives, row.seconds, row.extra_bytes = meter.collectives.count, meter.seconds, meter.extra_bytes
    _compare(model, truth, row)
    return row


def _torch_init(model: nn.Module) -> None:
    """The model's own init code, as it is called on a materialised model."""
    init: Callable[[], object] | None = getattr(model, "init_weights", None)
    if init is not None:
        init()
    else:
        reset_parameters(model)


def _lost_by_recording(factory: Factory, truth: Truth) -> list[str]:
    """Sentences about tensors that are constant although the model's own code, run by torch, does not leave them so."""
    try:
        model = factory()
    except Exception:  # a factory may need more memory than there is, or work on meta only
        return []
    problems = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        bits, plain = _bits(truth.tensors[truth.aliases[name]]), _bits(tensor)
        if plain.numel() and bool((bits == bits[0]).all()) and not bool((plain == plain[0]).all()):
            problems.append(
                f"{name} must not be constant, for by torch alone it is not, but all its elements are equal"
            )
    return problems


def _today(factory: Factory, seed: int) -> Row:
    """The ordinary way: meta, fully_shard, to_empty, init code; against the same code in one process."""
    row = Row(TODAY, "init_weights", collectives=None, extra_bytes=None)
    try:
        torch.manual_seed(seed)
        model = factory()
        torch.manual_seed(seed)
        _torch_init(model)
        truth = _truth_of(model)
        with torch.device("meta"):
            model = factory()
        model = wrap_fsdp2(model)
        started = time.perf_counter()
        model.to_empty(device="cpu")
        torch.manual_seed(seed)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that random operators of a DTensor on a CPU mesh are not what they seem
            _torch_init(model)
        row.seconds = time.perf_counter() - started
        _compare(model, truth, row)
    except Exception as error:  # the row only informs
        row.problems.append(f"{type(error).__name__}: {error}")
    return row


def _warm_up() -> None:
    """Imports and first calls, so that no layout's memory is that of loading code."""

    def model() -> nn.Module:
        linear = nn.Linear(4, 4)
        linear.register_buffer("table", torch.arange(4).float().cos())
        return linear

    init_unsharded(model, 0, InitMeter())


@dataclass
class _RankReport:
    rows: list[Row]
    values: ValueChecks
    today: Row | None
    num_parameters: int


def verify_rank(rank: int, world: int, model: str, layouts: list[str], seed: int, with_today: bool) -> _RankReport:
    """What one process of verify does. Ranks do the same in the same order, so that their collectives meet."""
    # On purpose: values that come from torch's generator differ between the ranks.
    torch.manual_seed(hash_of(seed, rank))
    check_counter()
    factory = factory_of(model)
    _warm_up()
    unsharded = init_unsharded(factory, seed, InitMeter())
    num_parameters = sum(parameter.numel() for parameter in unsharded.parameters())
    truth = _truth_of(unsharded)
    values = ValueChecks()
    if rank == 0:
        values = check_values(record(unsharded), truth.tensors, seed)
        values.problems += _lost_by_recording(factory, truth)
    del unsharded
    rows = []
    for name in layouts:
        try:
            rows.append(_row_of(name, factory, seed, truth))
        except Exception as error:
            error.add_note(f"in layout {name}") if hasattr(error, "add_note") else None
            raise
        gc.collect()  # wrapped models are cycles
    today = _today(factory, seed) if with_today else None
    return _RankReport(rows, values, today, num_parameters)


def hash_of(*values: int) -> int:
    """A seed for torch's generator that no two ranks share."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:7], "little")


def verify(
    model: str, layouts: list[str], *, world: int = 4, seed: int = 0, limit: float = 300.0, with_today: bool = True
) -> Report:
    """Initialises a model in each of the layouts on ``world`` gloo processes and compares it with the unsharded model.

    Args:
        model: "package.module:factory"; the factory is called inside recording() and must do all of its model's init.
        layouts: names in LAYOUTS.
        limit: seconds after which the processes are ended.

    Raises:
        ChildError: a process failed; the message holds its traceback.
    """
    started = time.perf_counter()
    ranks: list[_RankReport] = run_gloo(verify_rank, world, model, layouts, seed, with_today, limit=limit)
    rows, today = ranks[0].rows, ranks[0].today
    for other in ranks[1:]:
        rows = [row.merged(more) for row, more in zip(rows, other.rows, strict=True)]
        if today is not None and other.today is not None:
            today = today.merged(other.today)
    seconds = time.perf_counter() - started
    return Report(model, ranks[0].num_parameters, world, seed, rows, ranks[0].values, today, seconds)
