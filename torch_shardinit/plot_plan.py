"""The picture of a Plan: a cell for each group of tensors, with its owners on the left and its values on the right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .errors import ShardInitError
from .plan import Entry, Plan
from .plot import OURS, PEER, Figure, _matplotlib, new_figure
from .plot_density import Density, density_of
from .plot_ownership import Group, Part, bytes_by_rank, groups, layout, matrix_shape, num_elements
from .program import Exact, Played

MAX_SAMPLES = 200_000
# A played tensor is evaluated whole, with all that it is made of: larger ones are left out of a picture.
_MAX_PLAYED_ELEMENTS, _MAX_PLAYED_BYTES = 1 << 22, 1 << 27
_MAX_BINS, _MAX_NOTES = 70, 3
# No more different values than these are drawn each by itself.
_MAX_SINGLE = 12
_ALL = "#d9d9d9"  # held by every rank

# Inches.
_CELL_WIDTH, _CELL_HEIGHT, _HEAD = 6.9, 2.3, 0.75
_LEFT, _OWNERS_WIDTH, _VALUES_LEFT, _VALUES_WIDTH = 0.6, 1.7, 2.95, 3.7
_BOTTOM, _AXES_HEIGHT = 0.45, 1.3


class NotDrawn(Exception):
    """Why a tensor has no histogram; the text stands in its place."""


def sample(plan: Plan, entry: Entry, seed: int) -> np.ndarray:
    """The first values of a random tensor, up to MAX_SAMPLES, as fp64.

    Raises:
        NotDrawn: it is not random, or can't be filled alone within bounds.
    """
    program, size = entry.program, math.prod(entry.shape)
    if isinstance(program, Played):
        if not program.depends_on:
            raise NotDrawn("no random numbers: computed at full size")
        if size > _MAX_PLAYED_ELEMENTS or sum(program.num_bytes) > _MAX_PLAYED_BYTES:
            raise NotDrawn("random, computed at full size:\ntoo large to be drawn here")
    elif not isinstance(program, Exact):
        raise NotDrawn(f"no values: {program.describe()}")
    elif not program.is_random:
        raise NotDrawn("no random numbers")
    if not size:
        raise NotDrawn("no elements")
    values = torch.empty(min(size, MAX_SAMPLES), dtype=entry.dtype)
    try:
        plan.fill_(entry.name, values, offset=0, seed=seed)
    except (ShardInitError, ValueError) as error:
        raise NotDrawn(f"can't be filled alone:\n{str(error)[:60]}") from error
    if values.dtype.is_complex:
        raise NotDrawn("complex numbers")
    finite: np.ndarray = values.double().numpy()
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        raise NotDrawn("no finite values")
    return finite


def bin_edges(values: np.ndarray) -> np.ndarray:
    """Edges of about equal bins over the values. Where these are few, as in narrow dtypes, an edge lies halfway between
    two of them: else bins would hold now one value more, now one less."""
    distinct, num_bins = np.unique(values), min(_MAX_BINS, max(8, round(2 * values.size ** (1 / 3))))
    low, high = float(distinct[0]), float(distinct[-1])
    if low == high:
        width = max(abs(low), 1.0) * 0.01
        return np.array([low - width, low + width])
    if distinct.size > values.size // 4:
        return np.linspace(low, high, num_bins + 1)
    middles = (distinct[1:] + distinct[:-1]) / 2
    candidates = np.concatenate([[low - (middles[0] - low)], middles, [high + (high - middles[-1])]])
    least = (candidates[-1] - candidates[0]) / num_bins
    edges = [candidates[0]]
    for candidate in candidates[1:-1]:
        if candidate - edges[-1] >= least and candidates[-1] - candidate >= least / 2:
            edges.append(candidate)
    return np.array([*edges, candidates[-1]])


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _colours(world: int) -> list[Any]:
    colours = _matplotlib("cm").ScalarMappable(cmap="viridis").get_cmap()
    return [colours(0.08 + 0.87 * rank / max(world - 1, 1)) for rank in range(world)]


def _label(ranks: Sequence[int], world: int) -> str:
    if len(ranks) == world:
        return "the one rank" if world == 1 else f"all {world} ranks"
    return _short(", ".join(map(str, ranks)), 12)


def draw_owners(axes: Any, entry: Entry, parts: Sequence[Part], world: int, colours: Sequence[Any]) -> None:
    """The tensor's matrix form, dim 0 downwards, each part in the colour of the first of its ranks."""
    rectangle = _matplotlib("patches").Rectangle
    rows, columns = matrix_shape(entry.shape)
    largest: dict[tuple[int, ...], Part] = {}
    for part in parts:
        (first, _, height), (left, _, width) = part.box
        colour = _ALL if len(part.ranks) == world else colours[part.ranks[0]]
        edge = 0.6 if len(parts) <= 24 else 0.0
        axes.add_patch(rectangle((left, first), width, height, facecolor=colour, edgecolor="white", linewidth=edge))
        if part.ranks not in largest or part.num_elements > largest[part.ranks].num_elements:
            largest[part.ranks] = part
    for ranks, part in largest.items():
        (first, _, height), (left, _, width) = part.box
        text = _label(ranks, world)
        if height / rows * _AXES_HEIGHT < 0.11 or width / columns * _OWNERS_WIDTH < 0.07 * len(text):
            continue
        face = colours[ranks[0]]
        dark = len(ranks) < world and 0.299 * face[0] + 0.587 * face[1] + 0.114 * face[2] < 0.55
        ink = "white" if dark else "black"
        axes.text(left + width / 2, first + height / 2, text, ha="center", va="center", fontsize=7.5, color=ink)
    axes.set_xlim(0, max(columns, 1))
    axes.set_ylim(max(rows, 1), 0)
    axes.set_yticks([0, rows] if rows > 1 else [0, 1])
    axes.set_xticks([0, columns] if len(entry.shape) > 1 and columns else [])
    dims = {0: "", 1: "", 2: "dim 1"}.get(len(entry.shape), f"dims 1 to {len(entry.shape) - 1}")
    axes.set_xlabel(dims, fontsize=8, labelpad=-4)
    axes.set_ylabel("dim 0" if entry.shape else "scalar", fontsize=8, labelpad=-8 if rows > 999 else 0)
    axes.tick_params(labelsize=7)


