"""Plan.apply_ and Plan.fill_ where names, ties and targets do not fit; and what is written before an error: nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn as nn
from test_hostile import P, recorded, values

import torch_shardinit as shardinit
from torch_shardinit.model import materialise_

# ---- parts, ties, names -------------------------------------------------------------------------------------------


def test_error_a_part_that_holds_one_name_of_a_tie() -> None:
    def whole() -> nn.Module:
        model = nn.ModuleDict({"emb": nn.Embedding(3, 3), "head": nn.Linear(3, 3, bias=False), "mid": nn.Linear(3, 3)})
        model["head"].weight = model["emb"].weight
        return model

    with shardinit.recording():
        model = whole()
    plan = shardinit.record(model)
    with pytest.raises(
        shardinit.RecordError, match=r"head\.weight: it was recorded under a name outside of this model"
    ):
        shardinit.record(model["head"], rename=lambda name: f"head.{name}")
    assert shardinit.record(model["mid"], rename=lambda name: f"mid.{name}").entries.keys() == {
        "mid.weight",
        "mid.bias",
    }
    stage = nn.Linear(3, 3, bias=False)
    plan.apply_(stage, 3, rename=lambda name: f"head.{name}")
    want = shardinit.normal_(torch.empty(3, 3), 1.0, seed=3, tensor_id="emb.weight")
    assert torch.equal(stage.weight.detach(), want)


def test_error_names_that_do_not_fit_the_plan() -> None:
    with shardinit.recording():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = shardinit.record(model)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"several names must be one tensor of the Plan, got 0\.weight, 1\.weight"):
        plan.apply_(tied, 3)
    with pytest.raises(ValueError, match=r"rename must give different tensors different names, got 0\.weight for 0\.w"):
        plan.apply_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 3, rename=lambda name: f"0.{name[2:]}")


def test_warning_where_a_tie_was_lost() -> None:
    with shardinit.recording():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
    model[0].to_empty(device="cpu")
    model[1].to_empty(device="cpu")
    with pytest.warns(UserWarning, match=r"1\.weight and 0\.weight were recorded as one tensor and are two"):
        shardinit.init_model_(model, 3)
    assert torch.equal(model[0].weight, model[1].weight)


def test_materialising_keeps_shared_memory_and_drops_gradients() -> None:
    with shardinit.recording():
        model = nn.Linear(3, 2)
        model.register_buffer("view", model.weight.detach())
        model.again = P(model.weight.data)
    model(torch.ones(1, 3, device="meta")).sum().backward()
    shardinit.init_model_(model, 3, device="cpu")
    assert model.weight.grad is None
    model.weight.data.add_(1)
    assert torch.equal(model.view, model.weight) and torch.equal(model.again, model.weight)


# ---- nothing is written before all checks, and errors name the tensor ---------------------------------------------


def test_error_unwritten_memory_leaves_the_model_unchanged() -> None:
    def make() -> dict[str, torch.Tensor]:
        b = P(torch.empty(3))
        b.data.masked_fill_(torch.arange(3) > 0, 1.0)
        return {"a": P(torch.randn(3)), "b": b}

    model = recorded(make)
    materialise_(model, "cpu")
    model.a.data.fill_(5.0)
    with pytest.raises(shardinit.UninitializedError, match="b: some elements depend on memory that nothing wrote"):
        shardinit.init_model_(model, 3)
    assert (model.a == 5).all()


def test_error_far_tail_names_the_tensor() -> None:
    model = recorded(lambda: {"w": P(nn.init.trunc_normal_(torch.empty(3), std=0.01, a=1, b=2))})
    with pytest.raises(ValueError, match=r"w: trunc_normal_: \[a, b\] must come within 12 std"):
        values(model)


def test_error_fill_named_targets() -> None:
    plan = shardinit.record(recorded(lambda: {"w": P(torch.randn(8, 8)), "t": torch.arange(4.0) / 2}))
    cases: list[tuple[type[Exception], str, str, object, object]] = [
        (ValueError, r"without an offset the tensor must be the whole, \[8, 8\], got \[4, 8\]", "w", (4, 8), None),
        (ValueError, r"without an offset the tensor must be the whole, \[8, 8\], got \[4\]", "w", (4,), None),
        (ValueError, "a run of elements must be 1-D or contiguous", "w", torch.empty(4, 2, 2).permute(2, 1, 0), 3),
        (ValueError, "each element must have memory of its own", "t", torch.zeros(1).expand(4), None),
        (
            ValueError,
            r"recorded as torch\.float32 must be of floating point, got torch\.int64",
            "t",
            torch.arange(4),
            None,
        ),
        (TypeError, r"fill_: tensor must be a torch\.Tensor, got ndarray", "w", np.zeros((8, 8), np.float32), None),
    ]
    for error, message, name, target, offset in cases:
        tensor = torch.empty(target) if isinstance(target, tuple) else target
        with pytest.raises(error, match=message):
            plan.fill_(name, tensor, seed=1, offset=offset)  # type: ignore[arg-type]


def test_error_kept_buffers_on_meta() -> None:
    """A Plan of a real model leaves its unwritten buffers alone; on meta there is nothing to leave alone."""

    def init(model: nn.Module) -> None:
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)

    plan = shardinit.record(nn.BatchNorm1d(3), init)
    assert plan.lookup("running_var").kept
    other = nn.BatchNorm1d(3)
    other.running_var.fill_(7.0)
    plan.apply_(other, 3)
    assert (other.running_var == 7).all()
    other.running_var = torch.empty(3, device="meta")
    with pytest.raises(shardinit.UninitializedError, match=r"running_var \(nothing wrote it\)"):
        plan.apply_(other, 3)


def test_an_rnn_runs_on_what_param_init_fn_made() -> None:
    with shardinit.recording():
        model = nn.LSTM(2, 3)
    shardinit.param_init_fn(model, 3, device="cpu")(model)
    flat = [getattr(model, name) for name in model._flat_weights_names]
    assert all(weight is parameter for weight, parameter in zip(model._flat_weights, flat, strict=True))
    assert torch.isfinite(model(torch.ones(1, 1, 2))[0]).all()


def test_init_fn_that_gives_a_parameter_other_memory() -> None:
    """The random numbers move from the old memory, which is no tensor of the model any more, to the new."""
    with shardinit.recording():
        model = nn.Linear(3, 2)

    def init(module: nn.Module) -> None:
        module.weight.data = module.weight.data * 2

    program = shardinit.record(model, init).lookup("weight").program
    assert program.describe() == "uniform(a=-0.57735, b=0.57735); mul(2)"


def test_played_tensors_do_not_depend_on_the_number_of_threads() -> None:
    """linalg.qr gives other bits with two threads from about this size on."""
    model = recorded(lambda: {"q": torch.linalg.qr(torch.arange(512.0 * 512).cos().view(512, 512))[0]})
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(values(model)["q"])
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_a_row_that_a_copy_repeats() -> None:
    def make() -> dict[str, torch.Tensor]:
        row = torch.zeros(4)
        row[:2] = 1.0
        return {"w": torch.empty(3, 4).copy_(row)}

    assert torch.equal(values(recorded(make))["w"], make()["w"])
