"""exponential_, log_normal_, cauchy_, geometric_, bernoulli_ and random_: distributions, errors, recordings."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import assert_bitwise_equal

import torch_shardinit as shardinit
from torch_shardinit import reference_draws
from torch_shardinit.plan import Plan
from torch_shardinit.program import Exact
from torch_shardinit.stream import tensor_id

SIZE = 200_000
CDFS: dict[str, tuple[dict[str, float], Callable[[np.ndarray], np.ndarray]]] = {
    "exponential": (dict(lambd=2.5), lambda x: 1 - np.exp(-2.5 * x)),
    "cauchy": (dict(median=1.0, sigma=0.5), lambda x: 0.5 + np.arctan((x - 1.0) / 0.5) / math.pi),
    "log_normal": (
        dict(mean=0.5, std=0.75),
        lambda x: np.array([0.5 * math.erfc(-(math.log(value) - 0.5) / 0.75 / math.sqrt(2)) for value in x]),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CDFS)
def test_distribution_by_kolmogorov_and_smirnov(name: str, dtype: torch.dtype) -> None:
    """The values are fixed; the bound has a false alarm in 1,000."""
    kwargs, cdf = CDFS[name]
    got = np.sort(getattr(shardinit, f"{name}_")(torch.empty(SIZE, dtype=dtype), **kwargs, seed=5, tensor_id=name))
    below = cdf(got.astype(np.float64))
    grid = np.arange(SIZE + 1) / SIZE
    assert max((grid[1:] - below).max(), (below - grid[:-1]).max()) < 1.95 / math.sqrt(SIZE)


def test_counts_of_geometric_bernoulli_and_random() -> None:
    """Each count within 4.5 of its standard deviations; 60 of them are looked at."""

    def check(values: torch.Tensor, shares: dict[float, float]) -> None:
        for value, share in shares.items():
            count = int((values == value).sum())
            assert abs(count - SIZE * share) < 4.5 * math.sqrt(SIZE * share * (1 - share)), (value, count)

    trials = shardinit.geometric_(torch.empty(SIZE), 0.3, seed=5, tensor_id="g")
    check(trials, {float(k): 0.3 * 0.7 ** (k - 1) for k in range(1, 20)})
    assert trials.min() == 1 and torch.equal(trials, trials.round())
    check(shardinit.bernoulli_(torch.empty(SIZE), 0.3, seed=5, tensor_id="b"), {1.0: 0.3, 0.0: 0.7})
    integers = shardinit.random_(torch.empty(SIZE, dtype=torch.int16), -20, 17, seed=5, tensor_id="r")
    check(integers, dict.fromkeys(map(float, range(-20, 17)), 1 / 37))
    assert integers.min() == -20 and integers.max() == 16


def test_bernoulli_has_the_same_elements_in_every_type() -> None:
    want = shardinit.bernoulli_(torch.empty(999), 0.4, seed=1, tensor_id=2)
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float64, torch.bfloat16, torch.float8_e4m3fn):
        got = shardinit.bernoulli_(torch.empty(999, dtype=dtype), 0.4, seed=1, tensor_id=2)
        assert torch.equal(got.float(), want)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: shardinit.exponential_(t, 0.0), r"exponential_: lambd must be > 0, got 0\.0"),
        (lambda t: shardinit.exponential_(t, math.inf), "exponential_: lambd must be finite, got inf"),
        (lambda t: shardinit.exponential_(t, math.nan), "exponential_: lambd must not be NaN"),
        (lambda t: shardinit.exponential_(t, 1e-50), r"exponential_: lambd must be > 0, got 1e-50"),
        (lambda t: shardinit.log_normal_(t, 0.0, -1.0), r"log_normal_: std must be > 0, got -1\.0"),
        (lambda t: shardinit.log_normal_(t, math.inf), "log_normal_: mean must be finite"),
        (lambda t: shardinit.cauchy_(t, 0.0, 0.0), r"cauchy_: sigma must be > 0, got 0\.0"),
        (lambda t: shardinit.geometric_(t, 0.0), r"geometric_: p must be > 0 and < 1, got 0\.0"),
        (lambda t: shardinit.geometric_(t, 1), r"geometric_: p must be > 0 and < 1, got 1"),
        (lambda t: shardinit.geometric_(t, 1e-60), "geometric_: p must not vanish in fp32, got 1e-60"),
        (lambda t: shardinit.geometric_(t, "0.5"), "geometric_: p must be a real number, got '0.5'"),
        (lambda t: shardinit.bernoulli_(t, 1.5), r"bernoulli_: p must be in \[0, 1\], got 1\.5"),
        (lambda t: shardinit.bernoulli_(t, math.nan), r"bernoulli_: p must be in \[0, 1\], got nan"),
        (lambda t: shardinit.bernoulli_(t, True), "bernoulli_: p must be a real number, got True"),
        (lambda t: shardinit.random_(t, 3, 3), r"high - low must be in \[1, 2\^64\), got low=3, high=3"),
        (lambda t: shardinit.random_(t, 0.5, 3), "random_: low must be an integer in .* got 0.5"),
        (lambda t: shardinit.random_(t, 0, 2**53 + 1), "random_: high must be an integer .* exactly, got 9007"),
        (lambda t: shardinit.random_(t, -(2**64), 3), "random_: low must be an integer"),
        (lambda t: shardinit.random_(t, -math.inf, 3), "random_: low must be an integer"),
        (lambda t: shardinit.random_(t, math.nan, 3), "random_: low must be an integer"),
        (lambda t: shardinit.random_(t.to(torch.int8), 0, 129), "random_: int8 must hold .* got low=0, high=129"),
        (lambda t: shardinit.random_(t.to(torch.uint8), -1, 4), "random_: uint8 must hold .* got low=-1, high=4"),
        (lambda t: shardinit.random_(t.to(torch.bool), 0, 3), "random_: bool must hold"),
        (lambda t: shardinit.exponential_(t.to(torch.int32)), "exponential_: dtype must be one of float64"),
        (lambda t: shardinit.geometric_(t.to(torch.bool), 0.5), "geometric_: dtype must be one of float64"),
        (lambda t: shardinit.bernoulli_(t.to(torch.complex64)), "bernoulli_: dtype must be one of float64"),
        (lambda t: shardinit.random_(t.to(torch.complex64), 0, 2), "random_: dtype must be one of float64"),
        (lambda t: shardinit.random_([1, 2]), "random_: tensor must be a torch.Tensor"),
    ],
)  # fmt: skip
def test_error_arguments(call: Callable[[torch.Tensor], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call(torch.zeros(4))


class Draws(nn.Module):
    """One parameter for each draw and function, some under steps, one in a region."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "c", "d", "e", "f", "g"):
            self.register_parameter(name, nn.Parameter(torch.empty(6, 5)))
        self.mask = nn.Buffer(torch.empty(6, 5, dtype=torch.bool))
        self.trials = nn.Buffer(torch.empty(9, dtype=torch.int8))
        with torch.no_grad():
            self.a.exponential_(2.0)
            self.b.log_normal_(0.5, 0.25).mul_(0.1)
            self.c.cauchy_(sigma=0.5)
            self.d.geometric_(0.25).sub_(1)
            self.e.normal_()
            self.e[2:4].bernoulli_(0.4)
            self.f.copy_(torch.randint(0, 100, (6, 5)).float())  # two tensors: the draw is a temporary's
            self.g.uniform_(-0.9, 0.9).erfinv_().mul_(math.sqrt(2.0)).clamp_(-2, 2)
            self.mask.bernoulli_(0.5)
            self.trials.geometric_(0.001)  # beyond 127 for nearly all


