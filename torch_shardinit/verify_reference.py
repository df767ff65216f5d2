"""The unsharded model against reference.py (NumPy, no code shared with the kernels), and against zeros and copies."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from . import reference, reference_draws
from ._exact import round_to
from .native import dtype_name
from .plan import Entry, Plan
from .program import RANDOM, Exact, Step
from .region import Box

# The reference is slow and plain: larger tensors are compared at about this many elements, the ends among them.
_MAX_ELEMENTS = 24_000
# Fewer values of a narrow dtype may be equal by chance.
_MIN_ELEMENTS = 16


@dataclass
class ReferenceCheck:
    """One tensor's comparison."""

    name: str
    program: str
    num_elements: int
    num_compared: int
    num_differing: int


@dataclass
class ValueChecks:
    compared: list[ReferenceCheck] = field(default_factory=list)
    num_random: int = 0
    problems: list[str] = field(default_factory=list)


def _is_random(entry: Entry) -> bool:
    """Whether a tensor holds draws of some width, and enough of them to be told from others."""
    if not isinstance(entry.program, Exact) or math.prod(entry.shape) < _MIN_ELEMENTS:
        return False
    steps = entry.program.steps
    return any(_has_width(step) for step in steps) and not any(step.op == "mul" and step.args[0] == 0 for step in steps)


def _has_width(step: Step) -> bool:
    if step.op not in RANDOM:
        return False
    if step.op in ("uniform", "trunc_normal", "random"):
        return step.args[-1] - step.args[-2] > (1 if step.op == "random" else 0)
    if step.op == "bernoulli":
        return 0 < step.args[0] < 1
    return step.op != "normal" or step.args[0] != 0


def _inside(box: Box | None, index: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Which of the row-major indices lie in a box of a tensor of this shape."""
    if box is None:
        return np.ones(index.shape, bool)
    inside = np.ones(index.shape, bool)
    for span, coordinate in zip(box, np.unravel_index(index, shape), strict=True):
        steps, rest = np.divmod(coordinate - span.start, max(1, span.step))
        inside &= (rest == 0) & (steps >= 0) & (steps < span.size)
    return inside


def _apply(step: Step, values: np.ndarray) -> np.ndarray:
    """A step that looks at what was there: one operation of the working precision."""
    if step.op in reference_draws.UNARY:
        return reference_draws.UNARY[step.op](values)
    numbers = [values.dtype.type(number) for number in step.args]
    with np.errstate(all="ignore"):
        if step.op == "clamp":
            return np.minimum(np.maximum(values, numbers[0]), numbers[1])
        if step.op == "neg":
            return -values
        operation = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[step.op]
        return operation(values, numbers[0])


def _draw(step: Step, index: np.ndarray, dtype: str, seed: int, tensor_id: int) -> np.ndarray:
    """Bit patterns of the values that an overwriting step gives."""
    if step.op == "fill":
        working = np.float64 if dtype == "float64" else np.float32
        return round_to(np.full(index.shape, step.args[0], working), dtype)
    return reference_draws.DRAWS[step.op](index, *step.args, dtype=dtype, seed=seed, tensor_id=tensor_id)


def _eye(step: Step, index: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Which of these elements, all in the step's region, are its ones."""
    coordinates = np.unravel_index(index, shape)
    along = []
    for dim in (int(dim) for dim in step.args):
        span = None if step.region is None else step.region[dim]
        along.append(coordinates[dim] if span is None else (coordinates[dim] - span.start) // span.step)
    return along[0] == along[1]


def values_by_reference(entry: Entry, index: np.ndarray, seed: int) -> np.ndarray:
    """Bit patterns of some elements of a tensor with an exact program, at these row-major indices."""
    program, dtype = entry.program, dtype_name(entry.dtype)
    assert isinstance(program, Exact) and dtype is not None
    tensor_id = reference.tensor_id(program.drawn_as or entry.name)
    wide, working = ("float64", np.float64) if dtype == "float64" else ("float32", np.float32)
    unsigned = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}[entry.dtype.itemsize]
    rounded = np.zeros(index.shape, unsigned)
    values = np.zeros(index.shape, working)
    for step in program.steps:
        here = _inside(step.region, index, entry.shape)
        if step.op == "eye":
            values[here] = _eye(step, index[here], entry.shape)
            rounded[here] = round_to(values[here], dtype)
        elif step.overwrites:
            rounded[here] = _draw(step, index[here], dtype, seed, tensor_id)
            values[here] = _draw(step, index[here], wide, seed, tensor_id).view(working)
        else:
            values[here] = _apply(step, values[here])
            rounded[here] = round_to(values[here], dtype)
    return rounded


def _chosen(entries: list[Entry]) -> list[Entry]:
    """One normal, one trunc_normal and one other where there are such, up to three."""
    kinds = {entry.name: entry.program.steps[0].op for entry in entries if isinstance(entry.program, Exact)}
    chosen: dict[str, Entry] = {}
    for kind in ("normal", "trunc_normal", "uniform"):
        for entry in entries:
            if kinds[entry.name] == kind:
                chosen.setdefault(kind, entry)
    rest = [entry for entry in entries if all(entry is not one for one in chosen.values())]
    return [*chosen.values(), *rest][:3]


def _sample(num_elements: int, seed: int) -> np.ndarray:
    """All indices, or the first and last ten and random ones between."""
    if num_elements <= _MAX_ELEMENTS:
        return np.arange(num_elements)
    ends = np.concatenate([np.arange(10), np.arange(num_elements - 10, num_elements)])
    middle = np.random.default_rng(seed % 2**64).integers(10, num_elements - 10, _MAX_ELEMENTS)
    return np.unique(np.concatenate([ends, middle]))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    signed = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.element_size()]
    return tensor.detach().contiguous().view(signed).flatten()


def check_values(plan: Plan, tensors: dict[str, torch.Tensor], seed: int) -> ValueChecks:
    """Compares random tensors of an unsharded model with the reference, and all of them with each other.

    Args:
        plan: the model's.
        tensors: the unsharded model's tensors, by canonical name.
        seed: what they were initialised with.

    Returns:
        What was compared; problems are sentences.
    """
    checks = ValueChecks()
    entries = [entry for entry in plan.entries.values() if _is_random(entry) and entry.name in tensors]
    checks.num_random = len(entries)
    seen: dict[bytes, str] = {}
    for entry in entries:
        bits = _bits(tensors[entry.name])
        if bool((bits == bits[-1]).all()):
            checks.problems.append(f"{entry.name} is random, and must not be constant, but all its elements are equal")
        if entry.program.drawn_as is not None:  # type: ignore[union-attr]
            continue  # a copy, which may well be equal
        key = bits[:4096].numpy().tobytes()
        other = seen.setdefault(key, entry.name)
        if other != entry.name and torch.equal(bits, _bits(tensors[other])):
            checks.problems.append(
                f"{other} and {entry.name} are random, and must differ, but their elements are equal"
            )
    for entry in _chosen(entries):
        assert isinstance(entry.program, Exact)
        got: np.ndarray = _bits(tensors[entry.name]).numpy()
        index = _sample(got.size, seed)
        expected = values_by_reference(entry, index, seed)
        differing = int((got[index].view(expected.dtype) != expected).sum())
        checks.compared.append(ReferenceCheck(entry.name, entry.program.describe(), got.size, index.size, differing))
        if differing:
            checks.problems.append(
                f"{entry.name} must equal the reference, but {differing} of {index.size} elements differ"
            )
    return checks
