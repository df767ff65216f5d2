"""Each private attribute of torch that locate reads: missing, or with another meaning, it is an error with torch's
version in it, and no fill."""

from __future__ import annotations

import re
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from fake_world import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import torch_shardinit as shardinit
from torch_shardinit.locate import locate
from torch_shardinit.locate.private import package_version, private

MISSING = object()


class WithTie(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(3, 5, bias=False)
        self.b.weight = self.a.weight


def changed(owner: Any, attribute: str, value: Any) -> Any:
    """A context in which owner.attribute is `value`, or MISSING: a property of the class goes before all else."""

    def get(self: Any) -> Any:
        if value is MISSING:
            raise AttributeError(attribute)
        return value

    return mock.patch.object(type(owner), attribute, property(get), create=True)


def message_with(owner: Any, attribute: str, value: Any, model: nn.Module) -> str:
    """What locate says of a model while a private attribute is not as it should be."""
    try:
        with changed(owner, attribute, value):
            locate(model)
    except (shardinit.ShardInitError, ValueError) as error:
        return str(error)
    return "no error"


FLAT = {
    "_is_flat_param": [False],
    "_sharded_size": [MISSING, torch.Size([7]), torch.Size([9, 1])],
    "_numels_with_padding": [MISSING, (15, 1, 5), (14, 1, 6, 1), (15, 5, 1, 1), (22,)],
    "_is_padding_mask": [MISSING, [False], [False, True, True, False], [False] * 4],
    "_param_infos": [MISSING, lambda infos: infos[:1], lambda infos: infos[::-1]],
    "_fqns": [MISSING, ("a.weight",), ("a.bias", "a.weight")],
    "_shapes": [MISSING, lambda shapes: shapes[:1], lambda shapes: (torch.Size([5, 2]), shapes[1])],
    "_strides": [MISSING, lambda strides: strides[:1], lambda strides: ((1, 5), strides[1])],
    "_contiguities": [MISSING, (True,), (False, True)],
    "_param_extensions": [MISSING, (None,), ("spec", None)],
    "_params": [MISSING, lambda params: params[:1]],
    "_shared_param_infos": [MISSING, lambda infos: (infos[0]._replace(prim_param_name="w"),)],
    "_shard_param_infos": [
        MISSING,
        lambda infos: infos[:1],
        lambda infos: (infos[0]._replace(offset_in_shard=1), infos[1]),
        lambda infos: (infos[0]._replace(intra_param_start_idx=0), infos[1]),
        lambda infos: (infos[0], infos[1]._replace(in_shard=False)),
        lambda infos: (infos[0]._replace(numel_in_shard=3), infos[1]),
    ],
    "_local_shard": [(3, 4)],
    "_full_param_padded": [0],
    "_full_prec_full_param_padded": ["none"],
}
HANDLE = {
    "flat_param": [MISSING, torch.zeros(10)],
    "rank": [MISSING, 0, 2, -1],
    "world_size": [MISSING, 1, 3],
    "uses_sharded_strategy": [MISSING, False],
}


def fsdp1_messages() -> dict[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(WithTie(), device_id=torch.device("cpu"), use_orig_params=True)
    handle, messages = model._handle, {"_handle missing": message_with(model, "_handle", MISSING, model)}
    for owner, cases in ((handle.flat_param, FLAT), (handle, HANDLE)):
        for attribute, values in cases.items():
            for index, value in enumerate(values):
                changed_value = value(getattr(owner, attribute)) if callable(value) else value
                label = f"{attribute} {'missing' if value is MISSING else index}"
                messages[label] = message_with(owner, attribute, changed_value, model)
    locate(model)  # all is as before
    return messages


def assert_all_name_the_version(messages: dict[str, str], num: int) -> None:
    assert len(messages) == num
    for label, message in messages.items():
        assert f"torch {torch.__version__}" in message, (label, message)
        if "missing" in label:
            attribute = label.split()[0]
            assert re.search(rf"must have the attribute {attribute}, got none", message), (label, message)


def test_error_fsdp1() -> None:
    (messages,) = run_ranks(fsdp1_messages, [1], 2)
    assert_all_name_the_version(messages, sum(map(len, [*FLAT.values(), *HANDLE.values()])) + 1)


def dtensor_messages() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, strided = nn.Module(), nn.Module()
    model.w = nn.Parameter(distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0), Shard(1)], src_data_rank=None))
    strided.w = nn.Parameter(distribute_tensor(torch.zeros(7, 3), mesh["tp"], [Shard(0)], src_data_rank=None))
    fully_shard(strided, mesh=mesh["dp"])
    assert type(strided.w.placements[0]).__name__ == "_StridedShard"
    spec, order = model.w._spec, model.w._spec.shard_order
    strided_shard = strided.w.placements[0]
    cases = [
        (model, model.w, "_spec", [MISSING, strided.w._spec]),
        (model, model.w, "_local_tensor", [MISSING, torch.zeros(3, 3), torch.zeros(3)]),
        (model, spec, "placements", [MISSING, (Shard(1), Shard(0)), (Shard(0), Shard(0))]),
        (model, spec, "shard_order", [MISSING, (), order[:1], order[::-1] + order]),
        (model, order[0], "mesh_dims", [MISSING, (1,)]),
        (model, order[0], "tensor_dim", [MISSING, 1]),
        (model, spec.placements[0], "dim", [MISSING, 1]),
        (strided, strided.w._spec, "use_strided_shard_as_shard_order", [MISSING, False]),
        (strided, strided_shard, "split_factor", [MISSING, 3]),
        (strided, strided_shard, "dim", [MISSING, 1]),
    ]
    messages = {
        f"{attribute} {'missing' if value is MISSING else index} of {type(owner).__name__}": message_with(
            owner, attribute, value, of
        )
        for of, owner, attribute, values in cases
        for index, value in enumerate(values)
    }
    locate(model), locate(strided)  # all is as before
    return messages


