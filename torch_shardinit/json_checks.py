"""Values of a JSON text, checked one by one. Each function takes the value and its place in the text, for messages."""

from __future__ import annotations

import math
import re
import struct
import sys
from typing import Any

MAX_NAME = 4096
INT64 = 1 << 63
_NAN = re.compile(r"nan:([7f]ff[0-9a-f]{13})")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"an object's keys must be distinct, got {[key for key, _ in pairs][:8]}")
    return found


def no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 70 else "a larger int"
    return text if len(text) <= 80 else text[:77] + "..."


def object_of(value: object, where: str, *keys: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be an object with {', '.join(keys)}, got {shown(value)}")
    for key in keys:
        if key not in value:
            raise ValueError(f"{where}: must have {key!r}")
    for key in value:
        if key not in keys:
            raise ValueError(f"{where}: must have no {shown(key)}")
    return value


def list_of(value: object, where: str, most: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (most is not None and len(value) > most):
        limit = "" if most is None else f" of at most {most}"
        raise ValueError(f"{where}: must be a list{limit}, got {shown(value)}")
    return value


def int_of(value: object, where: str, low: int = 0, high: int = INT64 - 1) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{where}: must be an int in [{low}, {high}], got {shown(value)}")
    return value


def bool_of(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{where}: must be true or false, got {shown(value)}")
    return value


def str_of(value: object, where: str, most: int = MAX_NAME) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise ValueError(f"{where}: must be a string of at most {most} characters, got {shown(value)}")
    return value


def one_of(value: object, where: str, allowed: Any) -> Any:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{where}: must be one of {', '.join(allowed)}, got {shown(value)}")
    return allowed[value] if isinstance(allowed, dict) else value


def float_of(value: object, where: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    if isinstance(value, str):
        if value in ("inf", "-inf", "nan"):
            return float(value)
        match = _NAN.fullmatch(value)
        if match:
            number = struct.unpack(">d", bytes.fromhex(match[1]))[0]
            if math.isnan(number):
                return float(number)
    raise ValueError(f"{where}: must be a number, inf, -inf or nan, got {shown(value)}")
