"""record(): ties, wrapped models, init code on stand-ins, and what is put back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from fake_world import run_ranks
from recorded_models import Block, Decoder, Zoo

from torch_shardinit.errors import RecordError
from torch_shardinit.plan import Plan
from torch_shardinit.program import Exact, Unwritten
from torch_shardinit.record import record, recording, reset_parameters


def build() -> Decoder:
    with recording():
        return Decoder()


def init_weights(model: nn.Module) -> None:
    """As projects write it: over modules() by type, then over named parameters."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.03)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.05)
            module.weight.data[module.padding_idx].zero_()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" in name:
            nn.init.ones_(parameter)


def wrapped_plans(kind: str) -> list[bool]:
    """In a forked rank: is a wrapped model's Plan the unwrapped one's, without and with init code?"""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.nn.parallel import DistributedDataParallel as DDP

    want, want_init = record(build()), record(build(), init_weights)
    model: nn.Module = build()
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind.startswith("fsdp1"):
        model.to_empty(device="cpu")
        model.head.weight = model.embedding.weight
        model = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=kind == "fsdp1_orig",
            device_id=torch.device("cpu"),
        )
    elif kind == "ddp":
        model = DDP(model.to_empty(device="cpu"))
    elif kind == "compiled":
        model.layers[0] = checkpoint_wrapper(model.layers[0])
        model = torch.compile(model)  # type: ignore[assignment]
    before = {name: (id(tensor), tensor.shape) for name, tensor in model.named_parameters()}
    attributes = [dict(module.__dict__) for module in model.modules()]
    plans = [record(model) == want, record(model, init_weights) == want_init, record(model) == want]
    plans.append({name: (id(tensor), tensor.shape) for name, tensor in model.named_parameters()} == before)
    plans.append(all(dict(m.__dict__).keys() == old.keys() for m, old in zip(model.modules(), attributes, strict=True)))
    if kind == "fsdp2":
        model.to_empty(device="cpu")
        plans.append(record(model) == want)
    return plans


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "fsdp1_orig", "ddp", "compiled"])
@pytest.mark.parametrize("world", [2, 5])
def test_wrapped_models_carry_the_plan(kind: str, world: int) -> None:
    for plans in run_ranks(wrapped_plans, [world - 1], world, kind):
        assert all(plans), plans


def sharded_without_recording(orig: bool | None) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    def make() -> Zoo:
        model = Zoo()
        del model.logit_scale  # FSDP1 takes no scalars
        return model

    model: nn.Module = make()
    want = record(make(), apply_reset)
    if orig is None:
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    else:
        model.narrow.data = model.narrow.data.float()  # FSDP1 flattens one dtype a unit
        policy = ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.LSTM})
        model = FSDP(model, auto_wrap_policy=policy, use_orig_params=orig, device_id=torch.device("cpu"))
    got = record(model, apply_reset)
    assert got.lookup("bilinear.weight").program.describe() == "fill(2)"
    return {name: (entry.shape, entry.program) for name, entry in got.entries.items()} == {
        name: (entry.shape, entry.program) for name, entry in want.entries.items()
    }


def apply_reset(model: nn.Module) -> None:
    reset_parameters(model)
    model.apply(lambda module: nn.init.constant_(module.weight, 2.0) if isinstance(module, nn.Bilinear) else None)


@pytest.mark.parametrize("orig", [None, False, True])
def test_init_code_sees_global_shapes(orig: bool | None) -> None:
    assert run_ranks(sharded_without_recording, [2], 3, orig) == [True]


def test_ties_under_any_alias() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.z = nn.Linear(3, 3)
            self.B = nn.Linear(3, 3)
            self.a = nn.Linear(3, 3)
            self.shared = self.a
            self.B.weight = self.z.weight
            self.register_buffer("bias_view", self.z.bias.data)

    with recording():
        model = Tied()
    plan = record(model)
    assert plan.entries.keys() == {"B.weight", "B.bias", "a.weight", "a.bias", "bias_view"}
    assert plan.lookup("z.weight").aliases == ("B.weight", "z.weight"), "the least name in code-point order"
    assert plan.lookup("shared.bias").name == "a.bias" and plan.lookup("z.bias").name == "bias_view"
    assert record(model, reset_parameters).entries.keys() == plan.entries.keys()
    renamed = record(model, rename=lambda name: "~" + name if name == "B.weight" else name)
    assert renamed.lookup("~B.weight").name == "z.weight"


