"""Names, seeds and ids of the stream (docs/stream.md, section 1)."""

from __future__ import annotations

import hashlib
import warnings

import numpy as np

STREAM_VERSION = 1

_ID_PREFIX = b"torch_shardinit stream 1\0"
_MASK64 = (1 << 64) - 1

_default_seed = 0
_seed_was_set = False
_warned_about_seed = False


def is_plain_int(value: object) -> bool:
    """Whether ``value`` is an int here: a Python int or NumPy integer, never a bool, a duration or an array."""
    return type(value) is int or (isinstance(value, np.integer) and not isinstance(value, np.timedelta64))


def as_int(value: object, what: str) -> int:
    """``value`` as a Python int.

    Raises:
        TypeError: it is no int (bool, float and tensors are none).
    """
    if type(value) is int:
        return value
    if not is_plain_int(value):
        raise TypeError(f"{what} must be an int, got {value!r} ({type(value).__name__})")
    return int(value)  # type: ignore[call-overload]


def key_of_seed(seed: object, what: str = "seed") -> int:
    """The Philox key of a seed: seed mod 2^64.

    Raises:
        TypeError: the seed is no int.
        ValueError: the seed is outside [-2^63, 2^64).
    """
    value = as_int(seed, what)
    if not -(1 << 63) <= value <= _MASK64:
        raise ValueError(f"{what} must be in [-2^63, 2^64), got {value}")
    return value & _MASK64


def manual_seed(seed: int) -> None:
    """Sets the process default seed, an int in [-2^63, 2^64). Until this is called it is 0.

    It is apart from ``torch.manual_seed``, which this library never reads.
    """
    global _default_seed, _seed_was_set
    _default_seed = key_of_seed(seed)
    _seed_was_set = True


def resolve_seed(seed: object, *, warn_for: str | None = None) -> int:
    """The key for ``seed``; for None that of the process default.

    ``warn_for`` names a model-level call: falling back on a default that nobody set then warns, once a process, since
    people expect ``torch.manual_seed`` to count.
    """
    global _warned_about_seed
    if seed is not None:
        return key_of_seed(seed)
    if warn_for and not _seed_was_set and not _warned_about_seed:
        _warned_about_seed = True
        warnings.warn(
            f"{warn_for}: no seed given, so the process default 0 is used; torch.manual_seed is not read. "
            "Pass seed=... or call torch_shardinit.manual_seed(...).",
            stacklevel=3,
        )
    return _default_seed


def tensor_id(name: str, draw: int = 0) -> int:
    """The id of a named tensor in the stream: 64 bits of SHA-256 (docs/stream.md, section 1).

    Args:
        name: the tensor's canonical name in the whole, unsharded model.
        draw: which of the tensor's draws, in [0, 2^64); 0 is its own in-place one.

    Raises:
        TypeError: name is no str or draw no int.
        ValueError: name has no UTF-8 form, or draw is out of range.
    """
    if not isinstance(name, str):
        raise TypeError(f"tensor_id: name must be a str, got {name!r} ({type(name).__name__})")
    number = as_int(draw, "tensor_id: draw")
    if not 0 <= number <= _MASK64:
        raise ValueError(f"tensor_id: draw must be in [0, 2^64), got {number}")
    try:
        encoded = name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"tensor_id: name must have a UTF-8 form, got {name!r}") from error
    digest = hashlib.sha256(_ID_PREFIX + number.to_bytes(8, "little") + encoded).digest()
    return int.from_bytes(digest[:8], "little")
