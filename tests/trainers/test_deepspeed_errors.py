"""DeepSpeed: what is refused and says why, and zero.Init where no recording is on."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import deepspeed
import deepspeed_world as dw
import pytest
import torch
import torch.nn as nn
from deepspeed.runtime.zero import partition_parameters
from test_deepspeed import SEED, as_context, in_one_process

import torch_shardinit as shardinit
from torch_shardinit.locate import locate
from torch_shardinit.verify_processes import run_gloo


def _errors_worker(rank: int, world: int) -> None:
    settings = dw.config(3, stage3_param_persistence_threshold=0)
    model: Any = as_context(settings)
    weight = model.up.weight

    # An init of the stand-in itself.
    for fill in (shardinit.normal_, shardinit.uniform_, shardinit.trunc_normal_):
        with pytest.raises(ValueError, match=r"ZeRO-3 parameter is a stand-in of size 0 for \[13, 6\]"):
            fill(weight, seed=SEED)
    with pytest.raises(ValueError, match=r"up\.weight: without an offset the tensor must be the whole, \[13, 6\]"):
        shardinit.record(model).fill_("up.weight", weight, seed=SEED)
    with pytest.raises(shardinit.RecordError, match=r"Linear\.weight was recorded, then .* was replaced"):
        with shardinit.recording():
            nn.init.normal_(weight)
    # Its partition itself can be filled.
    length = weight.ds_tensor.numel()
    shardinit.normal_(weight.ds_tensor, 0.02, offset=rank * length, seed=SEED, tensor_id="x")
    want = shardinit.normal_(torch.empty(13, 6), 0.02, seed=SEED, tensor_id="x").flatten()
    assert torch.equal(weight.ds_tensor, want[rank * length :][:length])

    with deepspeed.zero.GatheredParameters([weight]), pytest.raises(ValueError, match=r"Linear\.weight: .* gathered"):
        shardinit.init_model_(model, SEED, device="cpu")
    with deepspeed.zero.Init(config_dict_or_path=settings):
        with pytest.raises(shardinit.RecordError, match=r"recording\(\) must be entered before deepspeed\.zero\.Init"):
            with shardinit.recording():
                pass
    with pytest.raises(shardinit.RecordError, match=r"Linear\.weight must be on meta for zero\.Init"):
        with shardinit.recording(), deepspeed.zero.Init(config_dict_or_path=settings):
            linear = nn.Linear(2, 3, device="cpu")
    assert isinstance(linear, nn.Linear)

    # A version that keeps something elsewhere, or means something else by it.
    def error(owner: Any, attribute: str, value: Any) -> str:
        with mock.patch.object(owner, attribute, value), pytest.raises((TypeError, ValueError)) as caught:
            locate(model)
        return str(caught.value)

    short = weight.ds_tensor[:38]
    short.final_location, short.status = weight.ds_tensor.final_location, weight.ds_tensor.status
    assert "must be 1-D and contiguous with 39 of 78" in error(weight, "ds_tensor", short)
    assert "its ds_tensor must be a tensor, got None" in error(weight, "ds_tensor", None)
    assert "ds_numel must be that of its shape" in error(weight, "ds_numel", 77)
    assert "on rank 7 of 2" in error(weight, "ds_zero_partition_rank", 7)
    assert "swapped out" in error(weight.ds_tensor, "final_location", "nvme")
    weight.ds_tensor.ds_quant_scale = torch.ones(1)
    with pytest.raises(TypeError, match="quantised"):
        locate(model)
    del weight.ds_tensor.ds_quant_scale
    rank_in_group = weight.ds_zero_partition_rank
    del weight.ds_zero_partition_rank
    with pytest.raises(ValueError, match=r"must have ds_zero_partition_rank, got one without \(deepspeed 0\.19"):
        locate(model)
    weight.ds_zero_partition_rank = rank_in_group
    assert locate(model).pieces


def _undisturbed_worker(rank: int, world: int) -> None:
    """zero.Init outside of recordings, and on another thread than one, is DeepSpeed's own."""
    init = partition_parameters.Init
    before = init.__enter__, init.__exit__, init._convert_to_zero_parameters
    found: list[Any] = []

    def other() -> None:
        with deepspeed.zero.Init(config_dict_or_path=dw.config(3)):
            found.append(nn.Linear(4, 4).weight)

    with shardinit.recording():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
    assert found and hasattr(found[0], "ds_id") and not found[0].ds_tensor.is_meta
    with pytest.raises(KeyError), shardinit.recording():
        raise KeyError
    assert (init.__enter__, init.__exit__, init._convert_to_zero_parameters) == before


def test_errors_and_what_is_left_alone() -> None:
    run_gloo(in_one_process, 2, [_errors_worker, _undisturbed_worker], limit=150, threads=1)