def test_error_dtensor() -> None:
    # Uneven sizes, on a rank where the second chunk is shorter.
    (messages,) = run_ranks(dtensor_messages, [2], 4)
    assert_all_name_the_version(messages, 24)


def fsdp2_messages() -> dict[str, str]:
    model = fully_shard(nn.Linear(3, 5), mesh=init_device_mesh("cpu", (2,)))
    state = model._get_fsdp_state()
    (group,) = state._fsdp_param_groups
    with changed(state, "_fsdp_param_groups", MISSING), changed(state, "_fsdp_param_group", group):
        locate(model)  # as earlier versions keep it
        unsharded = message_with(group, "is_sharded", False, model)
        assert "must be in its sharded state" in unsharded
    cases = {
        "_get_fsdp_state missing": message_with(model, "_get_fsdp_state", MISSING, model),
        "is_sharded missing": message_with(group, "is_sharded", MISSING, model),
        "is_sharded 1": message_with(group, "is_sharded", "SHARDED", model),
    }
    with changed(state, "_fsdp_param_groups", MISSING):
        cases["_fsdp_param_group missing"] = message_with(state, "_fsdp_param_group", MISSING, model)
    locate(model)  # all is as before
    return cases


def test_error_fsdp2() -> None:
    (messages,) = run_ranks(fsdp2_messages, [1], 2)
    assert_all_name_the_version(messages, 4)


def test_versions() -> None:
    assert package_version("torch") == f"torch {torch.__version__}"
    assert package_version("pytest").startswith("pytest ")
    assert package_version("no_such_package") == "no_such_package (of unknown version)"
    with pytest.raises(
        shardinit.ShardInitError, match=r"a Linear must have the attribute nope, got none: mine \(of unknown"
    ):
        private(nn.Linear(1, 1), "nope", "mine")
