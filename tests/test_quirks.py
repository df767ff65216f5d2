"""Ways of models and frameworks that once left a tensor as it was, in silence, or sent init code another way than on
one process; and what is refused, by its message."""

from __future__ import annotations

import importlib
import math
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from fake_world import run_ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import parametrizations

import torch_shardinit as shardinit

SEED = 41
Make = Callable[[], nn.Module]


def recorded(make: Make) -> nn.Module:
    with shardinit.recording():
        return make()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    shardinit.init_model_(model, SEED, device="cpu")
    return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys() and got
    for name, tensor in got.items():
        assert_bitwise_equal(patterns(tensor), patterns(want[name]), name)


# ---- fills of computed weights ------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.layer = norm(nn.Linear(4, 5))
        nn.init.xavier_uniform_(self.layer.weight)


@pytest.mark.parametrize(
    ("norm", "what"),
    [
        (parametrizations.weight_norm, r"layer\.weight under its parametrization.*layer\.parametrizations\.weight\."),
        (
            parametrizations.spectral_norm,
            r"layer\.weight under its parametrization.*parametrizations\.weight\.original",
        ),
        (torch.nn.utils.weight_norm, r"layer\.weight under its weight_norm.*from layer\.weight_g and layer\.weight_v"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_error_a_fill_of_a_computed_weight(norm: Callable[[nn.Module], nn.Module], what: str) -> None:
    line = f"test_quirks.py:{Normed.__init__.__code__.co_firstlineno + 3}"
    with pytest.raises(shardinit.RecordError, match=rf"aten::uniform_ at \S*{re.escape(line)} fills {what}"):
        shardinit.record(recorded(lambda: Normed(norm)))


@pytest.mark.parametrize("installed", [True, False])
def test_a_package_that_fills_a_computed_weight_is_warned_of(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its users can't change it, wherever it is installed, and it has no effect on one process either."""
    name = f"package_{installed}".lower()
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "modeling.py").write_text("import torch\ndef init(model):\n    torch.nn.init.normal_(model.weight)\n")
    if installed:
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "top_level.txt").write_text(f"{name}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(f"{name}.modeling")

    def make() -> nn.Module:
        model = parametrizations.weight_norm(nn.Linear(4, 5))
        module.init(model)
        return model

    what = rf"aten::normal_ at \S*{name}/modeling\.py:3 fills weight"
    if not installed:
        with pytest.raises(shardinit.RecordError, match=what):
            shardinit.record(recorded(make))
        return
    with pytest.warns(UserWarning, match=f"without effect: .*{what}"):
        got = values(recorded(make))
    assert_same(got, values(recorded(lambda: parametrizations.weight_norm(nn.Linear(4, 5)))))


def test_fills_of_temporaries_that_are_no_weights_are_fine() -> None:
    """Example inputs, dropout in a run on them, and weights that are computed, filled and assigned."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), parametrizations.weight_norm(nn.Linear(4, 2)))
        model(torch.randn(2, 3))
        torch.empty_like(model[0].weight).normal_()
        weight = nn.init.normal_(model[2].weight)
        model[2].weight = weight
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = shardinit.record(recorded(make))
    assert "normal" in plan.lookup("2.parametrizations.weight.original1").program.describe()  # type: ignore[union-attr]
    fine = recorded(lambda: torch.nn.utils.spectral_norm(nn.Linear(4, 3)))
    with shardinit.recording():
        nn.init.ones_(fine.weight)  # before the first forward its memory is weight_orig's
    assert shardinit.record(fine).lookup("weight_orig").program.describe() == "fill(1)"  # type: ignore[union-attr]


def test_error_a_parametrization_that_looks_at_random_values() -> None:
    line = re.escape(f"test_quirks.py:{sys._getframe().f_lineno + 2}")
    with pytest.raises(shardinit.RecordError, match=rf"needs the values.*{line}, but they depend on random numbers"):
        recorded(lambda: parametrizations.orthogonal(nn.Linear(5, 5)))


# ---- init code that asks what it has ------------------------------------------------------------------------------


class Asks(nn.Linear):
    """Does nothing where it thinks that there is nothing to write to, in the ways of real projects."""

    def __init__(self) -> None:
        super().__init__(6, 8)
        self.init_weights()

    def init_weights(self) -> None:
        if self.weight.is_meta or any(p.is_meta for p in self.parameters()):
            return
        if torch.tensor([]).device == torch.device("meta"):
            return
        if isinstance(self.weight, DTensor):
            raise AssertionError("on one process it is no DTensor")
        parts = [torch.randn(4, 6) * 0.5, torch.randn(4, 6)]
        with torch.no_grad():
            self.weight.copy_(torch.cat(parts))
        self.bias.data.fill_(0.5)


def reference() -> dict[str, torch.Tensor]:
    weight = shardinit.normal_(torch.empty(8, 6), seed=SEED, tensor_id="weight")
    weight[:4] *= 0.5
    return {"weight": weight, "bias": torch.full((8,), 0.5)}


def test_init_code_that_asks_for_meta_does_what_it_does_on_one_process() -> None:
    want = reference()
    assert_same(values(recorded(Asks)), want)
    with torch.device("meta"):
        assert_same(values(recorded(Asks)), want)
        unrecorded = Asks()
    assert unrecorded.weight.is_meta, "outside a recording is_meta tells the truth"
    shardinit.init_model_(unrecorded, SEED, init_fn=Asks.init_weights, device="cpu")
    assert_same({name: p.detach() for name, p in unrecorded.named_parameters()}, want)


def sharded_that_asks(tensor_parallel: bool) -> int:
    if tensor_parallel:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model: nn.Module = nn.Sequential(Asks())
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()}, src_data_rank=None)
        fully_shard(model, mesh=mesh["dp"])
    else:
        model = fully_shard(nn.Sequential(Asks()), mesh=init_device_mesh("cpu", (4,)))
    assert isinstance(model[0].weight, DTensor)
    shardinit.init_model_(model, SEED, init_fn=lambda m: m[0].init_weights(), rename=lambda name: name[2:])
    rank = torch.distributed.get_rank()
    want = reference()
    # Four rows of dp over tp: rank r has rows 2r' of the order in which the two axes cut.
    first = 2 * (rank % 2 * 2 + rank // 2) if tensor_parallel else 2 * rank
    for name, parameter in model[0].named_parameters():
        local = parameter.to_local().detach()
        assert_bitwise_equal(patterns(local), patterns(want[name][first : first + 2]), name)
    return first


@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_init_code_that_asks_for_dtensors_sees_none(tensor_parallel: bool) -> None:
    assert sorted(run_ranks(sharded_that_asks, [0, 1, 2, 3], 4, tensor_parallel)) == [0, 2, 4, 6]


def test_flags_that_say_done_are_put_aside_and_back() -> None:
    """transformers sets one on modules and on tensors."""

    def init(model: nn.Module) -> None:
        for parameter in model.parameters():
            if not getattr(parameter, "_is_hf_initialized", False) and not getattr(model, "_is_hf_initialized", False):
                nn.init.constant_(parameter, 3.0)
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        model._is_hf_initialized = True  # type: ignore[assignment]

    model = recorded(lambda: nn.Linear(2, 2))
    init(model)
    for _ in range(2):
        plan = shardinit.record(model, init)
        assert [entry.program.describe() for entry in plan.entries.values()] == ["fill(3)"] * 2
    assert model._is_hf_initialized and all(p._is_hf_initialized for p in model.parameters())  # type: ignore[attr-defined]


# ---- what a model may be made of ----------------------------------------------------------------------------------


def test_lazy_modules() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.LazyConv1d(4, 3), nn.LazyLinear(5), nn.LazyBatchNorm1d())

    def run_inside() -> nn.Module:
        model = make()
        model(torch.zeros(2, 3, 9))
        return model

    got = values(recorded(run_inside))
    bound = 1 / math.sqrt(7)
    want = shardinit.uniform_(torch.empty(5, 7), -bound, bound, seed=SEED, tensor_id="1.weight")
    assert torch.equal(got["1.weight"], want) and got["2.num_batches_tracked"] == 1
    assert got["0.weight"].shape == (4, 3, 3)

    with pytest.raises(shardinit.RecordError, match=r"LazyConv1d\.weight is lazy and has no shape yet: run the model"):
        values(recorded(make))

    run_later = recorded(make)
    run_later(torch.zeros(2, 3, 9, device="meta"))
    with pytest.raises(shardinit.UninitializedError, match=r"0\.bias \(nothing wrote it: its module was not built"):
        values(run_later)
    shardinit.init_model_(run_later, SEED, init_fn=shardinit.reset_parameters)
    assert torch.equal(run_later[1].weight.detach(), want)


def test_wrappers_of_parts_and_of_the_whole() -> None:
    """Checkpointing and compilation put names in between, in a recording or after it."""

    def make(inside: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)))
        return wrap(model) if inside else model

    def wrap(model: nn.Module) -> nn.Module:
        model[0] = checkpoint_wrapper(model[0])
        model[1][1] = torch.compile(checkpoint_wrapper(model[1][1]))
        return torch.compile(model)  # type: ignore[return-value]

    want = values(recorded(lambda: make(False)))
    for model in (recorded(lambda: make(True)), wrap(recorded(lambda: make(False)))):
        got = values(model)
        plain = {re.sub(r"_orig_mod\.|_checkpoint_wrapped_module\.", "", name): tensor for name, tensor in got.items()}
        assert plain.keys() != got.keys()
        assert_same(plain, want)


class Mixed(nn.Module):
    """A bf16 trunk, an fp32 norm, an fp64 router, an fp16 weight."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 7, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(7)
        self.router = nn.Linear(7, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.randn(7, 2).to(torch.float16))
        nn.init.orthogonal_(self.router.weight)
        nn.init.trunc_normal_(self.trunk.weight, std=0.02)


def mixed_shard() -> int:
    import copy

    whole = recorded(Mixed)
    shardinit.init_model_(whole, SEED, device="cpu")
    mesh = init_device_mesh("cpu", (3,))
    truth, ours = fully_shard(copy.deepcopy(whole), mesh=mesh), fully_shard(recorded(Mixed), mesh=mesh)
    shardinit.init_model_(ours, SEED, device="cpu")
    for (name, got), want in zip(ours.named_parameters(), truth.parameters(), strict=True):
        assert got.dtype == want.dtype
        assert_bitwise_equal(patterns(got.to_local()), patterns(want.to_local()), name)  # type: ignore[attr-defined]
    return len({p.dtype for p in ours.parameters()})


def test_mixed_dtypes_in_one_model() -> None:
    assert run_ranks(mixed_shard, [0, 1, 2], 3) == [4, 4, 4]
    got, stock = values(recorded(Mixed)), Mixed()
    assert {name: tensor.dtype for name, tensor in got.items()} == {n: p.dtype for n, p in stock.named_parameters()}
    gram = got["router.weight"] @ got["router.weight"].T
    torch.testing.assert_close(gram, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-14)


class Rope(nn.Module):
    """Assigns its buffer anew in its init code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.register_buffer("cache", self.table(2), persistent=False)

    @staticmethod
    def table(scale: float) -> torch.Tensor:
        return torch.outer(torch.arange(4.0), torch.arange(4.0) * scale).cos()

    def init_weights(self) -> None:
        self.cache = self.table(3)
        nn.init.normal_(self.weight)


def rope_shard() -> bool:
    model = fully_shard(recorded(Rope), mesh=init_device_mesh("cpu", (2,)))
    shardinit.init_model_(model, SEED, init_fn=Rope.init_weights, device="cpu")  # type: ignore[arg-type]
    return torch.equal(model.cache, Rope.table(3))  # type: ignore[union-attr, arg-type]


def test_buffers_that_init_code_assigns_anew() -> None:
    assert run_ranks(rope_shard, [0, 1], 2) == [True, True]
    real = Rope()
    buffer = real.cache
    shardinit.init_model_(real, SEED, init_fn=Rope.init_weights)  # type: ignore[arg-type]
    assert real.cache is buffer and torch.equal(buffer, Rope.table(3))  # type: ignore[arg-type]


def test_non_contiguous_parameters() -> None:
    """Memory order is no part of a value: channels_last, transposed, and a part of a larger tensor."""

    class Strided(nn.Module):
        def __init__(self, is_strided: bool) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            rows = torch.empty(5, 7).t() if is_strided else torch.empty(7, 5)
            part = torch.empty(6, 8)[1:5, ::2] if is_strided else torch.empty(4, 4)
            self.rows, self.part = nn.Parameter(rows), nn.Parameter(part)
            if is_strided:
                self.to(memory_format=torch.channels_last)
            with torch.no_grad():
                for parameter in self.parameters():
                    nn.init.normal_(parameter).sin_()
                self.rows[2].zero_()

    got, want = values(recorded(lambda: Strided(True))), values(recorded(lambda: Strided(False)))
    assert not got["rows"].is_contiguous() and not got["conv.weight"].is_contiguous()
    assert_same(got, want)


# ---- stand-ins of other frameworks --------------------------------------------------------------------------------


def test_error_empty_stand_ins() -> None:
    """Sharded by a framework that keeps the elements elsewhere: once nothing was written, in silence."""
    model = recorded(lambda: nn.Linear(3, 2))
    model.weight = nn.Parameter(torch.empty(0))
    with pytest.raises(
        shardinit.RecordError, match=r"Linear\.weight was recorded with shape \[2, 3\] and is empty now"
    ):
        shardinit.init_model_(model, SEED, device="cpu")
    plan = shardinit.record(recorded(lambda: nn.Linear(3, 2)))
    with pytest.raises(
        ValueError, match=r"weight: the model's shape must be the recorded one, got \[0\], recorded \[2, 3\]"
    ):
        plan.apply_(model, SEED)


def test_tensors_without_elements_are_no_stand_ins() -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.a, model.b = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 4))
        model.c = nn.Linear(2, 0)
        return model

    assert set(values(recorded(make))) == {"a", "b", "c.weight", "c.bias"}
