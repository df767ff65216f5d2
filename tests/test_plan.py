"""The programs of a Plan against stock torch, and the Plan itself."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from recorded_models import Decoder, LowRank, Rows, StateSpace, Tables, Zoo, eager, interpreted

from torch_shardinit.plan import Entry, Plan
from torch_shardinit.program import Exact, Played, Step, Unwritten
from torch_shardinit.record import record, recording


def plan_of(make: Callable[[], nn.Module]) -> Plan:
    with recording():
        model = make()
    return record(model)


def holder(**tensors: Callable[[], torch.Tensor]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = nn.Module()
        for name, value in tensors.items():
            module.register_parameter(name, nn.Parameter(value(), requires_grad=False))
        return module

    return make


def cast_after_init() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    return model.to(torch.bfloat16)


def sequential_numbers() -> nn.Module:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        for row in range(4):
            model.weight[row].fill_(row / 7)
        model.weight.data = model.weight.data.clone()
        model.bias.data = torch.full((4,), 0.1, dtype=torch.float64).float()
    return model


def constants_rounded_on_the_way() -> nn.Module:
    return holder(
        widened=lambda: torch.full((3,), 0.1, dtype=torch.bfloat16).float(),
        doubled=lambda: torch.full((3,), 0.1).double(),
        third=lambda: (torch.full((3,), 0.1, dtype=torch.float64) / 3).float(),
        negative_zero=lambda: -torch.zeros(3),
        expanded=lambda: torch.tensor([0.5]).expand(2, 3).clone(),
        integers=lambda: torch.arange(6).reshape(2, 3) * 2,
        eye=lambda: torch.eye(3),
        flags=lambda: torch.ones(3) > 0,
        masked=lambda: torch.arange(6.0).masked_fill(torch.arange(6) % 2 == 0, -1.0),
        scattered=lambda: torch.zeros(6).index_fill_(0, torch.tensor([1, 3]), 2.0),
    )()


def in_place_on_slices(tensor: torch.Tensor) -> torch.Tensor:
    tensor[::2] *= 2
    tensor[:, 1] += 1
    tensor[1, 2] = 5
    return tensor


def embedding_bag() -> nn.Module:
    return nn.ModuleDict(
        {
            "bag": nn.EmbeddingBag(7, 3, padding_idx=1),
            "softmax": nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10]),
            "gru": nn.GRU(3, 2, bidirectional=True),
            "group": nn.GroupNorm(2, 4),
            "prelu": nn.PReLU(3),
            "transposed": nn.ConvTranspose2d(2, 3, 3),
            "transformer": nn.Transformer(4, 2, 0, 0, 8),
        }
    )


def weight_norms() -> nn.Module:
    new, old = torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.weight_norm
    return nn.Sequential(new(nn.Linear(4, 6)), old(nn.Linear(6, 3)))


@pytest.mark.parametrize(
    "make",
    [
        *(Decoder, Zoo, Tables, StateSpace, LowRank, Rows),
        *(cast_after_init, sequential_numbers, constants_rounded_on_the_way, embedding_bag, weight_norms),
    ],
    ids=lambda make: make.__name__,
)
def test_programs_equal_stock_torch(make: Callable[[], nn.Module]) -> None:
    plan, want = plan_of(make), eager(make)
    got = interpreted(plan)
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert tensor.dtype == want[name].dtype, name
        if tensor.dtype == torch.bool:
            assert torch.equal(tensor, want[name]), name
        else:
            assert_bitwise_equal(patterns(tensor), patterns(want[name]), name)


def test_everything_ordinary_is_exact() -> None:
    plan = plan_of(Decoder)
    played = {name for name, entry in plan.entries.items() if isinstance(entry.program, Played)}
    assert played == {"cos", "steps"}
    assert plan.lookup("embedding.weight").program == Exact(
        (Step("normal", (0.02, 0.0)), Step("fill", (0.0,), plan.lookup("embedding.weight").program.steps[1].region))
    )
    assert str(plan.lookup("position").program.describe()) == (
        "trunc_normal(std=0.02, mean=0, a=-2, b=2); [1:3, 0:8] fill(7)"
    )


def test_moves_of_random_numbers_are_draws_in_place() -> None:
    plan = plan_of(
        holder(
            transposed=lambda: torch.randn(3, 4).t() * 2,
            reshaped=lambda: torch.randn(12).view(3, 4).clone(),
            cast=lambda: torch.rand(4, dtype=torch.float64).to(torch.bfloat16),
            normal=lambda: torch.normal(1.0, 0.5, (4,)),
            sliced=lambda: torch.randn(4, 6)[1:3, 2:].contiguous(),
        )
    )
    assert {name: entry.program.describe() for name, entry in plan.entries.items()} == {
        "transposed": "normal(std=1, mean=0); mul(2)",
        "reshaped": "normal(std=1, mean=0)",
        "cast": "uniform(a=0, b=1)",
        "normal": "normal(std=0.5, mean=1)",
        "sliced": "normal(std=1, mean=0)",
    }
    sliced = plan_of(holder(sliced=lambda: in_place_on_slices(torch.randn(4, 6))))
    assert sliced.lookup("sliced").program.describe() == (
        "normal(std=1, mean=0); [0:3:2, 0:6] mul(2); [0:4, 1] add(1); [1, 2] fill(5)"
    )
    assert plan.lookup("cast").dtype == torch.bfloat16 and plan.lookup("transposed").shape == (4, 3)


def test_parts_of_one_storage_are_tensors_of_their_own() -> None:
    def make() -> nn.Module:
        flat = torch.empty(24).normal_(0, 0.5)
        flat[4:8].zero_()
        module = nn.Module()
        module.first = nn.Parameter(flat[:8].view(2, 4))
        module.second = nn.Parameter(flat[8:].view(4, 4))
        wide = torch.randn(2, 6)
        module.left, module.right = (nn.Parameter(part) for part in wide.chunk(2, 1))
        return module

    plan = plan_of(make)
    assert {name: entry.program.describe() for name, entry in plan.entries.items()} == {
        "first": "normal(std=0.5, mean=0); [1, 0:4] fill(0)",
        "second": "normal(std=0.5, mean=0)",
        "left": "normal(std=1, mean=0)",
        "right": "normal(std=1, mean=0)",
    }


def test_what_is_not_a_scalar_step_is_played() -> None:
    plan = plan_of(
        holder(
            alpha=lambda: torch.ones(3).add_(torch.ones(3), alpha=2),
            rounding=lambda: torch.ones(3).div_(0.3, rounding_mode="floor"),
            scalar_tensor=lambda: torch.ones(3).mul_(torch.tensor(0.3)),
        )
    )
    classes = [type(plan.lookup(name).program) for name in ("alpha", "rounding", "scalar_tensor")]
    assert classes == [Played, Played, Exact]


def test_unwritten_tensors_say_why() -> None:
    def make() -> nn.Module:
        module = holder(
            never=lambda: torch.empty(3),
            partly=lambda: torch.empty(3, 2),
            read=lambda: torch.empty(3).mul_(2),
            read_and_played=lambda: torch.empty(3).exp_(),
            empty=lambda: torch.empty(0, 3),
            integers=lambda: torch.empty(3, dtype=torch.long),
        )()
        module.partly[:2].fill_(1)
        return module

    plan = plan_of(make)
    reasons = {name: entry.program for name, entry in plan.entries.items() if isinstance(entry.program, Unwritten)}
    assert reasons.keys() == {"never", "partly", "read", "read_and_played", "integers"}
    assert reasons["never"].reason == reasons["integers"].reason == "nothing wrote it"
    assert reasons["partly"].reason == "nothing wrote some of its elements, [2:3, 0:2] for one"
    assert "mul_ at " in reasons["read"].reason and "reads elements that nothing wrote" in reasons["read"].reason
    assert "test_plan.py:" in reasons["read_and_played"].reason


def test_played_checks_what_only_values_tell() -> None:
    def some(index: list[int]) -> Callable[[], torch.Tensor]:
        return lambda: torch.empty(3).index_fill_(0, torch.tensor(index), 2.0)

    from torch_shardinit.errors import UninitializedError

    plan = plan_of(holder(all=some([0, 1, 2]), part=some([0, 2])))
    assert plan.lookup("all").program.evaluate(0, lambda name, draw: 0).tolist() == [2.0] * 3
    with pytest.raises(UninitializedError, match="memory that nothing wrote"):
        plan.lookup("part").program.evaluate(0, lambda name, draw: 0)


def test_playing_leaves_threads_and_generator_alone() -> None:
    plan = plan_of(Decoder)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    table = plan.lookup("cos").program.evaluate(0, lambda name, draw: 0)
    assert table.shape == (16, 4) and not table.is_meta
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def test_played_draws_are_keyed_by_the_tensor_they_are_drawn_on() -> None:
    from torch_shardinit.play import fill_exact_
    from torch_shardinit.stream import tensor_id

    plan = plan_of(Zoo)
    scaled = torch.empty(7)
    fill_exact_(scaled, plan.lookup("scaled").program, 5, tensor_id("scaled"))
    program = plan.lookup("log_of_scaled").program
    assert isinstance(program, Played) and program.depends_on == ("scaled",)
    assert torch.equal(program.evaluate(5, tensor_id), scaled.abs().add(1).log())
    assert not torch.equal(program.evaluate(6, tensor_id), program.evaluate(5, tensor_id))


def test_many_steps_stay_cheap() -> None:
    start = time.perf_counter()
    plan = plan_of(Rows)
    assert time.perf_counter() - start < 10, "quadratic work on row-by-row writes"
    assert isinstance(plan.lookup("long").program, Exact) and isinstance(plan.lookup("longer").program, Played)
    assert isinstance(plan.lookup("weight").program, Exact)


def test_plans_compare_by_what_they_say() -> None:
    assert plan_of(Zoo) == plan_of(Zoo)
    assert plan_of(Decoder) != plan_of(lambda: Decoder(layers=1))
    table = holder(table=lambda: torch.tensor([1.0, 2.0]))
    assert plan_of(table) == plan_of(table)
    assert plan_of(table) != plan_of(holder(table=lambda: torch.tensor([1.0, 3.0])))
    assert plan_of(table) != 3


def test_lookup_and_table() -> None:
    plan = plan_of(Decoder)
    entry = plan.lookup("head.weight")
    assert entry is plan.lookup("embedding.weight") is plan.entries["embedding.weight"]
    assert entry.aliases == ("embedding.weight", "head.weight") and "head.weight" not in plan.entries
    assert plan.lookup("nothing") is None
    assert not plan.lookup("cos").persistent and plan.lookup("steps").persistent
    assert plan.lookup("cos").kind == "buffer" and entry.kind == "parameter"
    lines = str(plan).splitlines()
    assert lines[0].split() == ["name", "shape", "dtype", "class", "program"]
    assert len({line.index(" exact ") for line in lines if " exact " in line}) == 1
    assert any(line.startswith("embedding.weight (= head.weight)") and "11x8" in line for line in lines)


def test_error_one_name_for_two_tensors() -> None:
    entry = Entry("a", ("a", "b"), "parameter", (1,), torch.float32, Unwritten())
    other = Entry("b", ("b",), "parameter", (1,), torch.float32, Unwritten())
    with pytest.raises(ValueError, match="names must be distinct, got b for a and b"):
        Plan([entry, other])
