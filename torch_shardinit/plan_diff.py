"""The difference of two Plans as lines of text, such as "layers.3.wo.weight: normal std 0.02 -> 0.01"."""

from __future__ import annotations

import torch

from .plan import Entry, Plan
from .program import STEP_ARGS, Exact, Played, PlayedOp, Program, Step, Unwritten, show_box


def lines_of(old: Plan, new: Plan) -> list[str]:
    """What `new` says differently, one line a tensor and difference, in the order of the names; empty where the Plans
    are equal."""
    lines = []
    if old.stream_version != new.stream_version:
        lines.append(f"stream version: {old.stream_version} -> {new.stream_version}")
    for name in sorted(old.entries.keys() | new.entries.keys()):
        before, after = old.entries.get(name), new.entries.get(name)
        if before is None or after is None:
            entry = before if after is None else after
            assert entry is not None
            lines.append(f"{name}: {'removed' if after is None else 'added'}, {_shown(entry)}")
        elif before != after:
            lines += [f"{name}: {line}" for line in _of_entries(before, after)]
    return lines


def _shape(entry: Entry) -> str:
    return "x".join(map(str, entry.shape)) or "scalar"


def _shown(entry: Entry) -> str:
    dtype = str(entry.dtype).removeprefix("torch.")
    return f"{_shape(entry)} {dtype} {entry.program_class} {entry.program.describe()}"


def _of_entries(old: Entry, new: Entry) -> list[str]:
    pairs = [
        ("shape", _shape(old), _shape(new)),
        ("dtype", str(old.dtype).removeprefix("torch."), str(new.dtype).removeprefix("torch.")),
        ("kind", old.kind, new.kind),
        ("names", ", ".join(old.aliases), ", ".join(new.aliases)),
        ("persistent", old.persistent, new.persistent),
        ("kept", old.kept, new.kept),
    ]
    lines = [f"{what} {before} -> {after}" for what, before, after in pairs if before != after]
    return lines + ([_of_programs(old.program, new.program)] if old.program != new.program else [])


def _of_programs(old: Program, new: Program) -> str:
    if isinstance(old, Exact) and isinstance(new, Exact) and old.drawn_as == new.drawn_as:
        if [(s.op, s.region) for s in old.steps] == [(s.op, s.region) for s in new.steps]:
            steps = zip(old.steps, new.steps, strict=True)
            return ", ".join(_of_steps(before, after) for before, after in steps if before != after)
    if isinstance(old, Played) and isinstance(new, Played):
        return _of_played(old, new)
    before, after = old.describe(), new.describe()
    if before == after:  # a description leaves out the middle of many steps
        return _first_step(old, new)
    kinds = {Exact: "exact", Played: "played", Unwritten: "unwritten"}
    if type(old) is not type(new):
        before, after = f"{kinds[type(old)]} {before}", f"{kinds[type(new)]} {after}"
    return f"{before} -> {after}"


def number(value: float) -> str:
    """The short form of a number where it says which number it is."""
    short = f"{value:g}"
    return short if float(short) == value or value != value else repr(value)


def _of_steps(old: Step, new: Step) -> str:
    names = STEP_ARGS.get(old.op, ("",) * len(old.args))
    changed = [
        f"{name} {number(before)} -> {number(after)}".strip()
        for name, before, after in zip(names, old.args, new.args, strict=True)
        if repr(before) != repr(after)
    ]
    return f"{show_box(old.region)}{old.op} {', '.join(changed) or 'of another NaN'}"


def _first_step(old: Program, new: Program) -> str:
    assert isinstance(old, Exact) and isinstance(new, Exact)
    for index, (before, after) in enumerate(zip(old.steps, new.steps, strict=False)):
        if before != after:
            return f"step {index}: {before} -> {after}"
    return f"{len(old.steps)} steps -> {len(new.steps)} steps"


def _of_played(old: Played, new: Played) -> str:
    before, after = old.describe(), new.describe()
    if before != after:
        return f"{before} -> {after}"
    for index, (first, second) in enumerate(zip(old.ops, new.ops, strict=False)):
        if first != second:
            name = first.op if isinstance(first, PlayedOp) else first.describe()
            if isinstance(first, PlayedOp) and isinstance(second, PlayedOp) and first.op == second.op:
                changed = [
                    f"{_argument(a)} -> {_argument(b)}"
                    for a, b in zip(first.args, second.args, strict=False)
                    if repr(a) != repr(b)
                ]
                changed += [
                    f"{key} {_argument(a)} -> {_argument(dict(second.kwargs)[key])}"
                    for key, a in first.kwargs
                    if key in dict(second.kwargs) and repr(a) != repr(dict(second.kwargs)[key])
                ]
                name += f" {', '.join(changed)}" if changed else ""
            return f"operation {index}, {name}, differs"
    if len(old.ops) != len(new.ops):
        return f"{len(old.ops)} operations -> {len(new.ops)}"
    constants = old.constants.keys() | new.constants.keys()
    empty = torch.empty(0, dtype=torch.uint8)
    for key in sorted(constants):
        a, b = old.constants.get(key, empty), new.constants.get(key, empty)
        if a.numel() != b.numel():
            return f"a captured constant of {a.numel()} bytes -> {b.numel()} bytes"
        if not torch.equal(a, b):
            return f"a captured constant of {a.numel()} bytes has other values, {int((a != b).sum())} bytes of it"
    return f"memory of {sum(old.num_bytes)} bytes -> {sum(new.num_bytes)} bytes, or a view of it"


def _argument(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
