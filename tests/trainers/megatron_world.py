"""Megatron-core on gloo: its parallel state, small models, and what its forward asks of CUDA."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn as nn

logging.getLogger("megatron").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="megatron")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

LENGTH = 8


@contextlib.contextmanager
def parallel(tp: int, ep: int = 1) -> Iterator[None]:
    """Experts are not cut by tensor parallelism here."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def config(**options: Any) -> TransformerConfig:
    gated = options.get("gated_linear_unit", False)
    return TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "ffn_hidden_size": 24,
            "use_cpu_initialization": True,
            "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
            "activation_func": nn.functional.silu if gated else nn.functional.gelu,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "bias_activation_fusion": False,
            "masked_softmax_fusion": False,
            "bias_dropout_fusion": False,
            **options,
        }
    )


def gpt(vocabulary: int = 32, tied: bool = True, **options: Any) -> GPTModel:
    experts = options.get("num_moe_experts")
    return GPTModel(
        config=config(**options),
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False),
        vocab_size=vocabulary,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=tied,
    )


def losses(model: nn.Module) -> torch.Tensor:
    """One for each token. Its forward asks for the current CUDA device, and forks CUDA's generator around dropout."""
    tokens = torch.arange(LENGTH)[None]
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    with (
        mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")),
        mock.patch.object(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext()),
    ):
        return model(tokens, tokens, mask, labels=tokens)