def draw_values(axes: Any, values: np.ndarray, density: Density | None) -> None:
    """The histogram of the values that are not gathered in one place, and the intended density over it."""
    axes.tick_params(labelsize=7)
    is_single = density is None or (not density.smooth and len(density.atoms) > 1)
    if is_single and (distinct := np.unique(values)).size <= _MAX_SINGLE:
        shares = [float((values == value).mean()) for value in distinct]
        width = 0.4 * float(np.diff(distinct).min()) if distinct.size > 1 else 0.1
        axes.bar(distinct, shares, width=width, color=OURS, alpha=0.55)
        axes.set_xticks(distinct)
        for value, intended in sorted((density.atoms if density is not None else {}).items()):
            axes.plot([value - width, value + width], [intended] * 2, color=PEER, linewidth=1.3)
        known = "value" if density is not None else "value (intended density not known)"
        axes.set_xlabel(known, fontsize=8, labelpad=1)
        axes.set_ylabel("share of the elements", fontsize=8, labelpad=2)
        return
    shown, notes = values, []
    for value, intended in sorted((density.atoms if density is not None else {}).items()):
        near = shown == value
        notes.append(f"at {value:g}: {near.sum() / values.size:.2%}, intended {intended:.2%}")
        shown = shown[~near]
        axes.axvline(value, color=PEER, linewidth=1.0, linestyle=":")
    if shown.size:
        edges = bin_edges(shown)
        counts, _ = np.histogram(shown, edges)
        heights = counts / (values.size * np.diff(edges))
        axes.stairs(heights, edges, fill=True, color=OURS, alpha=0.55)
        low, high, top = float(edges[0]), float(edges[-1]), float(heights.max())
        margin = 0.06 * (high - low)
        axes.set_xlim(low - margin, high + margin)
        if density is not None and density.smooth:
            grid = np.linspace(low - margin, high + margin, 801)
            # On both sides of each end, where the density jumps.
            jumps = np.array([end for part in density.smooth for end in part.ends() if math.isfinite(end)])
            width = 1e-6 * (high - low)
            x = np.sort(np.concatenate([grid, jumps - width, jumps + width]))
            x = x[(x >= low - margin) & (x <= high + margin)]
            curve = density.at(x)
            axes.plot(x, curve, color=PEER, linewidth=1.3)
            top = max(top, float(curve.max()))
        axes.set_ylim(0, (1.12 + 0.14 * min(len(notes), _MAX_NOTES)) * top)
    if notes:
        axes.text(0.015, 0.96, "\n".join(notes[:_MAX_NOTES]), transform=axes.transAxes, va="top", fontsize=7)
    axes.set_xlabel("value" if density is not None else "value (intended density not known)", fontsize=8, labelpad=1)
    axes.set_ylabel("density per unit", fontsize=8, labelpad=2)


