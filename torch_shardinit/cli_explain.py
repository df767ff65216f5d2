"""python -m torch_shardinit explain: what a recording found, as a table, as JSON, or beside another one."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from .plot_ownership import DEFAULT_LAYOUT, DEFAULT_WORLD, LAYOUT_HELP, layout

if TYPE_CHECKING:
    from .plan import Plan


def add_explain(commands: Any, default_model: str) -> None:
    """Adds the subcommand; its options carry `run`."""
    parser = commands.add_parser(
        "explain",
        help="print what initialises each tensor of a model",
        description="Builds the model inside torch_shardinit.recording() (nothing is allocated) and prints its Plan: "
        "name, global shape, dtype, class and program of each tensor. Exit status 1: something cannot be recorded, "
        "nothing writes some tensor, or, with --against, the Plans differ.",
    )
    parser.add_argument(
        "--model",
        default=default_model,
        metavar="MODULE:FACTORY",
        help="a callable without arguments that returns the model, all of its own init done (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the Plan there too, as JSON")
    parser.add_argument("--against", metavar="FILE", help="print how the Plan differs from the one in this JSON file")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw there which rank owns which part of each tensor, and the values of random ones beside the density "
        "that they are meant to have (.png, .svg, .pdf; needs matplotlib, the extra 'plot')",
    )
    parser.add_argument("--layout", help=f"for --plot: {LAYOUT_HELP} (default: {DEFAULT_LAYOUT})")
    parser.add_argument("--world", type=int, help=f"for --plot: ranks (default: {DEFAULT_WORLD})")
    parser.add_argument("--seed", type=int, help="for --plot: of the values (default: 0)")
    parser.add_argument("--panels", type=int, help="for --plot: how many groups of tensors are drawn (default: 12)")
    parser.set_defaults(run=lambda options: _explain(options, parser))


def summary(plan: Plan) -> str:
    """How many tensors and elements there are of each class."""
    tensors, elements = Counter[str](), Counter[str]()
    for entry in plan.entries.values():
        tensors[entry.program_class] += 1
        size = 1
        for extent in entry.shape:
            size *= extent
        elements[entry.program_class] += size
    parts = [f"{count} {name} ({elements[name]:,} elements)" for name, count in sorted(tensors.items())]
    return f"{len(plan.entries)} tensors: {', '.join(parts) or 'none'}"


def _plot_options(options: argparse.Namespace) -> dict[str, Any]:
    """Those of plot.plan_figure that were given."""
    named = {"layout": options.layout, "world": options.world, "seed": options.seed, "max_panels": options.panels}
    return {name: value for name, value in named.items() if value is not None}


def _check_plot(options: argparse.Namespace) -> None:
    """What can be told of --plot before the model is built.

    Raises:
        ValueError: an option is out of range, or is there without --plot.
        ImportError: matplotlib is missing.
    """
    from .plan import Plan
    from .plot import check_target
    from .stream import key_of_seed

    given = _plot_options(options)
    if not options.plot:
        if given:
            raise ValueError("--layout, --world, --seed and --panels must come with --plot, got none")
        return
    check_target(options.plot)
    key_of_seed(given.get("seed", 0), "--seed")
    if given.get("max_panels", 1) < 1:
        raise ValueError(f"--panels must be at least 1, got {options.panels}")
    layout(given.get("layout", DEFAULT_LAYOUT), given.get("world", DEFAULT_WORLD), Plan([]), ())


def _explain(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    # The console script does not put the directory of the user's own model on the path; python -m does.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    from .errors import RecordError
    from .plan import Plan
    from .plot import plan_figure, save
    from .record import record, recording
    from .verify import factory_of

    try:
        factory = factory_of(options.model)
        _check_plot(options)
    except ValueError as error:
        parser.error(str(error))
    except ImportError as error:
        print(f"explain: {error}", file=sys.stderr)
        return 1
    try:
        with recording():
            model = factory()
        plan = record(model)
    except RecordError as error:
        print(f"explain: {error}", file=sys.stderr)
        return 1
    try:
        if options.json:
            text = plan.to_json()
            with open(options.json, "w") as file:
                file.write(text)
        if options.plot:
            parameters = [name for name, _ in model.named_parameters()]
            save(plan_figure(plan, parameters=parameters, **_plot_options(options)), options.plot)
        if options.against:
            with open(options.against) as file:
                other = Plan.from_json(file.read())
    except (OSError, ValueError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 1
    if options.against:
        lines = other.diff(plan)
        print("\n".join(lines) if lines else f"equal to {options.against}")
        return 1 if lines else 0
    print(plan)
    print(f"\n{summary(plan)}")
    return 1 if any(entry.program_class == "unwritten" for entry in plan.entries.values()) else 0
