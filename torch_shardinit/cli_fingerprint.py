"""The commands fingerprint, diff and export."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

EQUAL, DIFFERENT, ERROR = 0, 1, 2  # as diff(1) and cmp(1) have it


def _fingerprint_of(path: str, prefix: str, quiet: bool) -> Any:
    """Of a checkpoint, or what a fingerprint's JSON file says."""
    from .checkpoint import fingerprint_checkpoint
    from .fingerprint import Fingerprint

    where = Path(path)
    if where.is_file() and where.suffix == ".json":
        found = Fingerprint.from_json(where.read_text())
        if prefix:
            chosen = {name: digest for name, digest in found.tensors.items() if name.startswith(prefix)}
            found = Fingerprint(
                {name.removeprefix(prefix): digest for name, digest in chosen.items()},
                {name.removeprefix(prefix): found.kinds[name] for name in chosen},
                frozenset(name.removeprefix(prefix) for name in chosen if name in found.partial),
            )
        return found
    found, skipped = fingerprint_checkpoint(where, prefix=prefix, quiet=quiet)
    if skipped and not quiet:
        print(f"{path}: not tensors, left out: {', '.join(sorted(skipped)[:20])}", file=sys.stderr)
    return found


def run_fingerprint(options: argparse.Namespace) -> int:
    found = _fingerprint_of(options.checkpoint, options.prefix, options.quiet)
    print(found.digest if options.brief else found)
    if options.json:
        Path(options.json).write_text(found.to_json() + "\n")
    if options.expect is not None and options.expect.lower() != found.digest:
        print(f"{options.checkpoint}: the digest must be {options.expect}, got {found.digest}", file=sys.stderr)
        return DIFFERENT
    return EQUAL


def run_diff(options: argparse.Namespace) -> int:
    first = _fingerprint_of(options.first, options.prefix, options.quiet)
    second = _fingerprint_of(options.second, options.prefix, options.quiet)
    diff = first.diff(second)
    if diff or not options.quiet:
        print(diff)
    return DIFFERENT if diff else EQUAL


def run_export(options: argparse.Namespace) -> int:
    from .export import export
    from .record import record, recording
    from .verify import factory_of

    # The console script does not put the directory of the user's own model on the path; python -m does.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    factory = factory_of(options.model)
    with recording():
        model = factory()
    export(record(model), options.out, options.seed, format=options.format, keep=options.keep, quiet=options.quiet)
    if not options.quiet:
        print(f"{options.out}: {options.format}, seed {options.seed}", file=sys.stderr)
    print(_fingerprint_of(options.out, "", True).digest)
    return EQUAL


def _guarded(run: Any) -> Any:
    def guarded(options: argparse.Namespace) -> int:
        from .errors import ShardInitError

        try:
            return run(options)
        except (OSError, ValueError, TypeError, ShardInitError) as error:
            print(f"{options.command}: {error}", file=sys.stderr)
            return ERROR

    return guarded


def add_commands(commands: Any) -> None:
    """The parsers of these commands; options.run(options) is the exit status: 1 for a difference, 2 for errors."""
    one = commands.add_parser(
        "fingerprint",
        help="the layout-independent digest of a checkpoint",
        description="Reads a safetensors file, a folder of them or a DCP folder as a stream and prints the digest that "
        "torch_shardinit.fingerprint gives a model with these tensors, then a line for each tensor. Exit status 1: the "
        "digest is not the expected one; 2: an error.",
    )
    one.add_argument("--checkpoint", required=True, metavar="PATH")
    one.add_argument("--prefix", default="", help="only names that begin so count, without it (e.g. 'model.')")
    one.add_argument("--json", metavar="FILE", help="write the fingerprint there, for diff")
    one.add_argument("--expect", metavar="DIGEST", help="exit with status 1 unless this is the digest")
    one.add_argument("--brief", action="store_true", help="print the digest alone")
    one.add_argument("--quiet", action="store_true", help="show no progress")
    one.set_defaults(run=_guarded(run_fingerprint))

    two = commands.add_parser(
        "diff",
        help="the tensors in which two checkpoints or fingerprints differ",
        description="Compares two checkpoints, or JSON files that fingerprint --json or Fingerprint.to_json wrote. "
        "Exit status 0: equal; 1: they differ; 2: an error.",
    )
    two.add_argument("first", metavar="A")
    two.add_argument("second", metavar="B")
    two.add_argument("--prefix", default="", help="of both, as for fingerprint")
    two.add_argument("--quiet", action="store_true", help="show no progress, and nothing where they are equal")
    two.set_defaults(run=_guarded(run_diff))

    three = commands.add_parser(
        "export",
        help="write the initial weights of a model as a checkpoint, without the model in memory",
        description="Records the model and writes what its init gives, chunk by chunk; then reads it again and prints "
        "its digest, which is the live model's.",
    )
    three.add_argument(
        "--model",
        required=True,
        metavar="MODULE:FACTORY",
        help="a callable without arguments that returns the model, all of its own init done; it is called inside "
        "torch_shardinit.recording()",
    )
    three.add_argument("--seed", type=int, required=True)
    three.add_argument("--out", required=True, metavar="DIR", help="a folder that is empty or not there")
    three.add_argument("--format", choices=("dcp", "safetensors"), default="dcp")
    three.add_argument("--keep", action="append", default=[], metavar="PATTERN", help="tensors to leave out")
    three.add_argument("--quiet", action="store_true", help="show no progress")
    three.set_defaults(run=_guarded(run_export))
