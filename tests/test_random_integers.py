"""bernoulli_, random_, randint and randperm in recordings, by their definition (docs/stream.md, section 9) in Python
integers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn as nn

import torch_shardinit as shardinit
from torch_shardinit import reference
from torch_shardinit.errors import RecordError
from torch_shardinit.plan import Plan
from torch_shardinit.program import Exact, Played
from torch_shardinit.stream import tensor_id

SEED = 31


def initialised(make: Callable[[], torch.Tensor], *, played: bool = False) -> torch.Tensor:
    with shardinit.recording():
        model = nn.Module()
        model.register_buffer("w", make())
    plan = shardinit.record(model)
    kind = Exact if plan.lookup("w").dtype.is_floating_point and not played else Played
    assert isinstance(plan.lookup("w").program, kind) and Plan.from_json(plan.to_json()) == plan
    return shardinit.init_model_(model, SEED, device="cpu").w  # type: ignore[return-value]


def words(count: int, bits: int, draw: int) -> list[int]:
    dtype = f"uint{bits}"
    found = reference.random_bits(np.arange(count), dtype=dtype, seed=SEED, tensor_id=tensor_id("w", draw))
    return [int(word) for word in found]


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int64], ids=str)
def test_bernoulli(p: float, dtype: torch.dtype) -> None:
    got = initialised(lambda: torch.empty(4, 50, dtype=dtype).bernoulli_(p))
    want = [word < math.ceil(p * 2**32) for word in words(200, 32, 0)]
    assert got.dtype == dtype and got.flatten().tolist() == want
    assert 0 < sum(want) < 200 or p in (0.0, 1e-9, 1.0)


@pytest.mark.parametrize(
    ("make", "low", "high", "draw"),
    [
        (lambda: torch.randint(7, (90,)), 0, 7, 0),
        (lambda: torch.randint(-5, 12, (90,), dtype=torch.int32), -5, 12, 0),
        (lambda: torch.randint(0, 256, (90,), dtype=torch.uint8), 0, 256, 0),
        (lambda: torch.randint(-(2**40), 2**41, (90,), dtype=torch.float64), -(2**40), 2**41, 0),
        (lambda: torch.randint_like(torch.empty(90), 3), 0, 3, 0),
        (lambda: torch.randint_like(torch.empty(90), -3, 3), -3, 3, 0),
        (lambda: torch.empty(90, dtype=torch.int64).random_(), 0, 2**63, 0),
        (lambda: torch.empty(90, dtype=torch.int8).random_(), 0, 128, 0),
        (lambda: torch.empty(90, dtype=torch.bool).random_(), 0, 2, 0),
        (lambda: torch.empty(90).random_(), 0, 2**24 + 1, 0),
        (lambda: torch.empty(90, dtype=torch.float64).random_(), 0, 2**53, 0),
        (lambda: torch.empty(90, dtype=torch.bfloat16).random_(), 0, 2**8 + 1, 0),
        (lambda: torch.empty(90, dtype=torch.int64).random_(11), 0, 11, 0),
        (lambda: torch.empty(90).random_(-4, 5), -4, 5, 0),
    ],
)
def test_integers(make: Callable[[], torch.Tensor], low: int, high: int, draw: int) -> None:
    got = initialised(make)
    want = [low + (word * (high - low) >> 64) for word in words(90, 64, draw)]
    assert got.tolist() == want and len(set(want)) > 1
    stock = make()
    assert got.dtype == stock.dtype and low <= int(stock.min()) and int(stock.max()) < high, "torch's bounds"


def test_integers_of_a_temporary() -> None:
    got = initialised(lambda: torch.randint(1000, (30,)) * 2)
    assert got.tolist() == [2 * (word * 1000 >> 64) for word in words(30, 64, 1)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
def test_permutation(dtype: torch.dtype) -> None:
    got = initialised(lambda: torch.randperm(40, dtype=dtype), played=True)
    key = words(40, 64, 0)
    assert got.dtype == dtype and got.tolist() == sorted(range(40), key=lambda i: (key[i], i))
    assert sorted(got.tolist()) == list(range(40)) != got.tolist()


def test_permuted_rows_and_masks() -> None:
    got = initialised(lambda: torch.arange(12.0).view(6, 2)[torch.randperm(6)], played=True)
    key = words(6, 64, 1)
    order = sorted(range(6), key=lambda i: key[i])
    assert got.tolist() == torch.arange(12.0).view(6, 2)[order].tolist()


def test_on_a_part_of_a_buffer_the_index_is_the_buffers() -> None:
    def make() -> torch.Tensor:
        table = torch.zeros(5, 4, dtype=torch.int64)
        table[1:3, ::2].random_(100)
        return table

    got = initialised(make)
    key = words(20, 64, 0)
    want = torch.zeros(5, 4, dtype=torch.int64)
    for row in (1, 2):
        for col in (0, 2):
            want[row, col] = key[4 * row + col] * 100 >> 64
    assert torch.equal(got, want)


def test_error_what_the_stream_does_not_have() -> None:
    for make in (
        lambda: torch.bernoulli(torch.full((3,), 0.5)),
        lambda: torch.empty(3).bernoulli_(torch.full((3,), 0.5)),
        lambda: torch.empty(3, dtype=torch.int64).random_(3, 2**62 + 1),
        lambda: torch.empty(3, dtype=torch.int64).random_(3, None),
        lambda: torch.multinomial(torch.ones(4), 2),
        lambda: torch.poisson(torch.ones(4)),
    ):
        with pytest.raises(
            RecordError, match=r"w: aten::\w+[.\w]* at .*test_random_integers\.py:\d+: not supported yet"
        ):
            initialised(make)
