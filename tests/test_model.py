"""init_model_, Plan.apply_, Plan.fill_ and param_init_fn on one process: what they fill, keep, and refuse."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from recorded_models import Decoder, Zoo

import torch_shardinit as shardinit


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def assert_same_state(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert tensor.dtype == want[name].dtype, name
        assert_bitwise_equal(patterns(tensor), patterns(want[name]), name)


def recorded(factory: type[nn.Module] = Decoder) -> nn.Module:
    with shardinit.recording():
        return factory()


@pytest.mark.parametrize("factory", [Decoder, Zoo])
def test_init_twice_and_over_anything_gives_the_same_bits(factory: type[nn.Module]) -> None:
    model = shardinit.init_model_(recorded(factory), 3, device="cpu")
    first = state(model)
    shardinit.init_model_(model, 3)
    assert_same_state(state(model), first)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(1)
    shardinit.init_model_(model, 3)
    assert_same_state(state(model), first)


def test_values_follow_the_raw_fills() -> None:
    model = shardinit.init_model_(recorded(), 3, device="cpu")
    want = shardinit.normal_(torch.empty(11, 8), 0.02, seed=3, tensor_id="embedding.weight")
    want[2] = 0
    assert torch.equal(model.embedding.weight.detach(), want)
    assert model.head.weight is model.embedding.weight
    position = shardinit.trunc_normal_(torch.empty(5, 8), 0.02, a=-2, b=2, seed=3, tensor_id="position")
    position[1:3] = 7
    assert torch.equal(model.position.detach(), position)
    assert torch.equal(model.norm.weight.detach(), torch.ones(8))
    assert torch.equal(model.cos, Decoder().cos)


def test_dtype_of_the_model_at_hand_counts() -> None:
    """The bf16 model is the fp32 model rounded (uniform kept below b), cast during or after recording."""
    full = state(shardinit.init_model_(recorded(), 3, device="cpu"))
    want = {name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor for name, tensor in full.items()}
    bound = torch.tensor((6 / (8 + 24)) ** 0.5)  # xavier_uniform_ of the attention's in_proj_weight
    top = torch.nextafter(bound.to(torch.bfloat16), torch.tensor(0.0, dtype=torch.bfloat16))
    assert top < bound < bound.to(torch.bfloat16)
    for layer in range(2):
        want[f"layers.{layer}.attention.in_proj_weight"].clamp_(max=top.item())
    after = shardinit.init_model_(recorded().to(torch.bfloat16), 3, device="cpu")
    assert_same_state(state(after), want)
    with shardinit.recording():
        during = Decoder().to(torch.bfloat16)
    assert_same_state(state(shardinit.init_model_(during, 3, device="cpu")), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_steps_run_in_fp32_and_are_rounded_once(dtype: torch.dtype) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(5000))
            with torch.no_grad():
                self.weight.uniform_(0, 1).mul_(3).add_(0.1).div_(7).sub_(0.01).neg_().clamp_(-0.4, -0.02)

    plan = shardinit.record(recorded(Scaled))
    full = plan.fill_("weight", torch.empty(5000), seed=3)
    want = shardinit.uniform_(torch.empty(5000), 0, 1, seed=3, tensor_id="weight")
    want = (want * 3 + 0.1).div(torch.tensor(7.0)).sub(0.01).neg().clamp(-0.4, -0.02)
    assert_bitwise_equal(patterns(full), patterns(want))
    narrow = plan.fill_("weight", torch.empty(5000, dtype=dtype), seed=3)
    assert_bitwise_equal(patterns(narrow), patterns(full.to(dtype)))


def test_layers_added_or_removed_leave_the_others_alone() -> None:
    def build(layers: int) -> dict[str, torch.Tensor]:
        with shardinit.recording():
            model = Decoder(layers=layers)
        return state(shardinit.init_model_(model, 3, device="cpu"))

    two, three = build(2), build(3)
    assert_same_state({name: three[name] for name in two}, two)
    assert not torch.equal(three["layers.1.gate.weight"], three["layers.2.gate.weight"])


def test_seeds_and_the_default_seed() -> None:
    code = """
import torch, warnings, torch_shardinit as s
def build(seed=None):
    with s.recording(): model = torch.nn.Linear(4, 4)
    return s.init_model_(model, seed, device="cpu").weight.detach()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.manual_seed(1); a = build()
    torch.manual_seed(2); b = build()
    assert torch.equal(a, b) and torch.equal(a, build(0))
    assert [str(w.message) for w in caught if "torch.manual_seed is not read" in str(w.message)].__len__() == 1, caught
s.manual_seed(9)
assert torch.equal(build(), build(9)) and not torch.equal(a, build())
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "ok", done.stderr


def test_no_generator_moves_and_versions_are_bumped() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = shardinit.init_model_(recorded(Zoo), 3, device="cpu")
    versions = {name: p._version for name, p in model.named_parameters()}
    shardinit.init_model_(model, 3)
    assert torch.equal(torch.get_rng_state(), before)
    for name, parameter in model.named_parameters():
        assert parameter._version > versions[name], name
        assert parameter.requires_grad and parameter.is_leaf