def in_dtype(density: Density, dtype: torch.dtype) -> Density:
    """Its single values as the tensor has them, rounded."""
    atoms: dict[float, float] = {}
    for value, share in density.atoms.items():
        wide = torch.tensor(value, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        rounded = float(wide.to(dtype))
        atoms[rounded] = atoms.get(rounded, 0.0) + share
    return Density(density.smooth, atoms)


def _draw_group(figure: Figure, plan: Plan, group: Group, parts: list[Part], place: _Place, seed: int) -> None:
    entry = group.first
    shape = " x ".join(map(str, entry.shape)) or "scalar"
    dtype = str(entry.dtype).removeprefix("torch.")
    place.text(figure, 2.12, _short(group.label, 88), fontsize=9.5, fontweight="bold")
    place.text(figure, 1.94, _short(f"{shape}  {dtype}  {entry.program.describe()}", 108), fontsize=8)
    owners = place.axes(figure, _LEFT, _OWNERS_WIDTH, "owners")
    draw_owners(owners, entry, parts, place.world, place.colours)
    axes = place.axes(figure, _VALUES_LEFT, _VALUES_WIDTH, "values")
    try:
        values = sample(plan, entry, seed)
    except NotDrawn as reason:
        axes.set_axis_off()
        axes.text(0.5, 0.5, str(reason), ha="center", va="center", fontsize=8.5, color="#666666")
        return
    density = None
    if isinstance(entry.program, Exact):
        density = density_of(entry.program, entry.shape, min(math.prod(entry.shape), MAX_SAMPLES))
    if density is not None:
        density = in_dtype(density, entry.dtype)
    draw_values(axes, values, density)


class _Place:
    """A cell of the figure, which counts from its top left."""

    def __init__(self, number: int, num_rows: int, world: int, colours: Sequence[Any]) -> None:
        self.world, self.colours = world, colours
        self.width, self.height = 2 * _CELL_WIDTH, _HEAD + num_rows * _CELL_HEIGHT
        self.x = _CELL_WIDTH * (number % 2)
        self.y = (num_rows - 1 - number // 2) * _CELL_HEIGHT

    def text(self, figure: Figure, up: float, text: str, **style: Any) -> None:
        figure.text((self.x + 0.15) / self.width, (self.y + up) / self.height, text, va="center", **style)

    def axes(self, figure: Figure, left: float, width: float, label: str) -> Any:
        rectangle = (self.x + left, self.y + _BOTTOM, width, _AXES_HEIGHT)
        scale = (self.width, self.height, self.width, self.height)
        return figure.add_axes(tuple(a / b for a, b in zip(rectangle, scale, strict=True)), label=label)


def _draw_held(figure: Figure, held: Sequence[int], place: _Place) -> None:
    place.text(figure, 2.12, "bytes that each rank holds", fontsize=9.5, fontweight="bold")
    place.text(figure, 1.94, "of all parameters and buffers; what is replicated counts on each rank", fontsize=8)
    axes = place.axes(figure, _LEFT, _VALUES_LEFT + _VALUES_WIDTH - _LEFT, "held")
    unit, name = next(((2**n, text) for n, text in ((30, "GiB"), (20, "MiB")) if max(held) >= 2**n), (2**10, "KiB"))
    axes.bar(
        range(len(held)), [size / unit for size in held], color=place.colours, width=0.8 if len(held) <= 64 else 1.0
    )
    axes.set_xlabel("rank", fontsize=8, labelpad=1)
    axes.set_ylabel(name, fontsize=8)
    axes.set_xlim(-0.6, len(held) - 0.4)
    if len(held) <= 32:
        axes.set_xticks(range(len(held)))
    axes.tick_params(labelsize=7)


def draw_plan(plan: Plan, text: str, world: int, seed: int, parameters: Sequence[str], max_panels: int) -> Figure:
    """plot.plan_figure, which says what these are."""
    parts_of = layout(text, world, plan, parameters)
    found = groups(plan, parts_of)
    drawn = found[:max_panels]
    num_rows = -(-(len(drawn) + 1) // 2)
    colours = _colours(world)
    places = [_Place(number, num_rows, world, colours) for number in range(len(drawn) + 1)]
    height = _HEAD + num_rows * _CELL_HEIGHT
    figure = new_figure(2 * _CELL_WIDTH, height)
    left = 0.15 / (2 * _CELL_WIDTH)
    which = "" if len(drawn) == len(found) else f"; {len(drawn)} of {len(found)} groups of tensors drawn"
    title = f"{len(plan.entries)} tensors, {num_elements(plan.entries):,} elements{which}"
    figure.text(left, 1 - 0.25 / height, title, fontsize=12, fontweight="bold", va="center")
    ranks = f"{world} ranks" if world != 1 else "one rank"
    head = f"left: which of {ranks} owns what, layout {_short(text, 60)}; right: values with seed {seed}"
    figure.text(left, 1 - 0.52 / height, head, fontsize=9, va="center")
    handles = [
        _matplotlib("patches").Patch(color=OURS, alpha=0.55, label=f"values, the first {MAX_SAMPLES:,} at most"),
        _matplotlib("lines").Line2D([], [], color=PEER, label="intended density"),
        _matplotlib("lines").Line2D([], [], color=PEER, linestyle=":", label="intended single value"),
    ]
    figure.legend(handles=handles, loc="upper right", ncols=3, fontsize=8.5, frameon=False)
    for group, place in zip(drawn, places, strict=False):
        _draw_group(figure, plan, group, parts_of(group.first), place, seed)
    _draw_held(figure, bytes_by_rank(plan, parts_of, world), places[len(drawn)])
    return figure
