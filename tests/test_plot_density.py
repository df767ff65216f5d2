"""The densities that pictures draw are those of the values; bins and single values follow a narrow dtype's rounding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from torch_shardinit.plan import Entry, Plan
from torch_shardinit.plot_density import Density, density_of
from torch_shardinit.plot_plan import bin_edges, in_dtype
from torch_shardinit.program import Exact, Step
from torch_shardinit.region import Span


def one_tensor(steps: tuple[Step, ...], shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Plan:
    return Plan([Entry("w", ("w",), "parameter", shape, dtype, Exact(steps))])


SHAPE = (300, 200)
PROGRAMS = {
    "uniform": (Step("uniform", (-0.5, 2.0)),),
    "normal": (Step("normal", (0.02, 0.1)),),
    "trunc_normal": (Step("trunc_normal", (0.02, 0.0, -0.03, 0.05)),),
    "tail": (Step("trunc_normal", (1.0, 0.0, 5.0, math.inf)),),
    "affine": (Step("normal", (2.0, 1.0)), Step("mul", (-0.3,)), Step("add", (4.0,)), Step("div", (2.0,))),
    "sub, neg": (Step("uniform", (0.0, 1.0)), Step("sub", (0.25,)), Step("neg")),
    "clamp": (Step("normal", (1.0, 0.5)), Step("clamp", (-1.0, 1.0)), Step("neg"), Step("mul", (3.0,))),
    "clamp twice": (Step("uniform", (0, 1)), Step("neg"), Step("clamp", (-0.75, math.inf)), Step("clamp", (-2, -0.5))),
    "clamp a truncated one": (Step("trunc_normal", (1.0, 0.0, -2.0, 2.0)), Step("clamp", (0.0, math.inf))),
    "regions": (
        Step("normal", (1.0, 0.0)),
        Step("fill", (0.0,), (Span(0, 1, 30), Span(0, 1, 200))),
        Step("uniform", (2.0, 5.0), (Span(100, 2, 70), Span(0, 1, 200))),
        Step("mul", (0.5,), (Span(0, 1, 150), Span(0, 1, 200))),
    ),
    "eye": (Step("normal", (1.0, 0.0)), Step("eye", (0.0, 1.0), (Span(10, 1, 100), Span(0, 1, 150)))),
}  # fmt: skip


def values_of(plan: Plan, num_elements: int, dtype: torch.dtype = torch.float64) -> np.ndarray:
    values: np.ndarray = plan.fill_("w", torch.empty(num_elements, dtype=dtype), offset=0, seed=3).double().numpy()
    return values


def cdf(density: Density, ends: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """(points, probability of a smooth part's value up to there), by the trapezoid rule."""
    x = np.linspace(*ends, 1_000_001)
    heights = density.at(x)
    return x, np.concatenate([[0.0], np.cumsum((heights[1:] + heights[:-1]) / 2 * np.diff(x))])


@pytest.mark.parametrize("name", PROGRAMS)
def test_density_is_that_of_the_values(name: str) -> None:
    """The values are fixed, so that nothing is left to chance; the bounds are those of one false alarm in 1,000."""
    plan = one_tensor(PROGRAMS[name], SHAPE)
    n = math.prod(SHAPE) - 50  # ends inside a row
    program = plan.entries["w"].program
    assert isinstance(program, Exact)
    density = density_of(program, SHAPE, n)
    assert density is not None
    values = values_of(plan, n)
    for value, share in density.atoms.items():
        assert abs((values == value).sum() / n - share) <= 3.3 * math.sqrt(share * (1 - share) / n), value
        values = values[values != value]
    ends = [end for part in density.smooth for end in part.ends()]
    low = min(ends) if math.isfinite(min(ends)) else values.min() - 3
    high = max(ends) if math.isfinite(max(ends)) else values.max() + 3
    assert values.min() >= low and values.max() <= high
    x, below = cdf(density, (low - 1e-9, high + 1e-9))
    assert abs(below[-1] + sum(density.atoms.values()) - 1) < 2e-5
    empirical = np.searchsorted(np.sort(values), x, side="right") / n
    assert np.abs(empirical - below).max() < 1.95 / math.sqrt(n)
    moments = [np.trapezoid(density.at(x) * x**k, x) / below[-1] for k in (1, 2, 4)]
    error = math.sqrt(max(moments[1] - moments[0] ** 2, 0) / values.size)
    assert abs(values.mean() - moments[0]) < 3.3 * error
    assert abs((values**2).mean() - moments[1]) < 3.3 * math.sqrt((moments[2] - moments[1] ** 2) / values.size)


def test_density_of_constants_is_single_values() -> None:
    for steps, atoms in (
        ((Step("fill", (3.0,)),), {3.0: 1.0}),
        ((Step("normal", (0.0, 2.0)), Step("neg")), {-2.0: 1.0}),
        ((Step("uniform", (1.0, 1.0)), Step("add", (1.0,))), {2.0: 1.0}),
        ((Step("normal", (1.0, 0.0)), Step("mul", (0.0,)), Step("add", (5.0,))), {5.0: 1.0}),
        ((Step("eye", (0.0, 1.0)),), {0.0: 0.75, 1.0: 0.25}),
    ):
        density = density_of(Exact(steps), (4, 4), 16)
        assert density is not None and (density.smooth, density.atoms) == ([], atoms), steps


def test_density_that_is_not_known() -> None:
    partly = Exact((Step("normal", (1.0, 0.0), (Span(0, 1, 2), Span(0, 1, 4))),))
    assert density_of(partly, (4, 4), 16) is None and density_of(partly, (4, 4), 8) is not None
    assert density_of(Exact((Step("normal", (1.0, 0.0)), Step("div", (0.0,)))), (4, 4), 16) is None
    rows = tuple(Step("normal", (1.0, float(row)), (Span(row, 1, 1), Span(0, 1, 4))) for row in range(4))
    assert density_of(Exact(rows), (4, 4), 16, max_boxes=2) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_bins_of_narrow_values_follow_the_density(dtype: torch.dtype) -> None:
    """Bins that ignore the rounding are off by half in fp8."""
    plan = one_tensor((Step("normal", (1.0, 0.0)),), (200_000,), dtype)
    values = values_of(plan, 200_000, dtype)
    edges = bin_edges(values)
    assert 30 <= len(edges) <= 71 and (np.diff(edges) > 0).all()
    counts = np.histogram(values, edges)[0]
    assert counts.sum() == values.size
    upto = np.array([0.5 * math.erfc(-edge / math.sqrt(2)) for edge in edges])
    expected = values.size * np.diff(upto)
    assert (np.abs(counts - expected) < 4.5 * np.sqrt(expected) + 3).all()


def test_single_values_are_rounded_as_the_tensor_is() -> None:
    plan = one_tensor((Step("normal", (1.0, 0.0)), Step("clamp", (-0.3, 0.3))), (10_000,), torch.float8_e4m3fn)
    program = plan.entries["w"].program
    assert isinstance(program, Exact)
    density = density_of(program, (10_000,), 10_000)
    assert density is not None
    rounded = in_dtype(density, torch.float8_e4m3fn)
    values = values_of(plan, 10_000, torch.float8_e4m3fn)
    assert {values.min(), values.max()} == set(rounded.atoms) == {-0.3125, 0.3125}


def test_density_of_a_bernoulli_is_two_values() -> None:
    density = density_of(Exact((Step("bernoulli", (0.3,)), Step("mul", (2.0,)))), SHAPE, 100)
    assert density is not None and not density.smooth and density.atoms == {0.0: 0.7, 2.0: 0.3}


def test_no_density_where_there_is_no_closed_form() -> None:
    for steps in ((Step("exponential", (1.0,)),), (Step("uniform", (0.0, 1.0)), Step("log"), Step("mul", (2.0,)))):
        assert density_of(Exact(steps), SHAPE, 100) is None
