"""Python's and NumPy's random numbers in init code: refused, with the line that asks for them.

They are numbers when a recording sees them, so they would be the same for every seed and, where ranks seed these
generators each for itself, differ between ranks. While a recording is on, the functions of `random` and `numpy.random`
raise in its thread, and so does a NumPy generator without a seed. What came by another way (`from random import
random`, before the recording) moves the generator's state, which is compared at every recorded operation.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.random import bit_generator

from .errors import RecordError
from .recorder import where
from .tape import Node

_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
_NUMPY: Any = np.random.rand.__self__  # type: ignore[attr-defined]
_READS = frozenset({"getstate", "get_state"})
_SETS = frozenset({"seed", "setstate", "set_state"})
_WAYS_OUT = (
    "a recording would take the numbers as constants, the same for every seed and maybe others on every rank. Draw "
    "them with torch, or outside of the init code"
)


class OtherGenerators:
    """The states of the two global generators, as a recording left them."""

    def __init__(self) -> None:
        self._before = random.getstate(), np.random.get_state()
        self._python = self._before[0]
        self._position = _numpy_position()
        self._last: Node | None = None
        self.rebase()

    def rebase(self) -> None:
        """Init code set a state (a seed), which is no draw."""
        self._python, self._numpy = random.getstate(), _comparable(np.random.get_state())
        self._numpy_at = self._position.value if self._position is not None else 0

    def look(self, node: Node) -> None:
        """Raises RecordError where a generator has moved since the last node. It takes ten microseconds."""
        python = random.getstate() != self._python
        if python or (self._position is not None and self._position.value != self._numpy_at):
            name = "random" if python else "numpy.random"
            raise RecordError(_message(f"draws from {name} between {self._since()} and {node.line}"))
        self._last = node

    def end(self, *, check: bool) -> None:
        """Puts the states back. check: raises where one moved without being set."""
        moved = "random" if random.getstate() != self._python else None
        moved = "numpy.random" if _comparable(np.random.get_state()) != self._numpy else moved
        random.setstate(self._before[0])
        np.random.set_state(self._before[1])
        if check and moved is not None:
            raise RecordError(_message(f"draws from {moved} after {self._since()}"))

    def _since(self) -> str:
        return self._last.line if self._last is not None else "the start of the recording"


def _message(what: str) -> str:
    return f"init code must draw its random numbers from torch, got {what}: {_WAYS_OUT}"


def _comparable(state: Any) -> tuple[Any, ...]:
    kind, key, *rest = state
    return kind, np.asarray(key).tobytes(), *rest


def _numpy_position() -> ctypes.c_int | None:
    """Where NumPy's Mersenne Twister keeps its place in its 624 words, which every draw moves; None if it is another
    generator, or not kept so."""
    try:
        address = _NUMPY._bit_generator.ctypes.state_address
        position = ctypes.c_int.from_address(address + 624 * 4)
        state: Any = np.random.get_state()
        return position if state[0] == "MT19937" and position.value == state[2] else None
    except (AttributeError, TypeError):
        return None


# ---- the functions that raise -------------------------------------------------------------------------------------

_lock = threading.Lock()
_undo = contextlib.ExitStack()
_users = 0
_recording = threading.local()


def _current() -> OtherGenerators | None:
    return getattr(_recording, "generators", None)


def _refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _current() is not None:
            raise RecordError(_message(f"{name}() at {where()}"))
        return function(*args, **kwargs)

    return call


def _setting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        current = _current()
        if current is not None:
            current.rebase()
        return result

    return call


def _entropy(function: Callable[..., Any]) -> Callable[..., Any]:
    """NumPy asks for entropy where a new generator has no seed; modules may make some when they are imported."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _current() is not None and not _is_importing():
            raise RecordError(_message(f"a NumPy generator without a seed at {where()}"))
        return function(*args, **kwargs)

    return call


def _is_importing() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _patch(holder: Any, name: str, value: Any) -> None:
    missing = object()
    before = vars(holder).get(name, missing)
    setattr(holder, name, value)
    _undo.callback(lambda: delattr(holder, name) if before is missing else setattr(holder, name, before))


def _install() -> None:
    for module, owner, others in ((random, _PYTHON, ()), (np.random, _NUMPY, ("ranf", "sample", "seed"))):
        for name, function in [*vars(module).items()]:
            if name not in _READS and (getattr(function, "__self__", None) is owner or name in others):
                wrapped = _setting(function) if name in _SETS else _refusing(f"{module.__name__}.{name}", function)
                _patch(module, name, wrapped)
    # What was imported by name (`from random import uniform`) ends up here.
    for name in ("random", "getrandbits"):
        _patch(_PYTHON, name, _refusing(f"random.{name}", getattr(_PYTHON, name)))
    if hasattr(bit_generator, "randbits"):
        _patch(bit_generator, "randbits", _entropy(bit_generator.randbits))


@contextlib.contextmanager
def refused() -> Iterator[OtherGenerators]:
    """Within this, in this thread, the two modules' functions raise; both generators are where they were at the end."""
    global _users
    generators = OtherGenerators()
    with _lock:
        _users += 1
        if _users == 1:
            _install()
    _recording.generators = generators
    failed = True
    try:
        yield generators
        failed = False
    finally:
        _recording.generators = None
        with _lock:
            _users -= 1
            if not _users:
                _undo.close()
        generators.end(check=not failed)
