"""transformers: a model of each type from its default configuration, made small by rule; nothing is downloaded."""

from __future__ import annotations

import copy
import functools
import os
import re
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported

import torch
import torch.nn as nn
from transformers import CONFIG_MAPPING, AutoModel, PretrainedConfig, logging
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from .examine import MAX_ELEMENTS, Make, NotBuilt, Prepare

logging.set_verbosity_error()

# What a number is set to by its name, where it is larger; the first rule that fits.
DEPTH = [
    (r"num_feat_extract_layers|num_conv_pos.*", 1 << 30),
    (r"num_experts_per_tok|experts_per_token|top_k|moe_topk|num_experts_per_token", 2),
    (r".*(experts|expert_num)", 4),
    (r"(.*_)?(n|num)_?(.*_)?(layers?|blocks?)|.*_layers|n_layer|depth", 2),
    (r"(.*_)?vocab_size(_.*)?|vocabulary_size|n_vocab", 300),
    (r"(.*_)?(max_.*position.*|n_positions|max_.*length|n_ctx|max_seq_len)", 128),
]
WIDTH = [
    (r"(.*_)?(num_(key_value|kv|k_v).*heads|n_kv_heads|num_kv|n_head_kv)", 2),
    (r"(.*_)?((num|n)_.*heads?|.*attention_heads|n_head)", 4),
    (r"(.*_)?(head_dim|d_kv|d_head|head_size|attention_head_size)", 16),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|inner_dim|n_inner|ffn_hidden_size|feedforward_size|mlp_dim)", 96),
    (r"(.*_)?(hidden_size|d_model|n_embd|hidden_dim|embed_dim|embedding_size|dim|width|projection_dim)", 64),
]
TOKEN = re.compile(r".*token(_id|_index|_idx)s?|.*_token_id_.*|.*_id")
DERIVED = frozenset({"transformers_version", "out_features", "out_indices", "stage_names", "per_layer_config"})
PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types")
# Where no rule can know what goes together.
_MAMBA2 = {"hidden_size": 64, "expand": 2, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16}
_MIXED = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_expand": 2}
GIVEN: dict[str, dict[str, Any]] = {
    "mamba2": _MAMBA2,
    "bamba": _MIXED,
    "falcon_h1": {**_MIXED, "mamba_d_ssm": 128},
    "granitemoehybrid": _MIXED,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "autoformer": {"prediction_length": 8},
    "informer": {"prediction_length": 8},
    "time_series_transformer": {"prediction_length": 8},
    "timm_wrapper": {"architecture": "resnet10t"},
}


def shrunk(value: Any, rules: list[tuple[str, int]], name: str = "") -> Any:
    if isinstance(value, dict):
        made = {key: shrunk(item, rules, key) for key, item in value.items() if key not in DERIVED}
        layers = next((made[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in made), 2)
        for key in PER_LAYER:
            if isinstance(made.get(key), list):
                made[key] = made[key][-layers:]  # the last: hybrids end with a layer of full attention
        return made
    if isinstance(value, list) and name in ("depths", "layers", "num_blocks", "depth", "encoder_depths"):
        return [min(item, 1) if isinstance(item, int) else item for item in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if TOKEN.fullmatch(name):
        return min(value, 299)
    for pattern, number in rules:
        if re.fullmatch(pattern, name):
            return min(value, number)
    return value


def build(config: PretrainedConfig) -> nn.Module:
    return AutoModel.from_config(copy.deepcopy(config))


def small_config(model_type: str) -> PretrainedConfig:
    """Small in all, else only in depth and vocabulary where the widths do not fit together."""
    why = "no configuration"
    for rules in (DEPTH + WIDTH, DEPTH):
        try:
            cls = CONFIG_MAPPING[model_type]
            given = GIVEN.get(model_type, {})
            config = cls.from_dict({**shrunk(cls(**given).to_dict(), rules), **given})
            with torch.device("meta"):
                model = build(config)
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            continue
        count = sum(parameter.numel() for parameter in model.parameters())
        if count <= MAX_ELEMENTS:
            return config
        why = f"{count:,} parameters by rule, more than {MAX_ELEMENTS:,}"
    raise NotBuilt(why)


def prepare(model_type: str) -> Make:
    config = small_config(model_type)
    return lambda: build(config)


def models() -> list[tuple[str, Prepare]]:
    return [(name, functools.partial(prepare, name)) for name in sorted(MODEL_MAPPING_NAMES)]