def test_ties_made_after_recording() -> None:
    with recording():
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        nn.init.normal_(model["b"].weight)
    model["a"].weight = model["b"].weight
    entry = record(model).lookup("a.weight")
    assert entry.aliases == ("a.weight", "b.weight") and entry.program.describe() == "normal(std=1, mean=0)"
    model["a"].weight = model["b"].weight = nn.Parameter(torch.empty(3, 3, device="meta"))
    with pytest.raises(RecordError, match=r"Linear.weight shares its memory .* tie parameters inside recording"):
        record(model)


def test_parameters_replaced_during_init_are_resolved_at_the_end() -> None:
    def replace(model: nn.Module) -> None:
        model.weight.data = torch.full((2, 3), 4.0)
        model.bias = nn.Parameter(torch.zeros(2))

    with recording():
        model = nn.Linear(3, 2)
        replace(model)
    plan = record(model)
    weight, bias = model.weight, model.bias
    assert plan.lookup("weight").program.describe() == "fill(4)" and plan.lookup("bias").program.describe() == "fill(0)"
    assert record(nn.Linear(3, 2), replace) == plan and record(model, replace) == plan
    assert model.weight is weight and model.bias is bias


def test_init_code_comes_after_what_was_recorded() -> None:
    def halve(model: nn.Module) -> None:
        with torch.no_grad():
            model.norm.weight.mul_(0.5)
            model.head.weight[3].fill_(1.0)

    model = build()
    plan, after = record(model), record(model, halve)
    assert after.lookup("norm.weight").program.describe() == "fill(1); mul(0.5)"
    want = "normal(std=0.02, mean=0); [2, 0:8] fill(0); [3, 0:8] fill(1)"
    assert after.lookup("embedding.weight").program.describe() == want
    assert record(model) == plan, "recording init code must not change what the model carries"
    unrecorded = record(Decoder(), halve).lookup("norm.weight").program
    assert isinstance(unrecorded, Unwritten) and "mul_ at " in unrecorded.reason


def test_everything_that_init_code_changes_is_put_back() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 2)
            self.linear = nn.Linear(2, 2)
            self.linear.weight.scale = 3.0
            self.register_buffer("table", torch.zeros(2))
            self._is_hf_initialized = True

        def init_weights(self) -> None:
            if getattr(self, "_is_hf_initialized", False):
                return
            assert all(p.device.type == "meta" for p in self.parameters()) and self.linear.weight.scale == 3.0
            assert [id(w) for w in self.lstm._flat_weights] == [id(p) for p in self.lstm.parameters()]
            self.lstm.reset_parameters()
            nn.init.normal_(self.linear.weight, std=self.linear.weight.scale)
            self.table = torch.arange(2.0)
            self.extra = nn.Parameter(torch.zeros(1))
            self.flag, self._is_hf_initialized = True, True
            self.child = nn.Linear(2, 2)
            del self.linear.bias

    model = Model()
    state = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    flat = list(model.lstm._flat_weights)
    generator = torch.get_rng_state()
    plan = record(model, Model.init_weights)
    assert plan.lookup("linear.weight").program.describe() == "normal(std=3, mean=0)"
    assert plan.lookup("table").program.describe() == "arange"
    assert isinstance(plan.lookup("linear.bias").program, Unwritten) and "extra" not in plan.entries

    def fail(model: nn.Module) -> None:
        model.init_weights()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record(model, fail)
    now = model.state_dict(keep_vars=True)
    assert now.keys() == state.keys()
    for name, (tensor, values) in state.items():
        assert now[name] is tensor and torch.equal(tensor, values), name
    assert model._is_hf_initialized and not hasattr(model, "flag") and not hasattr(model, "child")
    assert all(a is b for a, b in zip(model.lstm._flat_weights, flat, strict=True))
    assert torch.equal(torch.get_rng_state(), generator)
    model.lstm(torch.zeros(1, 1, 3))


