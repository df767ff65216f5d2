"""The density that a tensor's values are meant to have: of an exact program, from its steps, in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from . import region as rg
from .program import Exact, Step


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


@dataclass(frozen=True)
class Smooth:
    """scale * X + shift, where X is uniform in [0, 1) or standard normal ("normal"), kept where low <= X <= high.

    weight: which share of the tensor's elements these are; mass: the probability of [low, high] that density divides
    by, 1 at first; a truncated normal's is that of its bounds.
    """

    kind: str
    weight: float
    low: float
    high: float
    scale: float
    shift: float
    mass: float = 1.0

    def probability(self, low: float, high: float) -> float:
        """Of X in [low, high]."""
        if high <= low:
            return 0.0
        if self.kind == "uniform":
            return (high - low) / self.mass
        # On the tail's side, where the difference keeps its digits.
        ends = (-high, -low) if low > 0 else (low, high)
        return (_normal_cdf(ends[1]) - _normal_cdf(ends[0])) / self.mass

    def density(self, values: np.ndarray) -> np.ndarray:
        x = (values - self.shift) / self.scale
        base = np.ones_like(x) if self.kind == "uniform" else np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        inside = (x >= self.low) & (x <= self.high)
        return np.where(inside, self.weight * base / (self.mass * abs(self.scale)), 0.0)

    def ends(self) -> tuple[float, float]:
        """The least and the largest value; infinite where there is none."""
        low, high = sorted((self.scale * self.low + self.shift, self.scale * self.high + self.shift))
        return low, high


@dataclass
class Density:
    """A mixture: smooth parts, and single values with the share of elements that have them (a padding row's zeros,
    what clamp gathers at its bounds)."""

    smooth: list[Smooth] = field(default_factory=list)
    atoms: dict[float, float] = field(default_factory=dict)

    def at(self, values: np.ndarray) -> np.ndarray:
        """The smooth parts' density, for each unit of value; the atoms are not in it."""
        return sum((part.density(values) for part in self.smooth), np.zeros_like(values))

    def _add_atom(self, value: float, share: float) -> None:
        if share > 0:
            value += 0.0  # -0 and 0 are one place on an axis
            self.atoms[value] = self.atoms.get(value, 0.0) + share

    def _map(self, scale: float, shift: float) -> Density:
        mapped = Density()
        for part in self.smooth:
            if scale == 0:
                mapped._add_atom(shift, part.weight * part.probability(part.low, part.high))
            else:
                mapped.smooth.append(replace(part, scale=part.scale * scale, shift=part.shift * scale + shift))
        for value, share in self.atoms.items():
            mapped._add_atom(value * scale + shift, share)
        return mapped

    def _clamp(self, low: float, high: float) -> Density:
        clamped = Density()
        for part in self.smooth:
            ends = sorted((bound - part.shift) / part.scale for bound in (low, high))
            first, last = max(part.low, ends[0]), min(part.high, ends[1])
            below = part.weight * part.probability(part.low, min(ends[0], part.high))
            above = part.weight * part.probability(max(ends[1], part.low), part.high)
            if part.scale < 0:
                below, above = above, below
            clamped._add_atom(low, below)
            clamped._add_atom(high, above)
            if first < last:
                clamped.smooth.append(replace(part, low=first, high=last))
        for value, share in self.atoms.items():
            clamped._add_atom(min(max(value, low), high), share)
        return clamped

    def after(self, step: Step) -> Density | None:
        """What a step makes of it that looks at what was there. None: a function bends it."""
        if step.op in ("exp", "log", "sqrt", "erfinv"):
            return None
        if step.op == "clamp":
            return self._clamp(*step.args) if step.args[0] <= step.args[1] else Density(atoms={step.args[1]: 1.0})
        if step.op == "neg":
            return self._map(-1.0, 0.0)
        (number,) = step.args
        return {
            "add": lambda: self._map(1.0, number),
            "sub": lambda: self._map(1.0, -number),
            "mul": lambda: self._map(number, 0.0),
            "div": lambda: self._map(1.0 / number, 0.0),
        }[step.op]()


def _drawn(step: Step, box: rg.Box) -> Density | None:
    """What an overwriting step leaves in a box. None: it has no curve here."""
    if step.op == "fill":
        return Density(atoms={step.args[0] + 0.0: 1.0})
    if step.op == "eye":
        # How many of the box's elements lie on the diagonal of the step's region.
        first, second = (box[int(dim)] for dim in step.args)
        region = None if step.region is None else [step.region[int(dim)] for dim in step.args]
        origin = (0, 0) if region is None else (region[0].start, region[1].start)
        steps = (1, 1) if region is None else (region[0].step, region[1].step)
        rows = {(first.start + index * first.step - origin[0]) // steps[0] for index in range(first.size)}
        columns = {(second.start + index * second.step - origin[1]) // steps[1] for index in range(second.size)}
        ones = len(rows & columns) / (first.size * second.size)
        return Density(atoms={value: share for value, share in ((0.0, 1 - ones), (1.0, ones)) if share})
    if step.op == "bernoulli":
        return Density(atoms={value: share for value, share in ((0.0, 1 - step.args[0]), (1.0, step.args[0])) if share})
    if step.op not in ("uniform", "normal", "trunc_normal"):
        return None
    if step.op == "uniform":
        low, high = step.args
        if low == high:
            return Density(atoms={low: 1.0})
        return Density([Smooth("uniform", 1.0, 0.0, 1.0, high - low, low)])
    std, mean = step.args[:2]
    if std == 0:
        return Density(atoms={mean: 1.0})
    part = Smooth("normal", 1.0, -math.inf, math.inf, std, mean)
    if step.op == "trunc_normal":
        low, high = ((bound - mean) / std for bound in step.args[2:])
        if low == high:
            return Density(atoms={step.args[2]: 1.0})
        part = replace(part, low=low, high=high, mass=part.probability(low, high))
    return Density([part])


def density_of(program: Exact, shape: Sequence[int], num_elements: int, max_boxes: int = 256) -> Density | None:
    """The density of a tensor's first elements in row-major order, all draws of a step taken together.

    Args:
        num_elements: how many.
        max_boxes: into how many boxes with a chain of steps of their own these may fall.

    Returns:
        None where there are more boxes, or elements that no step writes, or a division by 0, or draws or steps without
        a density in closed form here.
    """
    merged: dict[Smooth, float] = {}
    total = Density()
    try:
        boxes = rg.boxes_of_run(shape, 0, num_elements)
        pieces = [piece for box in boxes for piece in program.straight(box, max_boxes)]
    except ValueError:
        return None
    for box, chain in pieces:
        if not chain or any(step.op == "div" and step.args[0] == 0 for step in chain):
            return None
        density = _drawn(chain[0], box)
        for step in chain[1:]:
            density = density and density.after(step)
        if density is None:
            return None
        share = rg.numel(box) / num_elements
        for part in density.smooth:
            alone = replace(part, weight=1.0)
            merged[alone] = merged.get(alone, 0.0) + part.weight * share
        for value, weight in density.atoms.items():
            total._add_atom(value, weight * share)
    total.smooth = [replace(part, weight=weight) for part, weight in merged.items()]
    return total
