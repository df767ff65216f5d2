"""Recording and materialising what is sharded already: classes as init code sees them, adapters, attributes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from fake_world import run_world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_shardinit as shardinit
from torch_shardinit.locate import locate
from torch_shardinit.locate.fsdp2 import written_class
from torch_shardinit.locate.names import walk_modules
from torch_shardinit.model import materialise_

SEED = 5


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 5)


class Adapter(nn.Module):
    """As peft puts it around a layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.down = nn.Parameter(torch.empty(2, layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, 2))
        nn.init.kaiming_uniform_(self.down)


def recorded() -> Base:
    with shardinit.recording():
        return Base()


def shard(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)


# --- classes ---------------------------------------------------------------------------------------------------------


def _classes_of_rank() -> bool:
    model = recorded()
    shard(model)
    sharded = type(model), type(model.first)
    assert [cls.__name__ for cls in sharded] == ["FSDPBase", "FSDPLinear"]
    assert written_class(model) is Base and written_class(model.second) is nn.Linear

    def by_class(net: nn.Module) -> None:
        assert type(net) is Base
        for module in net.modules():
            if type(module) is nn.Linear:
                nn.init.constant_(module.weight, 2.0)
                nn.init.zeros_(module.bias)

    shardinit.init_model_(model, SEED, init_fn=by_class, device="cpu")
    assert all(bool((piece.local == 2).all()) for piece in locate(model).pieces if piece.name.endswith("weight"))
    assert (type(model), type(model.first)) == sharded

    def fails(net: nn.Module) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        shardinit.record(model, fails)
    assert (type(model), type(model.first)) == sharded
    return True


def test_init_code_sees_the_class_that_was_written() -> None:
    assert run_world(_classes_of_rank, 2) == [True, True]


# --- adapters on a sharded model -------------------------------------------------------------------------------------


def _adapters_of_rank(with_values: bool) -> dict[str, Any]:
    with shardinit.recording():
        whole = Base()
        whole.first, whole.second = Adapter(whole.first), Adapter(whole.second)
    shardinit.init_model_(whole, SEED, device="cpu")

    model = recorded()
    shard(model)
    if with_values:
        shardinit.init_model_(model, 3, device="cpu")
    before = {piece.name: piece.local.clone() for piece in locate(model).pieces}
    with shardinit.recording():
        model.first, model.second = Adapter(model.first), Adapter(model.second)
    base = [name for name, _ in model.named_parameters() if "base_layer" in name]
    shardinit.init_model_(model, SEED, device="cpu", keep=base if with_values else ())
    truth = dict(whole.named_parameters())
    for piece in locate(model).pieces:
        if "base_layer" not in piece.name:
            assert_bitwise_equal(patterns(piece.local), patterns(truth[piece.name]), piece.name)
        elif with_values:
            assert torch.equal(piece.local, before[piece.name.replace(".base_layer", "")]), piece.name
        else:  # the earlier record holds, under the new name
            rows = truth[piece.name][piece.offset[0] :][: piece.local.shape[0]]
            assert_bitwise_equal(patterns(piece.local), patterns(rows), piece.name)
    return {}


@pytest.mark.parametrize("with_values", [True, False])
def test_adapters_on_a_sharded_model(with_values: bool) -> None:
    run_world(_adapters_of_rank, 3, with_values)


def _sharded_inside_of_rank() -> bool:
    with pytest.raises(shardinit.RecordError, match=r"on a DTensor at .*: only plain tensors can be recorded"):
        with shardinit.recording():
            model = Base()
            shard(model)
    return True


def test_error_a_model_that_is_sharded_inside_a_recording() -> None:
    assert run_world(_sharded_inside_of_rank, 2) == [True, True]


# --- parameters ------------------------------------------------------------------------------------------------------


def test_materialised_parameters_keep_their_attributes() -> None:
    model = recorded()
    model.first.weight.partition_dim = 1
    model.second.weight = model.first.weight
    model.first.bias.requires_grad_(False)
    materialise_(model, "cpu")
    assert model.second.weight is model.first.weight and model.first.weight.partition_dim == 1
    assert not model.first.weight.is_meta and not model.first.bias.requires_grad


def test_experts_of_megatron_are_named_by_their_numbers_in_the_whole() -> None:
    class Group:
        def rank(self) -> int:
            return 2

    cls = type("SequentialMLP", (nn.Module,), {"__module__": "megatron.core.transformer.moe.experts"})
    experts: Any = cls()
    experts.ep_group, experts.num_local_experts = Group(), 3
    experts.local_experts = nn.ModuleList(nn.ModuleList([nn.Linear(1, 1)]) for _ in range(3))
    names = [name for name, _ in walk_modules(nn.ModuleDict({"mlp": experts}))]
    assert [name for name in names if name.endswith(".0")] == [f"mlp.local_experts.{number}.0" for number in (6, 7, 8)]
    assert "mlp.local_experts.8" in names and "mlp.local_experts.0" not in names
    del experts.num_local_experts
    with pytest.raises(shardinit.ShardInitError, match="SequentialMLP must have the attribute num_local_experts"):
        list(walk_modules(experts))