def test_reset_parameters_goes_children_first() -> None:
    order = []

    class Module(nn.Module):
        def __init__(self, name: str, *children: nn.Module) -> None:
            super().__init__()
            self.name, self.inner = name, nn.ModuleList(children)

        def reset_parameters(self) -> None:
            order.append(self.name)

    class Private(Module):
        reset_parameters = None  # type: ignore[assignment]

        def _reset_parameters(self) -> None:
            order.append("_" + self.name)

    shared = Module("shared")
    reset_parameters(Module("root", Private("p", shared), Module("b", shared)))
    assert order == ["shared", "_p", "b", "root"]


def test_reset_parameters_gives_torchs_defaults() -> None:
    with recording():
        model = nn.ModuleDict({"mha": nn.MultiheadAttention(4, 2), "bn": nn.BatchNorm1d(3), "conv": nn.Conv1d(2, 3, 3)})
    assert record(model, reset_parameters) == record(model)
    with torch.device("meta"):
        unrecorded = nn.ModuleDict(
            {"mha": nn.MultiheadAttention(4, 2), "bn": nn.BatchNorm1d(3), "conv": nn.Conv1d(2, 3, 3)}
        )
    plan = record(unrecorded, reset_parameters)
    same = {n for n, e in plan.entries.items() if e.program == record(model).lookup(n).program}
    assert same == plan.entries.keys()


def test_buffers_of_an_ordinary_model_are_kept() -> None:
    def init(model: nn.Module) -> None:
        nn.init.ones_(model.norm.weight)

    real = record(Decoder(), init)
    assert real.lookup("cos").kept and real.lookup("cos").program_class == "kept"
    assert not real.lookup("head.weight").kept and real.lookup("head.weight").program_class == "unwritten"
    with torch.device("meta"):
        meta = Decoder()
    assert not record(meta, init).lookup("cos").kept


def test_channels_last_and_transposed_parameters() -> None:
    with recording():
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        model.transposed = nn.Parameter(torch.empty(5, 4).t())
        with torch.no_grad():
            nn.init.uniform_(model.transposed)
            model.transposed[1].fill_(2.0)
    plan = record(model)
    assert plan.lookup("transposed").shape == (4, 5)
    assert plan.lookup("transposed").program.describe() == "uniform(a=0, b=1); [1, 0:5] fill(2)"
    assert isinstance(plan.lookup("weight").program, Exact)


def test_frozen_parameters_and_no_tensors() -> None:
    with recording():
        model = nn.Linear(2, 2).requires_grad_(False)
    seen = []
    record(model, lambda module: seen.append(module.weight.requires_grad) or reset_parameters(module))
    assert seen == [False]
    with recording():
        empty = nn.Sequential(nn.ReLU())
    assert record(empty).entries == {} and record(nn.ReLU()).entries == {}


def test_error_without_recording() -> None:
    with pytest.raises(RecordError, match=r"not built inside recording\(\).*give its init code"):
        record(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got int"):
        record(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("init", [lambda model: None, lambda model: nn.init.ones_(torch.empty(3))])
def test_error_init_code_wrote_nothing(init: Callable[[nn.Module], object]) -> None:
    with pytest.raises(RecordError, match=r"init_fn wrote no parameter or buffer.*_is_hf_initialized.*is_meta"):
        record(nn.Linear(2, 2), init)
    with pytest.raises(RecordError, match="wrote no parameter"):
        record(build(), init)


def test_error_lazy_modules() -> None:
    with pytest.raises(RecordError, match=r"LazyLinear.weight is lazy and has no shape yet"):
        record(nn.LazyLinear(3), reset_parameters)


def test_error_tensors_that_share_elements() -> None:
    with recording():
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        model["b"].weight = nn.Parameter(model["a"].weight.data.t())
    with pytest.raises(RecordError, match=r"b.weight and a.weight: two tensors that share elements"):
        record(model)


def test_tensors_outside_the_recording_are_listed_as_unwritten() -> None:
    with recording():
        inside = nn.Linear(2, 2)
    plan: Plan = record(nn.Sequential(inside, nn.Linear(2, 3)))
    assert isinstance(plan.lookup("0.weight").program, Exact)
    assert plan.lookup("1.weight").program.describe().startswith("nothing wrote it: its module was not built inside")
