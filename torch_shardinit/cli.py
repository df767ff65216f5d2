"""python -m torch_shardinit: the package's commands."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from .cli_explain import add_explain
from .cli_fingerprint import add_commands

if TYPE_CHECKING:
    from .verify import Report, Row

DEMO_MODEL = "torch_shardinit.demo_model:decoder"


def _version_text() -> str:
    import torch_shardinit

    try:
        version = metadata.version("torch_shardinit")
    except metadata.PackageNotFoundError:  # run from the source tree
        version = "(not installed)"
    info = torch_shardinit.build_info()
    return (
        f"torch_shardinit {version}, stream version {info['stream']}\n"
        f"compiler {info['compiler']}; CPU kernels for {', '.join(info['isas'])}, active {info['isa']}; "
        f"CUDA {info['cuda'] or 'not built'}\n"
        f"torch {info['torch']}, Python {sys.version.split()[0]}"
    )


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print versions and build information")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(_version_text())
        parser.exit()


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Rows of text as lines of aligned columns; the first ``left`` columns are set left, the others right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if column < left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _cells(row: Row) -> list[str]:
    return [
        row.layout,
        row.init_by,
        f"{row.num_compared:,}",
        f"{row.num_differing:,}",
        "-" if row.collectives is None else str(row.collectives),
        f"{row.seconds:.3f}",
        "n/a" if row.extra_bytes is None else f"{max(0, row.extra_bytes) / 2**20:.1f}",
    ]


def report_text(report: Report) -> str:
    """The table and what else was checked."""
    lines = [
        f"{report.model}: {report.num_parameters:,} parameters, {report.world} gloo processes with different "
        f"torch seeds, seed {report.seed}",
        "",
    ]
    header = ["layout", "init by", "compared", "differ", "collectives", "seconds", "extra MiB"]
    rows = [_cells(row) for row in report.rows]
    if report.today is not None:
        today = _cells(report.today)
        today[-1] = "-"
        rows.append(today)
    table = aligned([header, *rows], left=2)
    if report.today is not None:
        table.insert(-1, "-" * len(table[0]))
    lines += table
    lines += [
        "",
        "compared, differ: elements, by bytes, with the unsharded model of rank 0, summed over ranks.",
        "collectives: issued by the init, counted by operator and by the process groups.",
        "extra: the init's peak memory beyond the shard, of the rank where it is highest.",
    ]
    if report.today is not None:
        lines += [
            "torch today: the same model by torch alone (meta, fully_shard, to_empty, init_weights, equal seeds on all",
            "ranks), compared with the same code in one process; what only the constructor sets is what to_empty left.",
            "For information.",
        ]
        if not report.today.num_compared:
            lines += [f"  it did not run: {problem}" for problem in report.today.problems[:1]]
    lines += [""]
    if not report.values.problems:
        lines.append(f"{report.values.num_random or 'no'} random tensors, none of them constant, no two equal")
    for check in report.values.compared:
        lines.append(
            f"{check.name} = {check.program}: {check.num_differing} of {check.num_compared:,} elements "
            f"(of {check.num_elements:,}) differ from the NumPy reference"
        )
    problems = [(row.layout, problem) for row in report.rows for problem in row.problems]
    problems += [("values", problem) for problem in report.values.problems]
    lines += [f"FAILED {where}: {problem}" for where, problem in problems[:40]]
    if len(problems) > 40:
        lines.append(f"FAILED: and {len(problems) - 40} more")
    lines += ["", f"{'OK' if report.ok else 'FAILED'} in {report.seconds:.0f} s"]
    return "\n".join(lines)


def _verify(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    # The console script does not put the directory of the user's own model on the path; python -m does.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    from .build import build_info
    from .plot import check_target, report_figure, save
    from .stream import key_of_seed
    from .verify import factory_of, verify
    from .verify_layouts import select_layouts
    from .verify_processes import ChildError

    try:
        layouts = select_layouts(options.layouts)
        factory_of(options.model)
        key_of_seed(options.seed, "--seed")
        if options.nproc < 1:
            raise ValueError(f"--nproc must be at least 1, got {options.nproc}")
        if options.plot:
            check_target(options.plot)
    except ValueError as error:
        parser.error(str(error))
    except ImportError as error:
        print(f"verify: {error}", file=sys.stderr)
        return 1
    try:
        report = verify(
            options.model, layouts, world=options.nproc, seed=options.seed, limit=options.timeout,
            with_today=not options.no_today,
        )  # fmt: skip
    except ChildError as error:
        print(f"verify: {error}", file=sys.stderr)
        return 1
    print(report_text(report))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({**report.to_json(), "build": build_info()}, file, indent=2)
            file.write("\n")
    if options.plot:
        save(report_figure(report), options.plot)
    return 0 if report.ok else 1


def _parser() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(prog="python -m torch_shardinit", description=__doc__)
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser(
        "verify",
        help="initialise a model in every layout and compare it with the unsharded one",
        description="Starts gloo processes with different torch seeds, initialises the model in each layout and "
        "compares every parameter and buffer with the unsharded model, byte by byte. Exit status 1: something differs.",
    )
    verify.add_argument(
        "--model",
        default=DEMO_MODEL,
        metavar="MODULE:FACTORY",
        help="a callable without arguments that returns the model, all of its own init done; it is called inside "
        "torch_shardinit.recording() (default: %(default)s)",
    )
    verify.add_argument("--nproc", type=int, default=4, help="processes (default: %(default)s)")
    verify.add_argument("--layouts", help="comma-separated names or patterns, e.g. 'ddp,fsdp2*' (default: all)")
    verify.add_argument("--seed", type=int, default=0, help="the init's seed (default: %(default)s)")
    verify.add_argument("--json", metavar="FILE", help="write the results there too")
    verify.add_argument(
        "--plot", metavar="FILE", help="draw them there (.png, .svg, .pdf; needs matplotlib, the extra 'plot')"
    )
    verify.add_argument(
        "--timeout", type=float, default=300, help="seconds until the run is given up (default: %(default)g)"
    )
    verify.add_argument("--no-today", action="store_true", help="leave out the row of what torch does today")
    add_explain(commands, DEMO_MODEL)
    add_commands(commands)
    return parser, verify


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser, verify = _parser()
    options = parser.parse_args(arguments)
    try:
        status = options.run(options) if "run" in options else _verify(options, verify)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read our output has enough of it: `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
