"""JSON text to a Plan: every value is checked before it is used, and a message names its place in the text."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from typing import Any

import torch

from . import _native
from . import region as rg
from .derive import locate
from .draws import DTYPE_CODES
from .json_checks import (
    INT64,
    bool_of,
    float_of,
    int_of,
    list_of,
    no_constant,
    object_of,
    one_of,
    shown,
    str_of,
    unique_keys,
)
from .native import dtype_name
from .plan import Entry, Plan
from .plan_json import FORMAT, FORMAT_VERSION, TORCH_TYPES
from .plan_operators import check_in_bounds, check_on_meta, operator
from .program import (
    ANY_DTYPE,
    COMPOSITE,
    OVERWRITING,
    UNARY,
    Exact,
    Played,
    PlayedDraw,
    PlayedExact,
    PlayedItem,
    PlayedOp,
    Program,
    Ref,
    Step,
    Unwritten,
)
from .region import Box
from .stream import STREAM_VERSION

MAX_TEXT_BYTES = 1 << 26
# What the storages of one played tensor may hold, beside 64 times the tensor.
MAX_PLAYED_BYTES = 1 << 30
_MAX_DIMS = 64
_MAX_STEPS = 2048
_MAX_BOXES = 1 << 14
_MAX_DEPTH = 8
_MAX_PLAYED = 1 << 16  # operations, and storages
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_DEFAULT_DTYPES = ("float32", "float64", "float16", "bfloat16")
_NAMES = {
    "dtype": _DTYPES,
    "layout": {"strided": torch.strided},
    "memory_format": {
        name: getattr(torch, name)
        for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
    },
    "device": {"cpu": torch.device("cpu"), "meta": torch.device("meta")},
}


def plan_of(text: str | bytes, max_bytes: int = MAX_TEXT_BYTES, max_played_bytes: int = MAX_PLAYED_BYTES) -> Plan:
    """The Plan of a JSON text; see Plan.from_json."""
    if not isinstance(text, (str, bytes, bytearray)):
        raise TypeError(f"Plan.from_json: text must be str or bytes, got {type(text).__name__}")
    if len(text) > max_bytes:
        raise ValueError(f"Plan.from_json: the text must be at most {max_bytes} bytes, got {len(text)}")
    try:
        value = json.loads(text, object_pairs_hook=unique_keys, parse_constant=no_constant)
        return _Reader(max_played_bytes).plan(value)
    except RecursionError:
        raise ValueError("Plan.from_json: the text is nested too deeply") from None
    except ValueError as error:  # json's errors are such
        raise ValueError(f"Plan.from_json: {error}") from None


def _sizes(value: object, where: str) -> tuple[int, ...]:
    items = list_of(value, where, _MAX_DIMS)
    sizes = tuple(int_of(size, f"{where}[{d}]") for d, size in enumerate(items))
    if math.prod(sizes) >= INT64:
        raise ValueError(f"{where}: must hold fewer than 2^63 elements, got {list(sizes)}")
    return sizes


def _region(value: object, where: str, shape: tuple[int, ...]) -> Box | None:
    if value is None:
        return None
    spans = list_of(value, where, _MAX_DIMS)
    if len(spans) != len(shape):
        raise ValueError(f"{where}: must have a span for each of {len(shape)} dimensions, got {len(spans)}")
    box = []
    for d, (item, extent) in enumerate(zip(spans, shape, strict=True)):
        here = f"{where}[{d}]"
        if len(list_of(item, here)) != 3:
            raise ValueError(f"{here}: must be [start, step, size], got {shown(item)}")
        start, step, size = (int_of(number, f"{here}[{i}]") for i, number in enumerate(item))
        if step < 1 or size < 1 or start + (size - 1) * step >= extent:
            raise ValueError(f"{here}: must lie in a dimension of {extent}, got [{start}, {step}, {size}]")
        box.append(rg.span(start, step, size))
    return tuple(box)


def _steps(value: object, where: str, shape: tuple[int, ...]) -> tuple[Step, ...]:
    steps = []
    for index, item in enumerate(list_of(value, where, _MAX_STEPS)):
        here = f"{where}[{index}]"
        step = object_of(item, here, "op", "args", "region")
        op = one_of(step["op"], f"{here}.op", [*OVERWRITING, *UNARY])
        args = tuple(float_of(x, f"{here}.args[{i}]") for i, x in enumerate(list_of(step["args"], f"{here}.args", 4)))
        try:
            made = Step(op, args, _region(step["region"], f"{here}.region", shape))
        except ValueError as error:
            raise error if str(error).startswith(where) else ValueError(f"{here}: {error}") from None
        if op == "eye" and not (all(dim in range(len(shape)) for dim in args) and args[0] != args[1]):
            raise ValueError(f"{here}.args: must be two dimensions of {len(shape)}, got {list(args)}")
        steps.append(made)
    return tuple(steps)


def _exact(steps: tuple[Step, ...], where: str, shape: tuple[int, ...], dtype: torch.dtype, whole: bool) -> Exact:
    if dtype_name(dtype) not in DTYPE_CODES and 0 not in shape:
        raise ValueError(f"{where}: exact steps must be for one of {', '.join(DTYPE_CODES)}, got {dtype}")
    program = Exact(steps)
    try:
        pieces = program.straight(rg.full_box(shape), _MAX_BOXES)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    for _, chain in pieces:
        if whole and not chain:
            raise ValueError(f"{where}: the steps must write every element")
        count = sum(0 if step.overwrites else 2 if step.op == "clamp" else 1 for step in chain)
        if count > _native.MAX_UNARY:
            raise ValueError(f"{where}: must be at most {_native.MAX_UNARY} steps on one element, got {count}")
    return program


class _Reader:
    def __init__(self, max_played_bytes: int) -> None:
        self.max_played_bytes = max_played_bytes

    def plan(self, value: object) -> Plan:
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError(f"format: must be {FORMAT!r}, the JSON of a Plan")
        for key, known in (("format_version", FORMAT_VERSION), ("stream_version", STREAM_VERSION)):
            if type(value.get(key)) is not int or value[key] != known:
                raise ValueError(f"{key}: must be {known}, which this version knows, got {shown(value.get(key))}")
        top = object_of(value, "the text", "format", "format_version", "stream_version", "tensors")
        entries = [self._entry(item, f"tensors[{i}]") for i, item in enumerate(list_of(top["tensors"], "tensors"))]
        return Plan(entries, top["stream_version"])

    def _entry(self, value: object, where: str) -> Entry:
        keys = ("name", "aliases", "kind", "shape", "dtype", "persistent", "kept", "program")
        item = object_of(value, where, *keys)
        name = str_of(item["name"], f"{where}.name")
        aliases = tuple(
            str_of(alias, f"{where}.aliases[{i}]")
            for i, alias in enumerate(list_of(item["aliases"], f"{where}.aliases"))
        )
        if list(aliases) != sorted(set(aliases)) or name != (aliases or (None,))[0]:
            raise ValueError(
                f"{where}.aliases: must be distinct, sorted, and begin with the name, got {shown(aliases)}"
            )
        kind = one_of(item["kind"], f"{where}.kind", ("parameter", "buffer"))
        shape = _sizes(item["shape"], f"{where}.shape")
        dtype = one_of(item["dtype"], f"{where}.dtype", _DTYPES)
        program = self._program(item["program"], f"{where}.program", shape, dtype)
        kept = bool_of(item["kept"], f"{where}.kept")
        if kept and not isinstance(program, Unwritten):
            raise ValueError(f"{where}.kept: must be false for a tensor that a program writes")
        return Entry(
            name, aliases, kind, shape, dtype, program, bool_of(item["persistent"], f"{where}.persistent"), kept
        )

    def _program(self, value: object, where: str, shape: tuple[int, ...], dtype: torch.dtype) -> Program:
        kinds = {
            "exact": ("class", "drawn_as", "steps"),
            "played": ("class", "ops", "out", "num_bytes", "constants", "check_unwritten"),
            "unwritten": ("class", "reason"),
        }
        kind = value.get("class") if isinstance(value, dict) else None
        item = object_of(value, where, *one_of(kind, f"{where}.class", kinds))
        if kind == "unwritten":
            return Unwritten(str_of(item["reason"], f"{where}.reason"))
        if kind == "exact":
            steps = _steps(item["steps"], f"{where}.steps", shape)
            program = _exact(steps, f"{where}.steps", shape, dtype, whole=True)
            drawn_as = item["drawn_as"]
            return Exact(program.steps, None if drawn_as is None else str_of(drawn_as, f"{where}.drawn_as"))
        return self._played(item, where, shape, dtype)

    def _played(self, item: dict[str, Any], where: str, shape: tuple[int, ...], dtype: torch.dtype) -> Played:
        num_bytes = tuple(
            int_of(size, f"{where}.num_bytes[{i}]")
            for i, size in enumerate(list_of(item["num_bytes"], f"{where}.num_bytes", _MAX_PLAYED))
        )
        limit = self.max_played_bytes + 64 * math.prod(shape) * dtype.itemsize
        if sum(num_bytes) > limit:
            raise ValueError(
                f"{where}.num_bytes: the storages must hold at most {limit} bytes, got {sum(num_bytes)} (raise "
                "max_played_bytes if you trust the text)"
            )
        constants = {}
        if not isinstance(item["constants"], dict):
            raise ValueError(f"{where}.constants: must be an object, got {shown(item['constants'])}")
        for key, data in item["constants"].items():
            here = f"{where}.constants[{shown(key)}]"
            if not re.fullmatch("[0-9]{1,9}", key) or int(key) >= len(num_bytes) or str(int(key)) != key:
                raise ValueError(f"{here}: must be the number of one of the {len(num_bytes)} storages")
            constants[int(key)] = _constant(data, here, num_bytes[int(key)])
        out = _ref(item["out"], f"{where}.out", num_bytes)
        if (out.sizes, out.dtype) != (shape, dtype):
            raise ValueError(f"{where}.out: must have the tensor's shape and dtype, {list(shape)} and {dtype}")
        ops = tuple(
            _item(op, f"{where}.ops[{i}]", num_bytes)
            for i, op in enumerate(list_of(item["ops"], f"{where}.ops", _MAX_PLAYED))
        )
        check = bool_of(item["check_unwritten"], f"{where}.check_unwritten")
        played = Played(ops, out, num_bytes, constants, check)
        check_on_meta(played, lambda index: f"{where}.ops[{index}]")
        return played


def _constant(data: object, where: str, num_bytes: int) -> torch.Tensor:
    text = str_of(data, where, 4 * (num_bytes // 3 + 1))
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{where}: must be base64") from None
    if len(raw) != num_bytes:
        raise ValueError(f"{where}: must hold the {num_bytes} bytes of its storage, got {len(raw)}")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def _ref(value: object, where: str, num_bytes: tuple[int, ...]) -> Ref:
    parts = list_of(value, where, 5)
    if len(parts) != 5:
        raise ValueError(f"{where}: must be [storage, offset, sizes, strides, dtype], got {shown(value)}")
    sizes = _sizes(parts[2], f"{where}[2]")
    strides = tuple(int_of(s, f"{where}[3][{d}]") for d, s in enumerate(list_of(parts[3], f"{where}[3]", _MAX_DIMS)))
    if len(strides) != len(sizes):
        raise ValueError(f"{where}[3]: must be as many strides as sizes, got {len(strides)} for {len(sizes)}")
    ref = Ref(
        int_of(parts[0], f"{where}[0]"),
        int_of(parts[1], f"{where}[1]"),
        sizes,
        strides,
        one_of(parts[4], f"{where}[4]", _DTYPES),
    )
    try:
        check_in_bounds(ref, num_bytes)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return ref


def _item(value: object, where: str, num_bytes: tuple[int, ...]) -> PlayedItem:
    if isinstance(value, dict) and "exact" in value:
        item = object_of(value, where, "exact", "draw", "view", "steps")
        view = _ref(item["view"], f"{where}.view", num_bytes)
        steps = _steps(item["steps"], f"{where}.steps", view.sizes)
        program = _exact(steps, f"{where}.steps", view.sizes, view.dtype, whole=False)
        return PlayedExact(
            str_of(item["exact"], f"{where}.exact"), view, program, int_of(item["draw"], f"{where}.draw")
        )
    if isinstance(value, dict) and "composite" in value:
        return _composite(value, where, num_bytes)
    item = object_of(value, where, "op", "args", "kwargs", "fresh", "default_dtype")
    op = str_of(item["op"], f"{where}.op")
    try:
        operator(op)
    except ValueError as error:
        raise ValueError(f"{where}.op: {error}") from None
    args = tuple(
        _argument(x, f"{where}.args[{i}]", num_bytes, 0) for i, x in enumerate(list_of(item["args"], f"{where}.args"))
    )
    if not isinstance(item["kwargs"], dict):
        raise ValueError(f"{where}.kwargs: must be an object, got {shown(item['kwargs'])}")
    kwargs = tuple(
        (key, _argument(x, f"{where}.kwargs[{shown(key)}]", num_bytes, 0)) for key, x in item["kwargs"].items()
    )
    fresh = []
    for i, pair in enumerate(list_of(item["fresh"], f"{where}.fresh")):
        here = f"{where}.fresh[{i}]"
        if len(list_of(pair, here)) != 2:
            raise ValueError(f"{here}: must be [which result, view], got {shown(pair)}")
        fresh.append((int_of(pair[0], f"{here}[0]", 0, 1 << 16), _ref(pair[1], f"{here}[1]", num_bytes)))
    default = _DTYPES[one_of(item["default_dtype"], f"{where}.default_dtype", _DEFAULT_DTYPES)]
    return PlayedOp(op, args, kwargs, tuple(fresh), default)


def _composite(value: dict[str, Any], where: str, num_bytes: tuple[int, ...]) -> PlayedDraw:
    item = object_of(value, where, "composite", "args", "name", "draw", "owner", "view", "region")
    op = one_of(item["composite"], f"{where}.composite", list(COMPOSITE))
    args = tuple(float_of(x, f"{where}.args[{i}]") for i, x in enumerate(list_of(item["args"], f"{where}.args", 8)))
    owner = _ref(item["owner"], f"{where}.owner", num_bytes)
    view = _ref(item["view"], f"{where}.view", num_bytes)
    region = _region(item["region"], f"{where}.region", owner.sizes)
    if len(args) != len(COMPOSITE[op]) or not all(map(math.isfinite, args)):
        raise ValueError(f"{where}.args: must be finite {', '.join(COMPOSITE[op])}, got {list(args)}")
    if op in ("sparse_", "bernoulli") and not 0 <= args[0] <= 1:
        raise ValueError(f"{where}.args[0]: must be in [0, 1], got {args[0]}")
    if op == "random" and not (args[0] == int(args[0]) and args[1] == int(args[1]) and 0 < args[1] - args[0] < 2**64):
        raise ValueError(f"{where}.args: must be integers low < high, less than 2^64 apart, got {list(args)}")
    least, most = {"orthogonal_": (2, _MAX_DIMS), "sparse_": (2, 2), "permutation": (1, 1)}.get(op, (0, _MAX_DIMS))
    if not least <= len(view.sizes) <= most:
        raise ValueError(f"{where}.view: must have {least} to {most} dimensions, got shape {list(view.sizes)}")
    fits = not view.dtype.is_complex if op in ANY_DTYPE else dtype_name(view.dtype) in DTYPE_CODES
    place = locate(owner, view) if owner.storage == view.storage and owner.dtype == view.dtype else object()
    if place != region or not fits or (region is None and owner.numel() != view.numel()):
        raise ValueError(f"{where}.view: must be the box region of its owner, of a dtype that the operation takes")
    return PlayedDraw(
        op, args, str_of(item["name"], f"{where}.name"), owner, view, region, int_of(item["draw"], f"{where}.draw")
    )


def _argument(value: object, where: str, num_bytes: tuple[int, ...], depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int_of(value, where, -INT64, 2 * INT64 - 1)
    if isinstance(value, str):
        return str_of(value, where, 64)
    if isinstance(value, list):
        if depth == _MAX_DEPTH:
            raise ValueError(f"{where}: must be nested at most {_MAX_DEPTH} deep")
        return tuple(_argument(item, f"{where}[{i}]", num_bytes, depth + 1) for i, item in enumerate(value))
    if isinstance(value, dict) and len(value) == 1:
        ((kind, inner),) = value.items()
        here = f"{where}.{kind}"
        if kind in TORCH_TYPES:
            return one_of(inner, here, _NAMES[kind])
        if kind == "ref":
            return _ref(inner, here, num_bytes)
        if kind == "float":
            return float_of(inner, here)
        if kind == "complex" and len(list_of(inner, here)) == 2:
            return complex(float_of(inner[0], f"{here}[0]"), float_of(inner[1], f"{here}[1]"))
    raise ValueError(f"{where}: must be a JSON value or an object that names a type of torch, got {shown(value)}")
