"""python -m torch_shardinit explain: what a recording found, as a table, as JSON, or beside another one."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

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


def _explain(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    # The console script does not put the directory of the user's own model on the path; python -m does.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    from .errors import RecordError
    from .plan import Plan
    from .record import record, recording
    from .verify import factory_of

    try:
        factory = factory_of(options.model)
    except ValueError as error:
        parser.error(str(error))
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
