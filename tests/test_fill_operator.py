"""A raw fill calls the kernels itself; where something of torch watches operators, it calls the operator, and the bytes
are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_shardinit as shardinit
from torch_shardinit import ops
from torch_shardinit.draws import check_draw

NAME = "torch_shardinit::fill_"


def fill(tensor: torch.Tensor) -> torch.Tensor:
    return shardinit.normal_(tensor, 0.5, seed=-3, tensor_id=2**63 + 5, offset=7)


def want() -> torch.Tensor:
    return fill(torch.zeros(33))


class Dispatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._schema.name if hasattr(func, "_schema") else "")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Dispatch, Function])
def test_modes_see_the_operator(mode: Callable[[], Any]) -> None:
    tensor = torch.zeros(33)
    with mode() as watching:
        fill(tensor)
    assert watching.seen.count(NAME) == 1
    assert torch.equal(tensor, want())


def test_traces_hold_the_operator() -> None:
    graph = make_fx(fill)(torch.zeros(33))
    assert "torch.ops.torch_shardinit.fill_.default" in graph.code
    tensor = torch.zeros(33)
    graph(tensor)
    assert torch.equal(tensor, want())


def test_the_profiler_sees_the_operator() -> None:
    with torch.profiler.profile() as profile:
        fill(torch.zeros(33))
    assert NAME in [event.key for event in profile.key_averages()]


def test_compiled_and_inside_torch_func_the_bytes_are_the_same() -> None:
    compiled = torch.compile(lambda tensor: fill(tensor), backend="eager")(torch.zeros(33))
    assert torch.equal(compiled, want())
    outside = torch.zeros(33)
    torch.vmap(lambda row: row + fill(outside))(torch.zeros(2, 33))
    assert torch.equal(outside, want())


def test_the_operator_is_not_called_where_nothing_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(ops, "_OPERATOR", lambda *args: calls.append(args))
    assert torch.equal(fill(torch.zeros(33)), want()) and bool(want().any())
    fill(torch.nn.Parameter(torch.zeros(33)))
    assert not calls
    with Function():
        fill(torch.zeros(33))
    assert len(calls) == 1


def test_the_operator_checks_memory_itself() -> None:
    tensor = torch.zeros(8)
    tensor.untyped_storage().resize_(4)
    with pytest.raises(ValueError, match="fill: tensor must lie in its storage, got one that needs 32 bytes of 4"):
        torch.ops.torch_shardinit.fill_(tensor, "normal", [1.0, 0.0], 0, 0, 0, [1])


def test_checked_parameters_are_told_apart() -> None:
    """They are remembered by their bits, the dtype and the function."""
    for low in (0.0, -0.0, 0.0):
        assert str(check_draw("uniform", (low, 1.0), "float32", "uniform_")[0]) == str(low)
    assert check_draw("normal", (0.1, 0.0), "float64", "normal_")[0] == 0.1
    assert check_draw("normal", (0.1, 0.0), "float32", "normal_")[0] != 0.1
    for function in ("normal_", "other_"):
        for _ in range(2):  # an error is not remembered
            with pytest.raises(ValueError, match=f"^{function}: std must be finite"):
                check_draw("normal", (-1.0, 0.0), "float32", function)
    for number in range(5000):  # more than are kept
        assert check_draw("normal", (float(number), 0.0), "float32", "normal_") == (float(number), 0.0)
    for value in (True, "1", None):
        with pytest.raises(TypeError, match="must be a real number"):
            check_draw("normal", (1.0, value), "float32", "normal_")
