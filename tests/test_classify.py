"""Whose draws random numbers are: of temporaries, copies, and numbers that live on after they were overwritten."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from recorded_models import eager, interpreted

import torch_shardinit as shardinit
from torch_shardinit.errors import RecordError
from torch_shardinit.plan import Plan
from torch_shardinit.program import Exact, Played

Build = Callable[[nn.Module], object]
SEED = 17


def model_of(build: Build) -> nn.Module:
    model = nn.Module()
    build(model)
    return model


def recorded(build: Build) -> nn.Module:
    with shardinit.recording():
        return model_of(build)


def values(plan: Plan) -> dict[str, torch.Tensor]:
    return {
        name: plan.fill_(name, torch.empty(entry.shape, dtype=entry.dtype), seed=SEED)
        for name, entry in plan.entries.items()
    }


def normal(name: str, draw: int, *shape: int) -> torch.Tensor:
    return shardinit.normal_(torch.empty(shape), seed=SEED, tensor_id=shardinit.tensor_id(name, draw))


def transformer(model: nn.Module) -> None:
    model.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)


def transformer_that_draws_again(model: nn.Module) -> None:
    transformer(model)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)


def spectral_norm(model: nn.Module) -> None:
    model.layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4))
    model.old = torch.nn.utils.spectral_norm(nn.Conv2d(3, 4, 3))


def spectral_norm_before_init(model: nn.Module) -> None:
    spectral_norm(model)
    nn.init.xavier_uniform_(model.layer.parametrizations.weight.original)


def steps_of_torch(model: nn.Module) -> None:
    """A state-space model's dt_bias, and a sum of two draws."""
    dt = torch.exp(torch.rand(6) * 3 - 4).clamp(min=1e-3)
    model.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
    model.sum = nn.Parameter(torch.randn(3) + torch.randn(3))
    model.real = nn.Parameter(torch.randn(3, device="cpu").cos())
    model.rows = nn.Parameter(torch.randn(3).expand(2, 3).clone())


def two_tensors(model: nn.Module) -> None:
    source = torch.randn(4)
    model.b, model.a = nn.Parameter(source * 0.5), nn.Parameter(source * 2)


def two_tensors_one_played(model: nn.Module) -> None:
    source = torch.randn(4)
    model.a, model.b = nn.Parameter(source.clone()), nn.Parameter(source.cos())


def two_tensors_both_played(model: nn.Module) -> None:
    source = torch.randn(4)
    model.b, model.a = nn.Parameter(source.cos()), nn.Parameter(source.sin())


def twice_in_one(model: nn.Module) -> None:
    source = torch.randn(2)
    model.a = nn.Parameter(torch.cat([source, source]))


def drawn_again(model: nn.Module) -> None:
    model.a = nn.Parameter(torch.randn(4))
    model.b = nn.Parameter(model.a.detach().clone())
    nn.init.normal_(model.a)


def both_draws(model: nn.Module) -> None:
    model.a = nn.Parameter(torch.randn(4))
    first = model.a.detach().clone()
    nn.init.normal_(model.a)
    model.a.data.add_(first)


def cut_up(model: nn.Module) -> None:
    """Parts of one draw are tensors of their own; one of them is also a part of another."""
    source = torch.randn(6, 2)
    model.a, model.b = nn.Parameter(source[:2].clone()), nn.Parameter(source[2:].clone())
    model.c = nn.Parameter(source[4:].clone())


def chain(model: nn.Module) -> None:
    """What is a copy of a, which is played."""
    model.a = nn.Parameter(torch.randn(4).sigmoid())
    model.b = copy.deepcopy(model.a)
    model.c = nn.Parameter(model.b.detach() + torch.randn(4).abs())


def cast_in_parts(model: nn.Module) -> None:
    """Two casts of parts of one temporary; steps between two casts; the temporary drawn again for another tensor."""
    source = torch.randn(6, 4).sin()
    model.a, model.b = nn.Parameter(source[:3].to(torch.bfloat16)), nn.Parameter(source[3:].to(torch.bfloat16))
    again = torch.empty(6, 4).normal_().sin_()
    wide = again.to(torch.float64).mul_(1 / 3)
    again.normal_()
    model.c, model.d = nn.Parameter(wide.float()), nn.Parameter(again.sin())


def swapped(model: nn.Module) -> None:
    """The copies that are made on the way go to the other tensor."""
    first, second = torch.randn(4).sin(), torch.randn(4).sin()
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    model.a, model.b = nn.Parameter(first), nn.Parameter(second)