def test_keep_leaves_tensors_alone() -> None:
    model = shardinit.init_model_(recorded(), 3, device="cpu")
    first = state(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5)
    shardinit.init_model_(model, 3, keep=["layers.0.*", "head.weight"])
    now = state(model)
    assert all((now[name] == 5).all() for name in now if name.startswith("layers.0."))
    assert (now["embedding.weight"] == 5).all(), "a tied tensor is kept under any of its names"
    assert_same_state(
        {n: t for n, t in now.items() if n.startswith("layers.1.")},
        {n: t for n, t in first.items() if n.startswith("layers.1.")},
    )


def test_a_keep_pattern_that_matches_nothing_warns() -> None:
    with pytest.warns(UserWarning, match=r"keep: no tensor of this model matches 'encoder\.\*'"):
        shardinit.init_model_(recorded(), 3, device="cpu", keep=["encoder.*", "norm.*"])


def test_a_part_of_the_model_by_rename() -> None:
    """A stage built on its own equals its part of the whole, by the Plan of the whole or by its own recording."""
    whole = recorded()
    plan = shardinit.record(whole)
    want = state(shardinit.init_model_(whole, 3, device="cpu"))
    want = {name.removeprefix("layers.1."): tensor for name, tensor in want.items() if name.startswith("layers.1.")}

    def rename(name: str) -> str:
        return f"layers.1.{name}"

    layer = Decoder().layers[1]
    plan.apply_(layer, 3, rename=rename)
    assert_same_state(state(layer), want)
    with shardinit.recording():
        alone = Decoder()
    stage = shardinit.init_model_(alone.layers[1], 3, rename=rename, device="cpu")
    assert_same_state(state(stage), want)


def test_plan_fills_single_tensors_and_shards() -> None:
    plan = shardinit.record(recorded())
    model = shardinit.init_model_(recorded(), 3, device="cpu")
    want = model.embedding.weight.detach()
    for name in ("embedding.weight", "head.weight"):
        assert torch.equal(plan.fill_(name, torch.empty(11, 8), seed=3), want)
    assert torch.equal(plan.fill_("embedding.weight", torch.empty(30), offset=13, seed=3), want.flatten()[13:43])
    assert torch.equal(plan.fill_("embedding.weight", torch.empty(4, 3), offset=(1, 5), seed=3), want[1:5, 5:])
    assert torch.equal(plan.fill_("cos", torch.empty(5, 2), offset=(3, 1), seed=3), model.cos[3:8, 1:3])
    assert torch.equal(plan.fill_("cos", torch.empty(7), offset=11, seed=3), model.cos.flatten()[11:18])
    array = torch.empty(8, 11).t()
    assert torch.equal(plan.fill_("embedding.weight", array, seed=3), want)


def test_wrapped_models() -> None:
    want = state(shardinit.init_model_(recorded(), 3, device="cpu"))
    compiled = torch.compile(recorded())
    shardinit.init_model_(compiled, 3, device="cpu")
    assert_same_state({name.removeprefix("_orig_mod."): t for name, t in state(compiled).items()}, want)
    parallel = nn.DataParallel(recorded())
    shardinit.init_model_(parallel, 3, device="cpu")
    assert_same_state({name.removeprefix("module."): t for name, t in state(parallel).items()}, want)


def test_reset_parameters_as_init_fn_of_a_real_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LSTM(4, 2))
    shardinit.init_model_(model, 3, init_fn=shardinit.reset_parameters)
    bound = 1 / 3**0.5
    want = shardinit.uniform_(torch.empty(4, 3), -bound, bound, seed=3, tensor_id="0.weight")
    assert torch.equal(model[0].weight.detach(), want)
    assert torch.equal(model[1].running_var, torch.ones(4))


def test_materialising_keeps_ties_and_real_tensors() -> None:
    with shardinit.recording():
        model = Decoder()
        model.register_buffer("real", torch.arange(3.0, device="cpu"))
    shardinit.init_model_(model, 3, device="cpu")
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.real, torch.arange(3.0))
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    assert model.embedding.weight.grad is not None
    lstm = recorded(Zoo)
    shardinit.init_model_(lstm, 3, device="cpu")
    lstm.lstm(torch.ones(5, 1, 3))  # its _flat_weights must be the new parameters
    assert all(
        weight is getattr(lstm.lstm, name)
        for weight, name in zip(lstm.lstm._flat_weights, lstm.lstm._flat_weights_names, strict=True)
    )


