"""Ctrl-C: a long fill or digest answers within a second, and what comes after it is as ever."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import torch_shardinit as shardinit
from torch_shardinit import _native

NUM_ELEMENTS = 1 << 28  # seconds of work for the least instruction set


class _Interrupted(Exception):
    pass


class _Alarm:
    """Raises _Interrupted from a signal handler 0.2 s after start."""

    def __init__(self) -> None:
        self.rung = 0.0

    def start(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.2)

    def ring(self, *_: object) -> None:
        self.rung = time.monotonic()
        raise _Interrupted

    def seconds_since(self) -> float:
        assert self.rung, "it never rang"
        return time.monotonic() - self.rung


@pytest.fixture
def alarm() -> Iterator[_Alarm]:
    alarm = _Alarm()
    before = signal.signal(signal.SIGALRM, alarm.ring)
    _native.force_isa("baseline")
    yield alarm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    _native.force_isa("")


CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "fill": lambda t: shardinit.normal_(t, 0.5, tensor_id=1),
    "strided fill": lambda t: shardinit.normal_(t.view(-1, 2).t(), 0.5, tensor_id=1),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_a_signal_stops_a_long_fill(alarm: _Alarm, name: str, threads: int) -> None:
    target = torch.empty(NUM_ELEMENTS, dtype=torch.float8_e5m2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alarm.start()
        with pytest.raises(_Interrupted):
            CALLS[name](target)
        assert alarm.seconds_since() < 1.0
    finally:
        torch.set_num_threads(before)
    part = target[:1000]
    CALLS["fill"](part)
    assert torch.equal(part.float(), shardinit.normal_(torch.empty(1000), 0.5, tensor_id=1).to(part.dtype).float())


def test_a_signal_stops_a_long_decomposition(alarm: _Alarm) -> None:
    matrix = torch.eye(6000, dtype=torch.float64)
    alarm.start()
    with pytest.raises(_Interrupted):
        _native.orthonormalise(matrix.data_ptr(), 6000, 6000, 2)
    assert alarm.seconds_since() < 2.0  # a panel may take half a second where others work too
    assert torch.equal(matrix, torch.eye(6000, dtype=torch.float64))


def test_a_signal_stops_a_long_digest(alarm: _Alarm) -> None:
    memory = torch.zeros(1 << 26, dtype=torch.uint8)
    pieces = [(memory.data_ptr(), 1, (1 << 26,), (1,), k << 26, (1,)) for k in range(200)]
    alarm.start()
    with pytest.raises(_Interrupted):
        _native.digest(pieces, 1)
    assert alarm.seconds_since() < 1.0
    assert _native.digest(pieces[:1], 1) == _native.digest(pieces[:1], 2)
