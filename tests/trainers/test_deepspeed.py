"""DeepSpeed: ZeRO-3 partitions that are filled in place, with no broadcast and no whole parameter; ZeRO-1 and 2."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import deepspeed
import deepspeed_world as dw
import pytest
import torch
import torch.nn as nn
from common import assert_equal, assert_shards, local_init, same_on_all_ranks, values_of
from deepspeed_world import TOKENS, Net

import torch_shardinit as shardinit
from torch_shardinit.locate import locate
from torch_shardinit.verify_meter import InitMeter
from torch_shardinit.verify_processes import run_gloo

SEED = 23


def in_one_process(rank: int, world: int, workers: list[Callable[[int, int], None]]) -> None:
    """To start processes that import DeepSpeed takes longer than most of what they are for."""
    dw.start(rank, world)
    for worker in workers:
        try:
            worker(rank, world)
        except Exception as error:
            raise AssertionError(f"in {worker.__name__}") from error


def build() -> Net:
    model = Net()
    model.init_weights()
    return model


def unsharded(seed: int = SEED) -> Net:
    with shardinit.recording():
        model = build()
    return shardinit.init_model_(model, seed, device="cpu")  # type: ignore[return-value]


def as_context(settings: dict[str, Any]) -> Net:
    with shardinit.recording(), deepspeed.zero.Init(config_dict_or_path=settings):
        model = Net()
        model.init_weights()
    return model


def as_module(settings: dict[str, Any]) -> Net:
    with shardinit.recording():
        model = build()
        deepspeed.zero.Init(module=model, config_dict_or_path=settings)
    return model


def one_part(settings: dict[str, Any]) -> Net:
    """zero.Init around a part; deepspeed.initialize would do the rest."""
    with shardinit.recording():
        model = Net()
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model.up, model.norm = nn.Linear(6, 13), nn.LayerNorm(6)
        model.init_weights()
    assert not hasattr(model.down.weight, "ds_id") and hasattr(model.up.weight, "ds_id")
    return model


def as_gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """What DeepSpeed itself puts together."""
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return values_of(model)


def assert_partitioned(model: nn.Module, world: int) -> None:
    for name, one in model.named_parameters():
        assert one.shape == (0,) and one.ds_tensor.numel() == -(-one.ds_numel // world), name
        assert one.device == torch.device("cpu") and not one.ds_tensor.is_meta, name


# --- where the elements are -----------------------------------------------------------------------------------------


def _partitions_worker(rank: int, world: int) -> None:
    whole = unsharded()
    truth = values_of(whole)
    settings = [dw.config(3), dw.config(3, stage3_param_persistence_threshold=0)]
    settings.append(dw.config(3, offload_param={"device": "cpu"}))
    for number, one in enumerate(settings):
        for make in (as_context, as_module):
            what = f"{number}, {make.__name__}"
            holder = nn.Module()
            with local_init(holder):
                model = make(one)
                shardinit.init_model_(model, SEED, device="cpu")
            assert_partitioned(model, world)
            assert model.head.weight is model.embedding.weight
            held = assert_shards(model, truth, what)
            assert held < 0.6 * sum(t.numel() for t in truth.values()) or world == 1
            assert all(not bool(padding.any()) for padding in locate(model).padding)
            assert_equal(as_gathered(model), truth, what)
            assert shardinit.fingerprint(model).digest == shardinit.fingerprint(whole, local_only=True).digest
            shardinit.init_model_(model, SEED + 1)
            with pytest.raises(AssertionError, match="elements differ"):
                assert_shards(model, truth)
            shardinit.init_model_(model, SEED)
            assert_equal(as_gathered(model), truth, f"{what}, again")
    with shardinit.recording():
        whole_turned = dw.Turned()
        with deepspeed.zero.Init(config_dict_or_path=settings[0]):
            turned = dw.Turned()
    for one in (whole_turned, turned):
        shardinit.init_model_(one, SEED, device="cpu")
    assert not whole_turned.turned.is_contiguous()
    assert_equal(as_gathered(turned), values_of(whole_turned), "not contiguous")


def test_partitions_equal_the_unsharded_model() -> None:
    run_gloo(in_one_process, 3, [_partitions_worker], limit=150, threads=1)


def _step_worker(rank: int, world: int) -> None:
    for make in (as_context, as_module, one_part):
        _check_step(make)


def _check_step(make: Callable[[dict[str, Any]], Net]) -> None:
    """A step of an engine is the step of one process; all small parameters are persisted, and gathered after it."""
    whole = unsharded()
    settings = dw.config(3)
    model: Any = make(settings)
    with local_init(model):
        shardinit.init_model_(model, SEED, device="cpu")
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters())
    assert_equal(as_gathered(engine.module), values_of(whole), "after deepspeed.initialize")

    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    expected, loss = whole(TOKENS), engine(TOKENS)
    assert torch.equal(loss, expected)
    expected.backward()
    optimizer.step()
    engine.backward(loss)
    engine.step()
    assert all(one.ds_persist and one.ds_status.name == "AVAILABLE" for one in model.parameters())
    want = values_of(whole)
    for name, tensor in values_of(model).items():
        assert torch.allclose(tensor, want[name], atol=1e-6), name
        assert same_on_all_ranks(tensor), name

    with pytest.raises(ValueError, match=r"must be initialised before deepspeed\.initialize"):
        shardinit.init_model_(model, SEED)
    assert torch.allclose(values_of(model)["up.weight"], want["up.weight"], atol=1e-6), "nothing was written"


def test_an_engine_step_is_that_of_one_process() -> None:
    run_gloo(in_one_process, 2, [_step_worker], limit=150, threads=1)


def _persisted_worker(rank: int, world: int) -> None:
    """DeepSpeed gathers small parameters after a step and leaves them so: without an optimizer nothing else holds
    values, and an init writes the partitions and those copies."""
    settings = dw.config(3, optimizer=False, stage3_param_persistence_threshold=20)
    model: Any = as_context(settings)
    shardinit.init_model_(model, SEED, device="cpu")
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    engine.eval()
    with torch.no_grad():
        assert torch.equal(engine(TOKENS), unsharded()(TOKENS))
        persisted = {name: one for name, one in model.named_parameters() if one.ds_persist}
        assert persisted.keys() == {"up.bias", "down.bias", "norm.weight", "norm.bias", "scale"}
        persisted["scale"].all_gather(list(persisted.values()))
        assert all(one.ds_status.name == "AVAILABLE" for one in persisted.values())

        whole = unsharded(SEED + 1)
        truth = values_of(whole)
        with local_init(model):
            shardinit.init_model_(engine, SEED + 1)
        assert all(torch.equal(one, truth[name]) for name, one in persisted.items())
        assert_shards(engine, truth)
        # A copy does not count twice.
        assert shardinit.fingerprint(engine).digest == shardinit.fingerprint(whole, local_only=True).digest
        assert torch.equal(engine(TOKENS), whole(TOKENS))


def _hpz_worker(rank: int, world: int) -> None:
    model: Any = as_context(dw.config(3, zero_hpz_partition_size=2))
    truth = values_of(unsharded())
    with local_init(model):
        shardinit.init_model_(model, SEED, device="cpu")
    assert all(one.ds_secondary_tensor is not None for one in model.parameters())
    assert_shards(model, truth)
    for name, one in model.named_parameters():
        second, length = one.ds_secondary_tensor, one.ds_secondary_tensor.numel()
        want = torch.zeros(2 * length)
        want[: one.ds_numel] = truth[name].reshape(-1)
        assert torch.equal(second, want[rank % 2 * length :][:length]), name
    assert_equal(as_gathered(model), truth, "hpZ")  # from the secondary partitions


def test_secondary_partitions() -> None:
    run_gloo(in_one_process, 4, [_hpz_worker], limit=150, threads=1)


def _dtype_worker(rank: int, world: int) -> None:
    """zero.Init changes the dtype; a bfloat16 model is the float32 one rounded."""
    truth = values_of(unsharded())
    model = as_context(dw.config(3, bf16=True))
    shardinit.init_model_(model, SEED, device="cpu")
    for name, tensor in as_gathered(model).items():
        assert tensor.dtype == (torch.float32 if name == "table" else torch.bfloat16)
        assert torch.equal(tensor, truth[name].to(tensor.dtype)), name


# --- nothing is sent, nothing held whole ----------------------------------------------------------------------------


def _cost_worker(rank: int, world: int) -> tuple[Any, ...]:
    dw.start(rank, world)
    settings = dw.config(3)
    as_context(settings)  # imports
    ours, stock = InitMeter(), InitMeter()
    with ours.around(nn.Module()):
        with shardinit.recording(), deepspeed.zero.Init(config_dict_or_path=settings):
            model = dw.Wide()
        shardinit.init_model_(model, SEED)
    del model
    gc.collect()  # a ZeRO-3 parameter is part of a cycle
    with stock.around(nn.Module()), deepspeed.zero.Init(config_dict_or_path=settings):
        dw.Wide()
    return ours.collectives.counts, ours.extra_bytes, stock.collectives.counts, stock.extra_bytes


def test_nothing_is_broadcast_and_no_parameter_is_held_whole() -> None:
    partitions, parameter = 4 * 2**23, 2**24  # bytes
    for ours, our_bytes, stock, stock_bytes in run_gloo(_cost_worker, 2, limit=100, threads=1):
        assert ours == (0, 0) and min(stock) >= 4
        if our_bytes is None:
            pytest.skip("the peak of resident memory can't be reset here")
        assert our_bytes < partitions + 2 * 2**20
        assert stock_bytes > partitions + parameter / 2


# --- models that DeepSpeed has partitioned itself -------------------------------------------------------------------


def _stock_worker(rank: int, world: int) -> None:
    with shardinit.recording():
        recorded = build()
    plan = shardinit.record(recorded)
    truth = values_of(unsharded())
    with deepspeed.zero.Init(config_dict_or_path=dw.config(3)):
        model = Net()
    stock = as_gathered(model)
    with local_init(model):
        plan.apply_(model, SEED)
    assert_equal(as_gathered(model), truth, "over DeepSpeed's own init")
    assert not torch.equal(stock["up.weight"], truth["up.weight"])

    # Init code on stand-ins of the whole shapes, where run on the parameters themselves it would write nothing.
    def everything(net: Net) -> None:
        assert net.up.weight.shape == (13, 6) and net.up.weight.device.type == "meta"
        shardinit.reset_parameters(net)
        net.embedding.reset_parameters()  # the head, which is tied to it, came after it
        net.init_weights()
        nn.init.constant_(net.scale, 0.5)
        net.table.copy_(torch.arange(6.0).cos())

    with local_init(model):
        shardinit.init_model_(model, SEED, init_fn=everything)
    assert_equal(as_gathered(model), truth, "by init_fn")


def _huggingface_worker(rank: int, world: int) -> None:
    """With a live HfDeepSpeedConfig, from_config enters zero.Init by itself, and then initialises on rank 0 alone."""
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.integrations import HfDeepSpeedConfig

    llama = LlamaConfig(
        vocab_size=67,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=5,
        tie_word_embeddings=True,
    )

    def initialize(model: Any) -> None:
        model.initialize_weights()

    with shardinit.recording():
        whole = AutoModelForCausalLM.from_config(llama)
    shardinit.init_model_(whole, SEED, device="cpu", init_fn=initialize)
    alive = HfDeepSpeedConfig(dw.config(3))
    with shardinit.recording():
        model = AutoModelForCausalLM.from_config(llama)
    del alive
    if rank > 0:
        with pytest.raises(shardinit.UninitializedError, match=r"no recorded code initialises 15 tensors"):
            shardinit.init_model_(model, SEED, device="cpu")
    with local_init(model):
        shardinit.init_model_(model, SEED, device="cpu", init_fn=initialize)
    assert_partitioned(model, world)
    assert_equal(as_gathered(model), values_of(whole), "from_config under zero.Init")


def test_models_that_are_partitioned_in_other_ways() -> None:
    workers = [_partitions_worker, _persisted_worker, _dtype_worker, _stock_worker, _huggingface_worker]
    run_gloo(in_one_process, 2, workers, limit=200, threads=1)


# --- ZeRO-1 and ZeRO-2 ----------------------------------------------------------------------------------------------


def _replicas_worker(rank: int, world: int) -> None:
    truth = values_of(unsharded())
    for stage in (1, 2):
        with shardinit.recording():
            model: Any = build()
        with local_init(model):
            shardinit.init_model_(model, SEED, device="cpu")
        assert_equal(values_of(model), truth, f"stage {stage}")
        stock = build()
        assert not same_on_all_ranks(stock.up.weight), "ranks are seeded differently"
        # Equal without the broadcast that an engine begins with.
        with mock.patch("deepspeed.runtime.engine.DeepSpeedEngine._broadcast_model"):
            engine, *_ = deepspeed.initialize(model=model, config=dw.config(stage), model_parameters=model.parameters())
        assert all(map(same_on_all_ranks, values_of(engine.module).values()))
        whole = unsharded()
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        whole(TOKENS).backward()
        optimizer.step()
        engine.backward(engine(TOKENS))
        engine.step()
        for name, tensor in values_of(engine.module).items():
            assert same_on_all_ranks(tensor), name
            assert torch.allclose(tensor, values_of(whole)[name], atol=1e-6), name
            assert not torch.equal(tensor, truth[name]) or name == "table", name
        with pytest.raises(ValueError, match=r"up\.weight|must be initialised before deepspeed\.initialize"):
            shardinit.init_model_(engine, SEED)


def test_replicas_of_zero_1_and_2_are_equal() -> None:
    run_gloo(in_one_process, 2, [_replicas_worker], limit=150, threads=1)