def test_extra_memory_is_one_tensor_at_most() -> None:
    """Exact programs need none; a played table needs itself and its temporaries."""

    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4096, 4096))
            self.other = nn.Parameter(torch.empty(4096, 4096))
            nn.init.trunc_normal_(self.weight)
            nn.init.normal_(self.other)
            with torch.no_grad():
                self.other[5] = 0

    with shardinit.recording():
        model = Big()
    plan = shardinit.record(model)
    model = nn.Module()
    model.weight, model.other = nn.Parameter(torch.zeros(4096, 4096)), nn.Parameter(torch.zeros(4096, 4096))
    plan.apply_(model, 1)

    def resident_peak_kib() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    before = resident_peak_kib()
    plan.apply_(model, 2)
    assert resident_peak_kib() - before < 4096, "128 MiB were filled"


# ---- refusals -----------------------------------------------------------------------------------------------------


def test_error_no_memory() -> None:
    with pytest.raises(ValueError, match=r"is on meta and has no memory: pass device= to init_model_"):
        shardinit.init_model_(recorded(), 3)


def test_error_not_recorded() -> None:
    with pytest.raises(shardinit.RecordError, match="was not built inside recording"):
        shardinit.init_model_(nn.Linear(2, 2), 3)


def test_error_uninitialised_names_all_and_the_ways_out() -> None:
    class Holes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.empty(3))
            self.second = nn.Parameter(torch.zeros(3))
            self.register_buffer("third", torch.empty(2))

    model = recorded(Holes)
    with pytest.raises(shardinit.UninitializedError) as caught:
        shardinit.init_model_(model, 3, device="cpu")
    message = str(caught.value)
    assert "first" in message and "third" in message and "second" not in message
    assert "recording()" in message and "init_fn" in message and "keep=" in message
    shardinit.init_model_(model, 3, keep=["first", "third"])
    assert torch.equal(model.second.detach(), torch.zeros(3))


def test_error_leaves_the_model_unchanged() -> None:
    plan = shardinit.record(recorded())
    other = Decoder(layers=3)
    before = state(other)
    with pytest.raises(
        ValueError, match=r"the Plan must know every tensor of the model, got \d+ that it lacks: layers\.2\."
    ):
        plan.apply_(other, 3)
    assert_same_state(state(other), before)
    wide = Decoder(dim=10)
    with pytest.raises(
        ValueError, match=r"the model's shape must be the recorded one, got \[\d+, 10\], recorded \[\d+, 8\]"
    ):
        plan.apply_(wide, 3)
    small = Decoder()
    before = state(small)
    for bad in (True, 1.5, "1"):
        with pytest.raises(TypeError, match="seed must be an int"):
            plan.apply_(small, bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed must be in"):
        plan.apply_(small, 2**64)
    with pytest.raises(TypeError, match="keep must be a sequence of glob patterns, got 'head'"):
        plan.apply_(small, 3, keep="head")
    with pytest.raises(TypeError, match="keep must hold glob patterns"):
        plan.apply_(small, 3, keep=[1])  # type: ignore[list-item]
    expanded = Decoder()
    expanded.norm.weight = nn.Parameter(torch.ones(1).expand(8))
    with pytest.raises(ValueError, match=r"norm\.weight"):
        plan.apply_(expanded, 3)
    assert_same_state(state(small), before)


def test_error_fill_named() -> None:
    plan = shardinit.record(recorded())
    with pytest.raises(ValueError, match="fill_: the Plan must know the tensor, got 'nope'"):
        plan.fill_("nope", torch.empty(3), seed=1)
    with pytest.raises(ValueError, match="the box must lie inside global_shape"):
        plan.fill_("cos", torch.empty(17, 4), offset=(0, 0), seed=1)
    with pytest.raises(ValueError, match=r"offset \+ elements must be at most the 64 of global_shape"):
        plan.fill_("cos", torch.empty(60), offset=5, seed=1)
    with pytest.raises(ValueError, match="have as many dimensions"):
        plan.fill_("cos", torch.empty(4), offset=(1, 1), seed=1)


def test_error_param_init_fn_off_meta() -> None:
    with pytest.raises(
        ValueError, match="every parameter must be on meta, or FSDP never calls the function, got weight on cpu"
    ):
        shardinit.param_init_fn(nn.Linear(2, 2), 3, init_fn=shardinit.reset_parameters)
    model = recorded()
    unit = shardinit.param_init_fn(model, 3)
    with pytest.raises(ValueError, match="the module must be part of the model that it was made for, got a Linear"):
        unit(nn.Linear(2, 2, device="meta"))


def test_param_init_fn_module_by_module() -> None:
    want = state(shardinit.init_model_(recorded(Zoo), 3, device="cpu"))
    model = recorded(Zoo)
    unit = shardinit.param_init_fn(model, 3, device="cpu")
    for module in [*model.modules()][::-1]:
        unit(module)
        unit(module)
    assert_same_state(state(model), want)
    tied = recorded()
    unit = shardinit.param_init_fn(tied, 3, device="cpu")
    for module in tied.modules():
        unit(module)
    assert tied.head.weight is tied.embedding.weight


def test_warnings_are_not_raised_by_an_ordinary_init() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardinit.init_model_(recorded(), 3, device="cpu")
