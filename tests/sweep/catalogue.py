"""The packages, and the models of each."""

from __future__ import annotations

import importlib
import re

from . import torchvision_operators  # noqa: F401
from .workers import Item

# The module here that lists the models of a package.
PACKAGES = {
    "transformers": "transformers_models",
    "timm": "timm_models",
    "torchvision": "torchvision_models",
    "diffusers": "diffusers_models",
    "torch_geometric": "graph_models",
    "vit_pytorch": "vit_pytorch_models",
    "x_transformers": "x_transformers_models",
}
# A quick one of each kind, for tests/test_sweep.py.
SAMPLE = {
    "transformers": ["llama", "gpt2", "t5", "mamba2", "qwen3_next"],
    "timm": ["test_vit", "swin_tiny_patch4_window7_224"],
    "torchvision": ["shufflenet_v2_x0_5"],
    "diffusers": ["UNet2DModel"],
    "torch_geometric": ["GATConv"],
    "vit_pytorch": ["vit.ViT"],
    "x_transformers": ["decoder"],
}


def items(packages: list[str], pattern: str = "", sample: bool = False) -> list[Item]:
    """The models of these packages whose name the regular expression `pattern` finds."""
    found: list[Item] = []
    for package in packages:
        models = importlib.import_module(f".{PACKAGES[package]}", __package__).models()
        chosen = [(name, prepare) for name, prepare in models if re.search(pattern, name)]
        if sample:
            known = dict(models)
            chosen = [(name, known[name]) for name in SAMPLE[package]]
        found += [(package, name, prepare) for name, prepare in chosen]
    return found