def test_recorded_in_place_and_like_the_raw_fills() -> None:
    with shardinit.recording():
        model = Draws()
    plan = shardinit.record(model)
    assert {name for name, entry in plan.entries.items() if isinstance(entry.program, Exact)} == set("abcdeg")
    assert str(plan).count("played") == 3 and Plan.from_json(plan.to_json()) == plan
    shardinit.init_model_(model, 7, device="cpu")

    def raw(call: str, name: str, shape: tuple[int, ...], *args: float, **where: object) -> torch.Tensor:
        return getattr(shardinit, call)(torch.empty(shape), *args, seed=7, tensor_id=name, **where)

    want = {
        "a": raw("exponential_", "a", (6, 5), 2.0),
        "b": raw("log_normal_", "b", (6, 5), 0.5, 0.25) * 0.1,
        "c": raw("cauchy_", "c", (6, 5), 0.0, 0.5),
        "d": raw("geometric_", "d", (6, 5), 0.25) - 1,
        "e": raw("normal_", "e", (6, 5)),
        "f": shardinit.random_(torch.empty(6, 5), 0, 100, seed=7, tensor_id=tensor_id("f", 1)),
    }
    want["e"][2:4] = raw("bernoulli_", "e", (2, 5), 0.4, offset=10)
    for name, values in want.items():
        assert_bitwise_equal(
            model.get_parameter(name).detach().numpy().view(np.int32), values.numpy().view(np.int32), name
        )
    u = shardinit.uniform_(torch.empty(6, 5), -0.9, 0.9, seed=7, tensor_id="g").numpy()
    z = reference_draws.erfinv(u) * np.float32(math.sqrt(2.0))
    assert_bitwise_equal(model.g.detach().numpy().view(np.int32), np.clip(z, -2, 2).view(np.int32), "g")
    assert torch.equal(model.mask, raw("bernoulli_", "mask", (6, 5), 0.5).bool())
    trials = shardinit.geometric_(torch.empty(9, dtype=torch.float64), 0.001, seed=7, tensor_id="trials")
    assert torch.equal(model.trials, trials.clamp(max=127).to(torch.int8)) and int(model.trials.max()) == 127


def test_a_plan_fills_shards_of_them() -> None:
    with shardinit.recording():
        model = Draws()
    plan = shardinit.record(model)
    shardinit.init_model_(model, 7, device="cpu")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        flat = tensor.detach().flatten()
        for start in range(0, flat.numel(), 7):
            part = flat[start : start + 7]
            got = plan.fill_(name, torch.zeros_like(part), offset=start, seed=7)
            assert got.numpy().tobytes() == part.numpy().tobytes(), (name, start)


@pytest.mark.parametrize("function", [torch.exp, torch.log, torch.erfinv], ids=lambda function: function.__name__)
def test_functions_of_a_constant_are_torchs(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Ours may differ in the last bit, and a value that is not random must be what torch gives."""

    def make() -> torch.Tensor:
        return function(torch.full((3, 4), 0.3))

    with shardinit.recording():
        model = nn.Module()
        model.w = nn.Parameter(make())
        model.part = nn.Parameter(torch.rand(3, 4))
        with torch.no_grad():
            model.part[0] = 0.3
            model.part.log_()
    plan = shardinit.record(model)
    assert not any(isinstance(entry.program, Exact) for entry in plan.entries.values())
    shardinit.init_model_(model, 1, device="cpu")
    assert torch.equal(model.w.detach(), make())
    assert torch.equal(model.part[0].detach(), torch.full((4,), 0.3).log())
