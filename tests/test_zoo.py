"""Every model of the zoo: its programs, and that its values are the ones that its init code asks for. That they are
the same under every layout: test_zoo_layouts.py."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_bitwise_equal, patterns
from recorded_models import eager, interpreted
from zoo import MODELS
from zoo_layouts import SEED, plan_of, recorded, tensors_of, unsharded, words

import torch_shardinit as shardinit
from torch_shardinit.program import Exact, Played


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_has_a_program(name: str) -> None:
    plan = plan_of(name)
    assert plan.entries and all(isinstance(entry.program, (Exact, Played)) for entry in plan.entries.values())
    parameters = [entry for entry in plan.entries.values() if entry.kind == "parameter"]
    played = [entry.name for entry in parameters if isinstance(entry.program, Played)]
    assert sorted(played) == sorted(PLAYED_PARAMETERS.get(name, []))


# Every other parameter of the zoo is exact.
PLAYED_PARAMETERS = {
    "Swin": ["logit_scale"],
    "S4": ["log_A_real", "A_imag", "C"],
    "DiT": ["pos_embed"],
    "Codec": ["positions.parametrizations.weight.original0"],
    "Mamba": ["A_log", "dt_proj.bias"],
    "RWKV": [f"layers.{i}.{name}" for i in range(3) for name in ("time_first", "time_mix", "key.weight")],
    "OrthogonalLSTM": [
        *(f"lstm.weight_hh_l{i}" for i in range(2)),
        *(f"gru.weight_{kind}_l0{reverse}" for kind in ("ih", "hh") for reverse in ("", "_reverse")),
    ],
    "WeightNorms": ["new.parametrizations.weight.original0", "old.weight_g", "g"],
    "Teacher": [*(f"teacher.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")), "prototypes.weight"],
    "Sparse": ["reservoir.weight"],
    "CastAfterInit": ["layers.1.weight"],
}


@pytest.mark.parametrize("name", MODELS)
def test_random_tensors_follow_the_seed_and_differ_from_each_other(name: str) -> None:
    one, two = unsharded(name), unsharded(name, SEED + 1)
    seen: dict[bytes, str] = {}
    for key, entry in plan_of(name).entries.items():
        program = entry.program
        random = program.is_random if isinstance(program, Exact) else bool(program.depends_on)  # type: ignore[union-attr]
        assert torch.equal(one[key], two[key]) != random, key
        if random and isinstance(program, Exact) and program.drawn_as is None:
            other = seen.setdefault(one[key].flatten()[:8].view(torch.uint8).numpy().tobytes(), key)
            assert other == key


@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_random_is_what_torch_gives(name: str) -> None:
    ours, stock = unsharded(name), dict(tensors_of(MODELS[name]()))
    assert ours.keys() == stock.keys()
    for key, entry in plan_of(name).entries.items():
        program = entry.program
        random = program.is_random if isinstance(program, Exact) else bool(program.depends_on)  # type: ignore[union-attr]
        assert ours[key].dtype == stock[key].dtype and ours[key].shape == stock[key].shape, key
        assert random or torch.equal(ours[key], stock[key]), key


# Not for given numbers what torch makes of them: orthogonal_ and sparse_, and a draw whose parts end up in two tensors,
# where each part has the numbers of its own place.
OTHER_NUMBERS = {"RWKV", "OrthogonalLSTM", "Sparse", "CastAfterInit", "FusedQKV"}


@pytest.mark.parametrize("name", sorted(MODELS.keys() - OTHER_NUMBERS))
def test_programs_equal_stock_torch(name: str) -> None:
    """With torch's random numbers and ours replaced by the same ones."""
    got, want = interpreted(plan_of(name)), eager(MODELS[name])
    assert got.keys() == want.keys()
    for key, tensor in got.items():
        assert torch.equal(tensor, want[key]), key


def rounded(name: str, key: str, dtype: torch.dtype) -> torch.Tensor:
    """The fp32 tensor in another type; a uniform draw stays below its bound there too."""
    tensor, entry = unsharded(name)[key], plan_of(name).lookup(key)
    if not tensor.is_floating_point():
        return tensor
    tensor = tensor.to(dtype)
    assert entry is not None
    if isinstance(entry.program, Exact) and [step.op for step in entry.program.steps] == ["uniform"]:
        bound = torch.tensor(entry.program.steps[0].args[1], dtype=torch.float64)
        if float(bound) <= float(bound.to(dtype)):
            tensor = tensor.clamp(max=torch.nextafter(bound.to(dtype), torch.tensor(-torch.inf, dtype=dtype)))
    return tensor


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"CastAfterInit"}))
def test_casts_during_and_after_the_recording_give_the_fp32_model_rounded(name: str) -> None:
    """Played tensors too: a cast is no reason to draw other numbers."""
    with shardinit.recording():
        during = MODELS[name]()
        for tensor in [*during.parameters(), *during.buffers()]:
            tensor.data = tensor.data.to(torch.bfloat16) if tensor.is_floating_point() else tensor.data
    for model, dtype in ((during, torch.bfloat16), (recorded(name).half(), torch.float16)):
        got = dict(tensors_of(shardinit.init_model_(model, SEED, device="cpu")))
        assert got.keys() == unsharded(name).keys()
        for key, tensor in got.items():
            assert_bitwise_equal(patterns(words(tensor)), patterns(words(rounded(name, key, dtype))), f"{dtype} {key}")
