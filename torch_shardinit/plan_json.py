"""A Plan as JSON text, and back. The text is data: reading it runs nothing, takes memory in proportion to its length,
and says where in the text something is not as it must be.

One object: format, format_version, stream_version, tensors. Numbers that JSON lacks are strings. Played programs hold
their operations by schema name (plan_operators.py says which are taken) with views of numbered storages, and captured
constants up to a limit as base64; tables that were computed inside recording() are operations and need no room.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .plan import Entry, Plan
from .plan_operators import check_on_meta, operator
from .program import Exact, Played, PlayedDraw, PlayedExact, PlayedItem, PlayedOp, Program, Ref, Step, Unwritten
from .region import Box

FORMAT, FORMAT_VERSION = "torch_shardinit.plan", 1
MAX_CONSTANT_BYTES = 1 << 16


def text_of(plan: Plan, max_constant_bytes: int = MAX_CONSTANT_BYTES) -> str:
    """The JSON text of a Plan, one tensor a line; see Plan.to_json."""
    head = {"format": FORMAT, "format_version": FORMAT_VERSION, "stream_version": plan.stream_version}
    lines = []
    for entry in plan.entries.values():
        try:
            lines.append(_dumps(_entry(entry, max_constant_bytes)))
        except ValueError as error:
            raise ValueError(f"Plan.to_json: {entry.name}: {error}") from None
    tensors = ",\n".join(lines)
    return f'{_dumps(head)[:-1]}, "tensors": [\n{tensors}\n]}}\n'


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _entry(entry: Entry, max_constant_bytes: int) -> dict[str, Any]:
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "kind": entry.kind,
        "shape": list(entry.shape),
        "dtype": name_of(entry.dtype),
        "persistent": entry.persistent,
        "kept": entry.kept,
        "program": _program(entry.program, max_constant_bytes),
    }


def name_of(value: Any) -> str:
    """float32 of torch.float32, strided of torch.strided."""
    return str(value).removeprefix("torch.")


def number_out(value: float) -> float | str:
    """A float as JSON has it, or as a string: inf, -inf, nan, or the bits of another NaN."""
    if math.isfinite(value):
        return float(value)
    if math.isnan(value):
        bits = struct.pack(">d", value).hex()
        return "nan" if bits == "7ff8000000000000" else f"nan:{bits}"
    return "inf" if value > 0 else "-inf"


def _program(program: Program, max_constant_bytes: int) -> dict[str, Any]:
    if isinstance(program, Unwritten):
        return {"class": "unwritten", "reason": program.reason}
    if isinstance(program, Exact):
        return {"class": "exact", "drawn_as": program.drawn_as, "steps": _steps(program.steps)}
    _check_writable(program)
    constants = {}
    for storage, data in sorted(program.constants.items()):
        if data.numel() > max_constant_bytes:
            raise ValueError(
                f"a constant that was captured from outside of recording() must hold at most {max_constant_bytes} "
                f"bytes to be written, got {data.numel()}: it cannot be computed again. Compute it inside recording() "
                "with torch operations, which are written instead, or raise max_constant_bytes"
            )
        constants[str(storage)] = base64.b64encode(data.numpy().tobytes()).decode("ascii")
    return {
        "class": "played",
        "ops": [_item(op) for op in program.ops],
        "out": _ref(program.out),
        "num_bytes": list(program.num_bytes),
        "constants": constants,
        "check_unwritten": program.check_unwritten,
    }


def _check_writable(program: Played) -> None:
    """What is written must be read again, so that the reader's checks hold for the writer too."""
    for index, op in enumerate(program.ops):
        if isinstance(op, PlayedOp):
            try:
                operator(op.op)
            except ValueError as error:
                raise ValueError(f"operation {index} {error}") from None
    check_on_meta(program, lambda index: f"operation {index}")


def _steps(steps: Sequence[Step]) -> list[dict[str, Any]]:
    return [{"op": s.op, "args": list(map(number_out, s.args)), "region": _region(s.region)} for s in steps]


def _region(region: Box | None) -> list[list[int]] | None:
    return None if region is None else [list(span) for span in region]


def _ref(ref: Ref) -> list[Any]:
    return [ref.storage, ref.offset, list(ref.sizes), list(ref.strides), name_of(ref.dtype)]


def _item(op: PlayedItem) -> dict[str, Any]:
    if isinstance(op, PlayedExact):
        return {"exact": op.name, "draw": op.draw, "view": _ref(op.view), "steps": _steps(op.program.steps)}
    if isinstance(op, PlayedDraw):
        return {
            "composite": op.op,
            "args": list(map(number_out, op.args)),
            "name": op.name,
            "draw": op.draw,
            "owner": _ref(op.owner),
            "view": _ref(op.view),
            "region": _region(op.region),
        }
    return {
        "op": op.op,
        "args": [argument_out(value) for value in op.args],
        "kwargs": {key: argument_out(value) for key, value in op.kwargs},
        "fresh": [[index, _ref(ref)] for index, ref in op.fresh],
        "default_dtype": name_of(op.default_dtype),
    }


# Types whose values are torch attributes, by the key under which an argument says so.
TORCH_TYPES: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
    "device": torch.device,
}
_SIMPLE: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: lambda value: value,
    str: lambda value: value,
    float: lambda value: {"float": number_out(value)},
    complex: lambda value: {"complex": [number_out(value.real), number_out(value.imag)]},
    Ref: lambda value: {"ref": _ref(value)},
}


def argument_out(value: Any) -> Any:
    """An operator's argument: null, booleans, integers and strings as they are, a list for a tuple, else an object that
    names the type."""
    if isinstance(value, (list, tuple)):
        return [argument_out(item) for item in value]
    for kind, cls in TORCH_TYPES.items():
        if isinstance(value, cls):
            return {kind: name_of(value)}
    make = _SIMPLE.get(type(value))
    if make is None:
        raise ValueError(f"an operator's argument of type {type(value).__name__} cannot be written")
    return make(value)
