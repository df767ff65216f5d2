"""diffusers: its models with the defaults of their constructors made small by name."""

from __future__ import annotations

import functools
import inspect
import os
import re
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported

import diffusers
import torch.nn as nn
from diffusers.models.modeling_utils import ModelMixin

from .arguments import checked
from .examine import Make, NotBuilt, Prepare

diffusers.utils.logging.set_verbosity_error()
# What a default is set to by its name, where it is larger; the first rule that fits.
DEPTH = [
    (r".*(num|n)_(.*_)?(layers|blocks|refiner_layers).*|depth|.*_depth|num_.*layers", 1),
    (r"layers_per_block|.*_layers_per_block|num_res_blocks", 1),
    (r"(.*_)?(vocab_size|num_embeds.*|num_classes|max_.*(len|length|seq_len|tokens))", 64),
]
WIDTH = [
    (r"(.*_)?(num_(kv|key_value).*heads)", 2),
    (r"(.*_)?(num_.*heads?|n_heads?|heads)", 2),
    (r"(.*_)?(attention_head_dim|head_dim|dim_head)", 16),
    (
        r"(.*_)?(hidden_size|inner_dim|embed_dim|model_channels|text_dim|cross_attention_dim|joint_attention_dim|"
        r"caption_channels|caption_projection_dim|cap_feat_dim|encoder_hid_dim|pooled_projection_dim|hidden_dim|dim|"
        r"caption_dim|text_embed_dim|time_embed_dim|embedding_dim|conditioning_dim|ffn_dim|intermediate_size|base_dim)",
        32,
    ),
]


def shrunk(name: str, value: Any, rules: list[tuple[str, int]], widths: bool) -> Any:
    if isinstance(value, (tuple, list)) and value and all(type(item) is int for item in value):
        if re.fullmatch(r".*(layers|depths?|num_blocks|layers_per_block).*", name):
            return type(value)(min(item, 1) for item in value)
        if widths and re.fullmatch(r".*block_out_channels|channels|.*_channels|dims", name):
            return type(value)(32 for _ in value)
        return value
    if type(value) is not int:
        return value
    for pattern, number in rules:
        if re.fullmatch(pattern, name):
            return min(value, number)
    return value


def _prepare(name: str) -> Make:
    cls = getattr(diffusers, name)
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    why = ""
    for rules, widths in ((DEPTH + WIDTH, True), (DEPTH, True), (DEPTH + WIDTH, False), (DEPTH, False)):
        given = {
            one.name: shrunk(one.name, one.default, rules, widths)
            for one in parameters
            if one.default is not one.empty and one.default is not None
        }
        try:
            return checked(functools.partial(cls, **given))
        except NotBuilt as error:
            why = why or str(error)
    raise NotBuilt(why)


def models() -> list[tuple[str, Prepare]]:
    names = []
    for name in sorted(dir(diffusers)):
        cls = getattr(diffusers, name, None)
        if inspect.isclass(cls) and issubclass(cls, ModelMixin) and issubclass(cls, nn.Module):
            names.append(name)
    return [(name, functools.partial(_prepare, name)) for name in names]
