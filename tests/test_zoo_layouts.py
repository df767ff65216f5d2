"""Every model of the zoo under every layout: what its own init code gives there is what it gives on one process, bit
for bit. The unsharded models are filled by two threads, each rank's shards by one."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from fake_world import run_world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor
from zoo import MODELS
from zoo_layouts import (
    SEED,
    check_all,
    compare,
    plan_of,
    recorded,
    shard_fsdp1,
    shard_fsdp2,
    shard_tp,
    tensors_of,
    unsharded,
    words,
)

import torch_shardinit as shardinit
from torch_shardinit.verify_processes import run_gloo

# Layouts in a world of this size: FSDP2; HSDP and tensor parallelism at 8; FSDP1's strategies at 2 and 3, with and
# without use_orig_params but for models that freeze a part of a unit; the model's own init code after wrapping at 3.
NUM_LAYOUTS = {2: 1 + 6, 3: 1 + 1 + 2, 5: 1, 8: 3}
ONE_MODE = {"LoRA", "Siren", "DiT", "Teacher"}


@functools.cache
def held_by_ranks(world: int) -> list[dict[str, dict[str, int]]]:
    for name in MODELS:  # by this process, before ranks are forked
        assert unsharded(name) and plan_of(name)
    return run_world(check_all, world, world, timeout=250)


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_every_layout_holds_the_unsharded_bits(world: int) -> None:
    ranks = held_by_ranks(world)
    for name in MODELS:
        layouts = ranks[0][name].keys()
        fewer = {2: 3, 3: 1}.get(world, 0) if name in ONE_MODE else 0
        assert len(layouts) == NUM_LAYOUTS[world] - fewer, (name, layouts)
        for layout in layouts:
            held = [rank[name][layout] for rank in ranks]
            assert all(rank[name].keys() == layouts for rank in ranks)
            total = sum(math.prod(entry.shape) for entry in plan_of(name).entries.values())
            assert max(held) > 0 and (layout == "init_fn" or sum(held) >= total), (name, layout, held)


def halves(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Where a model is split for a pipeline: the first module that has two children with tensors, and their names."""
    module = model
    while True:
        children = [name for name, child in module.named_children() if tensors_of(child)]
        if len(children) != 1:
            return module, children
        module = module.get_submodule(children[0])


@pytest.mark.parametrize("name", MODELS)
def test_two_pipeline_halves_have_the_bits_of_the_whole(name: str) -> None:
    """The Plan of the whole on models that stock torch built, less what the other half holds."""
    seen: set[str] = set()
    for part in (0, 1):
        half = MODELS[name]()
        module, children = halves(half)
        middle = (len(children) + 1) // 2
        for child in children[middle:] if part == 0 else children[:middle]:
            del module._modules[child]
        if part:  # what no child holds goes with the first half
            for registry in (module._parameters, module._buffers):
                registry.clear()
        plan_of(name).apply_(half, SEED)
        found = dict(tensors_of(half))
        assert found or len(children) < 2
        for key, tensor in found.items():
            assert_bitwise_equal(patterns(words(tensor)), patterns(words(unsharded(name)[key])), key)
        seen |= found.keys()
    assert seen == unsharded(name).keys()


def test_tensor_parallelism_cuts_what_it_says() -> None:
    """A plan that cut nothing would prove nothing."""
    (kinds,) = run_world(_tp_placements, 1)
    assert {name for name, count in kinds.items() if not count} == NO_LINEAR


# Nothing for a style of torch's to cut.
NO_LINEAR = {"Swin", "Codec", "OrthogonalLSTM"}


def _tp_placements() -> dict[str, int]:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    models = {name: shard_tp(recorded(name), mesh) for name in MODELS}
    return {
        name: sum(p.device_mesh.ndim == 2 for p in model.parameters() if isinstance(p, DTensor))
        for name, model in models.items()
    }


GLOO_MODELS = ("GPT2", "OrthogonalLSTM")


def _on_gloo(rank: int, world: int, want: dict[str, dict[str, torch.Tensor]]) -> int:
    torch.manual_seed(rank)
    count = 0
    for name, values in want.items():
        truth = MODELS[name]()
        with torch.no_grad():
            for key, tensor in tensors_of(truth):
                tensor.copy_(values[key])
        flat = init_device_mesh("cpu", (world,))
        ours = shard_fsdp2(recorded(name), flat)
        shardinit.init_model_(ours, SEED, device="cpu")
        count += compare(ours, shard_fsdp2(truth, flat), f"{name}, fsdp2")
        gathered = {key: tensor.full_tensor() for key, tensor in tensors_of(ours) if isinstance(tensor, DTensor)}
        assert gathered
        for key, tensor in gathered.items():
            assert_bitwise_equal(patterns(tensor), patterns(values[key]), f"{name}, gathered {key}")
        for use_orig_params in (False, True):
            model = recorded(name)
            allocate = shardinit.param_init_fn(model, fill=False, device="cpu")
            fsdp1 = shard_fsdp1(model, use_orig_params, ShardingStrategy.FULL_SHARD, allocate)
            shardinit.init_model_(fsdp1, SEED)
            with torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params(fsdp1):
                full = [(key, tensor.clone()) for key, tensor in tensors_of(fsdp1)]
            for key, tensor in full:
                key = key.replace("_fsdp_wrapped_module.", "")
                assert_bitwise_equal(patterns(tensor), patterns(values[key]), f"{name}, summoned {key}")
                count += tensor.numel()
        dist.barrier()
    return count


def test_on_real_processes() -> None:
    want = {name: unsharded(name) for name in GLOO_MODELS}
    assert min(run_gloo(_on_gloo, 3, want, limit=120)) > 1000
