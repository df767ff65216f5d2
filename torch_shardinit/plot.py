"""Pictures of a Plan and of verify's report, with matplotlib (the extra `plot`), which is imported where it is needed.

Figures are made without pyplot: no window, no state of the process.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .plot_ownership import DEFAULT_LAYOUT, DEFAULT_WORLD

if TYPE_CHECKING:
    from .plan import Plan
    from .verify import Report, Row

Figure = Any

OURS, PEER = "#31688e", "#d1495b"
_GREY = "#666666"


def _matplotlib(module: str) -> Any:
    """A module of matplotlib.

    Raises:
        ImportError: it is not installed; the message says how to.
    """
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise ImportError("pictures need matplotlib, which is missing: pip install torch_shardinit[plot]") from None


def check_target(path: str) -> None:
    """That a picture can be made and written there, before the work that it is to show.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: its directory is none, or its ending is no format of matplotlib's.
    """
    formats = _matplotlib("backend_bases").FigureCanvasBase.get_supported_filetypes()
    directory, ending = os.path.dirname(path) or ".", os.path.splitext(path)[1].removeprefix(".").lower()
    if ending not in formats:
        raise ValueError(f"--plot must end in one of {', '.join(f'.{name}' for name in sorted(formats))}, got {path!r}")
    if not os.path.isdir(directory):
        raise ValueError(f"--plot must lie in a directory that is there, got {path!r}")


def new_figure(width: float, height: float) -> Figure:
    """Empty, in inches."""
    return _matplotlib("figure").Figure(figsize=(width, height), dpi=100)


def plan_figure(
    plan: Plan,
    *,
    layout: str = DEFAULT_LAYOUT,
    world: int = DEFAULT_WORLD,
    seed: int = 0,
    parameters: Sequence[str] | None = None,
    max_panels: int = 12,
) -> Figure:
    """Who owns which part of each tensor, and the values of random ones beside the density that they are meant to have.

    Tensors of one shape and program whose names differ in their numbers only share a panel. Exact random programs are
    filled at their first 200,000 elements, others at full size where they are small.

    Args:
        layout: plot_ownership.LAYOUT_HELP says which there are.
        world: ranks.
        seed: of the values.
        parameters: names in the order of named_parameters(), which only fsdp1 looks at; the Plan's own order if None.
        max_panels: how many groups of tensors are drawn, the largest first.

    Returns:
        A matplotlib.figure.Figure: savefig writes it.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: the layout is none, or does not fit the world.
    """
    from .plot_plan import draw_plan

    if max_panels < 1:
        raise ValueError(f"max_panels must be at least 1, got {max_panels}")
    names = parameters
    if names is None:
        names = [entry.name for entry in plan.entries.values() if entry.kind == "parameter"]
    return draw_plan(plan, layout, world, seed, names, max_panels)


def report_figure(report: Report) -> Figure:
    """verify's report: for each layout the share of elements that differ from the unsharded model, the seconds of the
    init, and the collectives that it issued.

    Raises:
        ImportError: matplotlib is missing.
    """
    rows: list[Row] = [*report.rows, *([report.today] if report.today is not None else [])]
    height = 1.95 + 0.3 * len(rows)
    figure = new_figure(12.0, height)
    bottom, top = 0.62 / height, 1 - 1.05 / height
    figure.text(0.015, 1 - 0.3 / height, report.model, fontsize=12, fontweight="bold", va="center")
    figure.text(
        0.015,
        1 - 0.58 / height,
        f"{report.num_parameters:,} parameters, {report.world} gloo processes with different torch seeds, seed "
        f"{report.seed}: {'OK' if report.ok else 'FAILED'}",
        fontsize=9,
        va="center",
    )
    columns: list[tuple[str, str, list[float], list[str]]] = [
        (
            "elements that differ from the unsharded model",
            "share of the elements compared, %",
            [100 * row.num_differing / row.num_compared if row.num_compared else 0.0 for row in rows],
            [f"{row.num_differing:,}" if row.num_compared else "did not run" for row in rows],
        ),
        (
            "time of the init",
            "seconds, slowest rank",
            [row.seconds for row in rows],
            [f"{r.seconds:.3f}" for r in rows],
        ),
        (
            "collectives that the init issued",
            "number, highest rank",
            [float(row.collectives or 0) for row in rows],
            ["not counted" if row.collectives is None else str(row.collectives) for row in rows],
        ),
    ]
    lefts, widths = (0.2, 0.53, 0.78), (0.28, 0.2, 0.19)
    for column, (title, unit, values, texts) in enumerate(columns):
        axes = figure.add_axes((lefts[column], bottom, widths[column], top - bottom))
        colours = [PEER if row is report.today else OURS for row in rows]
        axes.barh(range(len(rows)), values, color=colours, height=0.62)
        limit = 100.0 if column == 0 else max([*values, 1e-9])
        limit = 1.0 if column == 2 and not any(values) else limit
        axes.set_xlim(0, 1.28 * limit)
        if column == 0:
            axes.set_xticks([0, 25, 50, 75, 100])
        elif column == 2:
            axes.xaxis.get_major_locator().set_params(integer=True)
        for place, (value, text) in enumerate(zip(values, texts, strict=True)):
            axes.text(value + 0.02 * limit, place, text, va="center", fontsize=8)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        labels = [row.layout if row is not report.today else f"{row.layout} (peer)" for row in rows]
        axes.set_yticks(range(len(rows)), labels if column == 0 else [""] * len(rows), fontsize=9)
        axes.set_title(title, fontsize=9.5, loc="left")
        axes.set_xlabel(unit, fontsize=8.5)
        axes.tick_params(axis="x", labelsize=8)
        axes.tick_params(axis="y", length=0)
        if report.today is not None:
            axes.axhline(len(rows) - 1.5, color=_GREY, linewidth=0.8, linestyle="--")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if column == 0:
            axes.set_ylabel("layout", fontsize=8.5)
    return figure


def save(figure: Figure, path: str) -> None:
    """Writes it in the format of the path's ending."""
    figure.savefig(path)
