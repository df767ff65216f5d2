"""x-transformers: decoders and encoders with one of its options each."""

from __future__ import annotations

import functools
from typing import Any

import torch.nn as nn
import x_transformers as xt

from .arguments import checked
from .examine import Make, Prepare

DECODERS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "glu": {"ff_glu": True, "ff_swish": True, "ff_no_bias": True},
    "rmsnorm": {"use_rmsnorm": True},
    "simple_rmsnorm": {"use_simple_rmsnorm": True},
    "scalenorm": {"use_scalenorm": True},
    "adaptive_layernorm": {"use_adaptive_layernorm": True, "dim_condition": 16},
    "rotary": {"rotary_pos_emb": True},
    "rotary_xpos": {"rotary_xpos": True},
    "alibi": {"alibi_pos_bias": True},
    "relative_t5": {"rel_pos_bias": True},
    "dynamic_position_bias": {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": False},
    "memory_key_values": {"attn_num_mem_kv": 4},
    "talking_heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "one_kv_head": {"attn_one_kv_head": True},
    "grouped_heads": {"attn_kv_heads": 2},
    "qk_norm": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "gated_values": {"attn_gate_values": True, "attn_on_attn": True},
    "sandwich": {"sandwich_coef": 1},
    "macaron": {"macaron": True},
    "residual_attention": {"residual_attn": True},
    "gated_residual": {"gate_residual": True},
    "scaled_residual": {"scale_residual": True},
    "shift_tokens": {"shift_tokens": 1},
    "deepnorm": {"pre_norm": False, "scale_residual": True, "scale_residual_constant": 2},
    "zero_init": {"zero_init_branch_output": True},
    "hyper_connections": {"num_residual_streams": 2},
    "layerscale": {"use_layerscale": True},
    "dynamic_tanh": {"use_dynamic_tanh": True},
    "cross_attention": {"cross_attend": True},
    "relu_squared": {"ff_relu_squared": True, "ff_post_act_ln": True},
    "softclamp": {"attn_softclamp_logits": True},
    "hybrid_gru": {"attn_hybrid_module": nn.GRU},
}
WRAPPERS: dict[str, Any] = {
    "memory_tokens": lambda: xt.TransformerWrapper(
        num_tokens=50, max_seq_len=16, num_memory_tokens=3, attn_layers=decoder()
    ),
    "tied_embedding": lambda: xt.TransformerWrapper(
        num_tokens=50, max_seq_len=16, tie_embedding=True, attn_layers=decoder()
    ),
    "factored_embedding": lambda: xt.TransformerWrapper(
        num_tokens=50, max_seq_len=16, emb_dim=12, attn_layers=decoder()
    ),
    "post_emb_norm": lambda: xt.TransformerWrapper(
        num_tokens=50, max_seq_len=16, post_emb_norm=True, attn_layers=decoder()
    ),
    "mixture_of_softmax": lambda: xt.TransformerWrapper(
        num_tokens=50, max_seq_len=16, mixture_of_softmax=True, attn_layers=decoder()
    ),
    "scaled_sinusoidal": lambda: xt.TransformerWrapper(
        num_tokens=50, max_seq_len=16, scaled_sinu_pos_emb=True, attn_layers=decoder()
    ),
    "l2norm_embedding": lambda: xt.TransformerWrapper(
        num_tokens=50, max_seq_len=16, l2norm_embed=True, attn_layers=decoder()
    ),
    "vit": lambda: xt.ViTransformerWrapper(
        image_size=32, patch_size=8, num_classes=10, attn_layers=xt.Encoder(dim=32, depth=2, heads=4)
    ),
    "vit_registers": lambda: xt.ViTransformerWrapper(
        image_size=32, patch_size=8, num_register_tokens=2, attn_layers=xt.Encoder(dim=32, depth=2, heads=4)
    ),
    "continuous": lambda: xt.ContinuousTransformerWrapper(dim_in=6, dim_out=5, max_seq_len=16, attn_layers=decoder()),
    "encoder_decoder": lambda: xt.XTransformer(
        dim=32,
        enc_num_tokens=50,
        enc_depth=1,
        enc_heads=4,
        enc_max_seq_len=16,
        dec_num_tokens=40,
        dec_depth=1,
        dec_heads=4,
        dec_max_seq_len=16,
        tie_token_emb=False,
    ),
    "autoregressive": lambda: xt.AutoregressiveWrapper(
        xt.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=decoder())
    ),
    "cross_attender": lambda: xt.CrossAttender(dim=32, depth=2, heads=4),
    "prefix_decoder": lambda: xt.TransformerWrapper(
        num_tokens=50, max_seq_len=16, attn_layers=xt.PrefixDecoder(dim=32, depth=2, heads=4)
    ),
}


def decoder(**options: Any) -> nn.Module:
    return xt.Decoder(**{"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8, **options})


def _prepare(name: str) -> Make:
    if name in WRAPPERS:
        return checked(WRAPPERS[name])
    options = DECODERS[name]
    return checked(lambda: xt.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=decoder(**options)))


def models() -> list[tuple[str, Prepare]]:
    return [(name, functools.partial(_prepare, name)) for name in [*DECODERS, *WRAPPERS]]
