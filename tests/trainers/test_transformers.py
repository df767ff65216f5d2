"""transformers: random-weight configurations, built in every usual way, sharded by FSDP2, equal to one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from common import assert_equal, differing, gathered, local_init, same_on_all_ranks, values_of
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import torch_shardinit as shardinit
from torch_shardinit.verify_processes import run_gloo

SEED = 31
_COMMON: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
CONFIGS = {
    "llama": LlamaConfig(**_COMMON, pad_token_id=5, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": GPT2Config(vocab_size=67, n_embd=16, n_layer=2, n_head=4, n_positions=32),
}
BLOCKS = ("LlamaDecoderLayer", "MixtralDecoderLayer", "GPT2Block", "T5Block")
TOKENS = torch.arange(8)[None]


def initialize(model: Any) -> None:
    model.initialize_weights()


def in_recording(config: Any) -> nn.Module:
    """from_config runs the model's own init code at its end."""
    with shardinit.recording():
        return AutoModelForCausalLM.from_config(config)


def on_meta(config: Any) -> nn.Module:
    """Here it does not: transformers skips it under torch.device("meta")."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def with_memory(config: Any) -> nn.Module:
    """Initialised by transformers, from this rank's generator, and flagged as initialised."""
    return AutoModelForCausalLM.from_config(config)