def copied_then_drawn_in_part(model: nn.Module) -> None:
    source = torch.empty(4, 4).normal_().sin_()
    model.w = nn.Parameter(torch.empty(4, 4))
    model.w.data.copy_(source)
    model.w.data[0].normal_()
    source[1].normal_()
    model.v = nn.Parameter(source[1:].exp())


def copied_and_added(model: nn.Module) -> None:
    source = torch.randn(4, 4).sin()
    model.w = nn.Parameter(source.t().clone())
    model.w.data.add_(source)


BUILDS: list[Build] = [
    *(transformer, transformer_that_draws_again, spectral_norm, spectral_norm_before_init, steps_of_torch),
    *(two_tensors, two_tensors_one_played, two_tensors_both_played, twice_in_one, drawn_again, both_draws, cut_up),
    *(chain, cast_in_parts, swapped, copied_then_drawn_in_part, copied_and_added),
]


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_programs_equal_stock_torch(build: Build) -> None:
    got, want = interpreted(shardinit.record(recorded(build))), eager(lambda: model_of(build))
    assert got.keys() == want.keys() and got
    for name, tensor in got.items():
        assert_bitwise_equal(patterns(tensor), patterns(want[name]), name)


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_values_do_not_depend_on_what_else_there_is(build: Build) -> None:
    """Program order is no key: with other layers before and after, whose draws come between, the bits are the same."""

    def alone(model: nn.Module) -> None:
        model.it = model_of(build)

    def among_others(model: nn.Module) -> None:
        model.aaa = model_of(spectral_norm)
        torch.randn(3).cos()
        model.it = model_of(build)
        model.zzz = model_of(steps_of_torch)

    first, second = values(shardinit.record(recorded(alone))), values(shardinit.record(recorded(among_others)))
    assert first and second.keys() > first.keys()
    for name, tensor in first.items():
        assert_bitwise_equal(patterns(tensor), patterns(second[name]), name)
    assert not torch.equal(second["aaa.layer.parametrizations.weight.0._v"], second["zzz.rows"].flatten()[:5])


def test_a_temporary_draws_under_the_least_name_that_it_reaches() -> None:
    got = values(shardinit.record(recorded(two_tensors_both_played)))
    assert torch.equal(got["a"], normal("a", 1, 4).sin()) and torch.equal(got["b"], normal("a", 1, 4).cos())
    got = values(shardinit.record(recorded(two_tensors)))
    assert torch.equal(got["b"], normal("a", 0, 4) * 0.5) and torch.equal(got["a"], normal("a", 0, 4) * 2), "copies"


def test_a_temporary_that_goes_to_one_tensor_draws_as_that_tensor() -> None:
    """Whatever else is computed from it; so a cast after init changes no number."""
    plan = shardinit.record(recorded(two_tensors_one_played))
    got = values(plan)
    assert isinstance(plan.lookup("a").program, Exact) and plan.lookup("b").program.depends_on == ("a",)
    assert torch.equal(got["a"], normal("a", 0, 4)) and torch.equal(got["b"], normal("a", 0, 4).cos())

    def through_copies(model: nn.Module) -> None:
        source = torch.empty(4, 3).normal_()
        source.cos_()
        model.a = nn.Parameter(torch.empty(4, 3))
        model.a.data.view(-1).copy_(source.t().clone().t().double().flatten())

    got = values(shardinit.record(recorded(through_copies)))
    assert torch.equal(got["a"], normal("a", 0, 4, 3).cos())

    def to_two(model: nn.Module) -> None:
        source = torch.randn(4).cos()
        model.b, model.a = nn.Parameter(source.clone()), nn.Parameter(source.clone())

    got = values(shardinit.record(recorded(to_two)))
    assert torch.equal(got["a"], normal("a", 1, 4).cos()) and torch.equal(got["b"], got["a"])

    def transposed_on_the_way(model: nn.Module) -> None:
        source = torch.empty(3, 3).normal_().cos_()
        model.a = nn.Parameter(source.t().clone())

    got = values(shardinit.record(recorded(transposed_on_the_way)))
    assert torch.equal(got["a"], normal("a", 0, 3, 3).cos()), "by where an element ends up"

    def drawn_again_later(model: nn.Module) -> None:
        source = torch.empty(4).normal_().cos_()
        model.a = nn.Parameter(source.clone())
        source.normal_()
        model.b = nn.Parameter(source.cos())

    got = values(shardinit.record(recorded(drawn_again_later)))
    assert torch.equal(got["a"], normal("a", 0, 4).cos()) and torch.equal(got["b"], normal("b", 1, 4).cos())


