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


@pytest.fixture
def alarm() -> Iterator[list[float]]:
    """Raises _Interrupted from a signal handler in 0.2 s; the list holds when it did."""
    rung: list[float] = []

    def ring(*_: object) -> None:
        rung.append(time.monotonic())
        raise _Interrupted

    before = signal.signal(signal.SIGALRM, ring)
    _native.force_isa("baseline")
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    yield rung
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    _native.force_isa("")


CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "fill": lambda t: shardinit.normal_(t, 0.5, tensor_id=1),
    "strided fill": lambda t: shardinit.normal_(t.view(-1, 2).t(), 0.5, tensor_id=1),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_a_signal_stops_a_long_fill(alarm: list[float], name: str, threads: int) -> None:
    target = torch.empty(NUM_ELEMENTS, dtype=torch.float8_e5m2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.raises(_Interrupted):
            CALLS[name](target)
        assert alarm and time.monotonic() - alarm[0] < 1.0
    finally:
        torch.set_num_threads(before)
    part = target[:1000]
    CALLS["fill"](part)
    assert torch.equal(part.float(), shardinit.normal_(torch.empty(1000), 0.5, tensor_id=1).to(part.dtype).float())


def test_a_signal_stops_a_long_decomposition(alarm: list[float]) -> None:
    matrix = torch.eye(6000, dtype=torch.float64)
    with pytest.raises(_Interrupted):
        _native.orthonormalise(matrix.data_ptr(), 6000, 6000, 2)
    assert alarm and time.monotonic() - alarm[0] < 2.0  # a panel may take half a second where others work too
    assert torch.equal(matrix, torch.eye(6000, dtype=torch.float64))


def test_a_signal_stops_a_long_digest(alarm: list[float]) -> None:
    memory = torch.zeros(1 << 26, dtype=torch.uint8)
    pieces = [(memory.data_ptr(), 1, (1 << 26,), (1,), k << 26, (1,)) for k in range(200)]
    with pytest.raises(_Interrupted):
        _native.digest(pieces, 1)
    assert alarm and time.monotonic() - alarm[0] < 1.0
    assert _native.digest(pieces[:1], 1) == _native.digest(pieces[:1], 2)