def both(config: Any) -> nn.Module:
    with shardinit.recording(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        model.initialize_weights()
    return model


WAYS: list[tuple[Callable[[Any], nn.Module], dict[str, Any]]] = [
    (in_recording, {}),
    (in_recording, {"init_fn": initialize}),
    (on_meta, {"init_fn": initialize}),
    (with_memory, {"init_fn": initialize}),
    (both, {}),
]


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    for module in list(model.modules()):
        if type(module).__name__ in BLOCKS:
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def unsharded(config: Any, build: Callable[[Any], nn.Module], options: dict[str, Any]) -> nn.Module:
    return shardinit.init_model_(build(config), SEED, device="cpu", **options)


def padding_row_lost(model: Any, build: Callable[[Any], nn.Module], options: dict[str, Any]) -> set[str]:
    """transformers initialises the head after the embedding. Where they are tied by then, which they are not yet when
    from_config does it, that writes over the embedding's row of zeros: in one process too."""
    embedding = model.get_input_embeddings()
    if embedding.padding_idx is None or (build is in_recording and not options):
        return set()
    return {name for name, one in model.named_parameters(remove_duplicate=False) if one is embedding.weight}


def _models_worker(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (world,))
    for name, config in CONFIGS.items():
        truth: dict[str, torch.Tensor] = {}
        for build, options in WAYS:
            what = f"{name}, {build.__name__}, {list(options)}"
            whole = unsharded(config, build, options)
            truth = truth or values_of(whole)
            model: Any = shard(build(config), mesh)
            with local_init(model):
                shardinit.init_model_(model, SEED, device="cpu", **options)
            assert_equal(gathered(model), values_of(whole), what)
            assert set(differing(gathered(model), truth)) <= padding_row_lost(model, build, options), what
            tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
            assert tied == config.tie_word_embeddings, what
            expected, got = (one.eval()(input_ids=TOKENS, labels=TOKENS).loss for one in (whole, model))
            assert torch.allclose(got, expected, rtol=1e-5), what
            got.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            assert differing(gathered(model), truth)
            shardinit.init_model_(model, SEED, **options)  # again, over trained values
            assert_equal(gathered(model), values_of(whole), f"{what}, again")
        assert differing(values_of(shardinit.init_model_(in_recording(config), SEED + 1, device="cpu")), truth)


@pytest.mark.parametrize("world", [2, 3])
def test_sharded_models_equal_one_process(world: int) -> None:
    run_gloo(_models_worker, world, limit=200, threads=1)


def test_plans_say_what_transformers_documents() -> None:
    plan = shardinit.record(in_recording(CONFIGS["llama"]))
    assert "normal(std=0.02, mean=0); [5, 0:16] fill(0)" in str(plan), "the padding row is zero"
    plan = shardinit.record(in_recording(CONFIGS["gpt2"]))
    row = next(line for line in str(plan).splitlines() if line.startswith("transformer.h.1.mlp.c_proj.weight"))
    assert f"std={0.02 / math.sqrt(2 * 2):g}" in row
    plan = shardinit.record(in_recording(CONFIGS["mixtral"]))
    row = next(line for line in str(plan).splitlines() if "layers.1.mlp.experts.gate_up_proj" in line)
    assert "4x48x16" in row and "normal(std=0.02" in row


def _dtype_worker(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for name, config in CONFIGS.items():
        truth = values_of(unsharded(config, in_recording, {}))
        with shardinit.recording():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        shard(model, mesh)
        shardinit.init_model_(model, SEED, device="cpu")
        for key, tensor in gathered(model).items():
            want = truth[key].to(tensor.dtype)
            assert tensor.dtype == torch.bfloat16 or "inv_freq" in key
            assert torch.equal(tensor, want), (name, key)


def test_a_bfloat16_model_is_the_float32_one_rounded() -> None:
    run_gloo(_dtype_worker, 2, limit=100, threads=1)


def _classes_worker(rank: int, world: int) -> None:
    """Paths beside AutoModelForCausalLM: a class of its own, a bare trunk, an encoder with a decoder."""
    mesh = init_device_mesh("cpu", (world,))
    t5 = T5Config(vocab_size=67, d_model=16, d_ff=24, d_kv=4, num_layers=2, num_heads=4, decoder_start_token_id=0)
    for build in (
        lambda: LlamaForCausalLM(CONFIGS["llama"]),
        lambda: LlamaForCausalLM._from_config(CONFIGS["llama"]),
        lambda: AutoModel.from_config(CONFIGS["mixtral"]),
        lambda: T5ForConditionalGeneration(t5),
    ):
        with shardinit.recording():
            whole, model = build(), build()
        shardinit.init_model_(whole, SEED, device="cpu")
        shard(model, mesh)
        with local_init(model):
            shardinit.init_model_(model, SEED, device="cpu")
        assert_equal(gathered(model), values_of(whole), type(whole).__name__)


def test_other_classes() -> None:
    run_gloo(_classes_worker, 2, limit=100, threads=1)


def _wrapped_gpt2_worker(rank: int, world: int) -> None:
    """transformers takes a model whose class fully_shard has replaced for custom code, and then skips every module
    without parameters of its own: GPT-2's scaled projections. An init_fn sees the class that was written."""
    mesh = init_device_mesh("cpu", (world,))
    plan = shardinit.record(on_meta(CONFIGS["gpt2"]), initialize)
    wrapped = shard(on_meta(CONFIGS["gpt2"]), mesh)
    cls = type(wrapped)
    assert cls.__name__ == "FSDPGPT2LMHeadModel" and cls.is_custom_code()
    assert plan.diff(shardinit.record(wrapped, initialize)) == []
    assert type(wrapped) is cls

    def fails(model: nn.Module) -> None:
        assert type(model).__name__ == "GPT2LMHeadModel"
        raise KeyError("init code")

    with pytest.raises(KeyError, match="init code"):
        shardinit.record(wrapped, fails)
    assert type(wrapped) is cls

    wrapped.to_empty(device="cpu")
    wrapped.initialize_weights()  # stock, on the shards
    std = gathered(wrapped)["transformer.h.0.mlp.c_proj.weight"].std()
    assert std > 0.015, "stock transformers must miss the scale here, or this test shows nothing"


def test_init_code_of_a_wrapped_gpt2_sees_its_own_class() -> None:
    run_gloo(_wrapped_gpt2_worker, 2, limit=100, threads=1)


def test_init_weights_on_a_meta_default_device_is_no_silent_no_op() -> None:
    """Stock transformers probes the default device, and returns at once where it is meta."""

    def on_default_meta(model: Any) -> None:
        with torch.device("meta"):
            model.init_weights()

    config = CONFIGS["llama"]
    plan = shardinit.record(on_meta(config), initialize)
    assert plan.diff(shardinit.record(on_meta(config), on_default_meta)) == []
    with pytest.raises(shardinit.RecordError, match=r"not built inside recording\(\)"):
        shardinit.init_model_(on_meta(config), SEED, device="cpu")

    def on_a_flagged_model(model: Any) -> None:
        for one in (*model.modules(), *model.parameters()):
            one._is_hf_initialized = True
        model.initialize_weights()

    with pytest.raises(shardinit.RecordError, match=r"wrote no parameter or buffer.*_is_hf_initialized"):
        shardinit.init_model_(on_meta(config), SEED, init_fn=on_a_flagged_model, device="cpu")


# --- adapters ------------------------------------------------------------------------------------------------------

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def adapters_of(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: tensor for name, tensor in values.items() if "lora_" in name}
    assert len(found) == 2 * 2 * 2
    return found


def all_but_adapters(model: nn.Module) -> list[str]:
    return [name for name in values_of(model) if "lora_" not in name]


def base_of(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names that the base had before the adapters came."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): tensor
        for name, tensor in values.items()
        if "lora_" not in name
    }


def _lora_worker(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (world,))
    config = CONFIGS["llama"]

    with shardinit.recording():
        whole = get_peft_model(AutoModelForCausalLM.from_config(config), LORA)
    truth = adapters_of(values_of(shardinit.init_model_(whole, SEED, device="cpu")))
    assert all(bool(tensor.any()) == ("lora_A" in name) for name, tensor in truth.items())

    # Adapters first, then sharding: they are sharded too.
    with shardinit.recording():
        model = get_peft_model(AutoModelForCausalLM.from_config(config), LORA)
    shard(model, mesh)
    with local_init(model):
        shardinit.init_model_(model, SEED, device="cpu")
    assert_equal(gathered(model), values_of(whole), "adapters, then sharding")

    # A base that is sharded and has values; adapters added afterwards; the base stays as it is.
    base = shard(in_recording(config), mesh)
    shardinit.init_model_(base, 7, device="cpu")
    before = gathered(base)
    with shardinit.recording():
        model = get_peft_model(base, LORA)
    with local_init(model):
        shardinit.init_model_(model, SEED, device="cpu", keep=all_but_adapters(model))
    assert_equal(adapters_of(gathered(model)), truth, "adapters on a sharded base")
    assert_equal(base_of(gathered(model)), before, "the base")
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert all(one.grad is not None for name, one in model.named_parameters() if "lora_" in name)

    # Stock: each rank draws its own, and they are replicas.
    base = shard(in_recording(config), mesh)
    shardinit.init_model_(base, 7, device="cpu")
    stock = adapters_of(gathered(get_peft_model(base, LORA)))
    assert not any(same_on_all_ranks(tensor) for name, tensor in stock.items() if "lora_A" in name)


def test_adapters_on_a_sharded_model() -> None:
    run_gloo(_lora_worker, 2, limit=100, threads=1)