def test_temporaries_of_one_tensor_are_told_apart_by_their_draw() -> None:
    got = values(shardinit.record(recorded(steps_of_torch)))
    assert torch.equal(got["sum"], normal("sum", 1, 3) + normal("sum", 2, 3))
    assert torch.equal(got["rows"], normal("rows", 1, 3).expand(2, 3))
    got = values(shardinit.record(recorded(twice_in_one)))
    assert torch.equal(got["a"], normal("a", 1, 2).repeat(2))


def test_numbers_that_live_on_are_a_temporary() -> None:
    """a keeps the last draw; what was computed from its first one has that of the least name that has it now."""
    got = values(shardinit.record(recorded(drawn_again)))
    assert torch.equal(got["a"], normal("a", 0, 4)) and torch.equal(got["b"], normal("b", 1, 4))
    got = values(shardinit.record(recorded(both_draws)))
    assert torch.equal(got["a"], normal("a", 0, 4) + normal("a", 1, 4))


def test_copies_stay_exact() -> None:
    plan = shardinit.record(recorded(transformer))
    programs = {name: entry.program for name, entry in plan.entries.items()}
    assert all(isinstance(program, Exact) for program in programs.values())
    assert programs["encoder.layers.1.linear1.weight"].drawn_as == "encoder.layers.0.linear1.weight"
    assert programs["encoder.layers.0.linear1.weight"].drawn_as is None
    got = values(plan)
    assert torch.equal(got["encoder.layers.0.linear2.bias"], got["encoder.layers.1.linear2.bias"])
    again = shardinit.record(recorded(transformer_that_draws_again))
    assert again.lookup("encoder.layers.1.linear1.weight").program.drawn_as is None
    assert again.lookup("encoder.layers.1.linear1.bias").program.drawn_as == "encoder.layers.0.linear1.bias"


def test_spectral_norm_is_played_from_its_weight() -> None:
    plan = shardinit.record(recorded(spectral_norm))
    program = plan.lookup("layer.parametrizations.weight.0._v").program
    assert isinstance(program, Played)
    weight = "layer.parametrizations.weight.original"
    assert program.depends_on == ("layer.parametrizations.weight.0._u", weight)
    got = values(plan)
    sigma = torch.linalg.matrix_norm(got[weight], 2)
    u, v = (got[f"layer.parametrizations.weight.0._{name}"] for name in "uv")
    torch.testing.assert_close(u @ got[weight] @ v, sigma, rtol=1e-3, atol=0)
    before = values(shardinit.record(recorded(spectral_norm_before_init)))
    assert not torch.equal(before[weight], got[weight])
    assert torch.equal(before["layer.bias"], got["layer.bias"])


def test_error_numbers_that_also_reach_a_tensor_outside_of_the_model() -> None:
    def build(model: nn.Module) -> None:
        source = torch.randn(4)
        model.part, model.other = nn.Module(), nn.Module()
        model.part.a, model.other.b = nn.Parameter(source.cos()), nn.Parameter(source.log1p())
        model.part.c = nn.Parameter(torch.ones(3))
        model.third = nn.Module()
        model.third.d = nn.Parameter(source * 2)
        model.fine = nn.Module()
        model.fine.e = nn.Parameter(torch.randn(3).cos())

    model = recorded(build)
    assert shardinit.record(model).lookup("part.a").program.depends_on == ("other.b",)
    for part, name in ((model.part, "a"), (model.third, "d")):
        with pytest.raises(RecordError, match=rf"^1 tensors .*\s+{name}: .*aten::randn at .*outside of this model"):
            shardinit.record(part)
    assert shardinit.record(model.fine).lookup("e").program.depends_on == ("e",)

    with shardinit.recording():
        layer = nn.Linear(3, 2)
        model = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
    with pytest.raises(RecordError, match=r"0\.weight: aten::uniform_ at .*outside of this model.*before recording"):
        shardinit.record(model)
    with shardinit.recording():
        layer = nn.Linear(3, 2)
        model = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        del layer
    assert shardinit.record(model).lookup("1.weight").program.drawn_as == "0.weight"


def test_error_a_tie_whose_other_name_is_not_here() -> None:
    def build(model: nn.Module) -> None:
        model.a, model.z = nn.Module(), nn.Module()
        model.z.w = nn.Parameter(torch.randn(3).cos())
        model.a.w = model.z.w

    with pytest.raises(RecordError, match=r"w: it was recorded under a name outside of this model too"):
        shardinit.record(recorded(build).z)
