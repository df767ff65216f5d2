"""vit-pytorch: every model of its files that takes a size of images, or a dimension and a depth."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from typing import Any

import torch.nn as nn
import vit_pytorch

from .arguments import by_name, checked, required
from .examine import Make, Prepare

VALUES: dict[str, Any] = {
    **{"dim": 32, "depth": 2, "heads": 2, "mlp_dim": 48, "num_classes": 10, "image_size": 32, "patch_size": 8},
    **{"dim_head": 16, "hidden_dim": 48, "dim_out": 32, "frames": 4, "frame_patch_size": 2, "ndim": 2, "channels": 3},
    **{"image_patch_size": 8, "sm_dim": 32, "lg_dim": 48, "window_size": 4, "seq_len": 64, "num_residual_streams": 2},
    **{"max_tokens_per_depth": (16, 8), "cls_depth": 1, "proj_kernel": 3, "kv_proj_stride": 2, "mlp_mult": 2},
    **{
        "num_hierarchies": 2,
        "use_flash": False,
        "spatial_depth": 2,
        "temporal_depth": 2,
        "num_slots": 2,
        "dropout": 0.0,
    },
    **{"block_repeats": 2, "fmap_size": 8, "num_layers": 2, "input_shape": 32, "dim_inner": 32, "max_frames": 4},
    **{"num_register_tokens": 2, "specialize_qkv_depth": 1, "num_tokens_out": 2, "reduction_factor": 2},
    **{"local_window_size": 4, "global_window_size": 4, "cross_attn_heads": 2, "cross_attn_depth": 1},
}
# Where the names say too little.
SPECIAL: dict[str, dict[str, Any]] = {
    "max_vit.MaxViT": {"depth": (1, 1), "dim": 16, "dim_head": 8, "window_size": 4},
    "max_vit_with_registers.MaxViT": {"depth": (1, 1), "dim": 16, "dim_head": 8, "window_size": 4},
    "mobile_vit.MobileViT": {
        "image_size": (32, 32),
        "dims": [32, 40, 48],
        "channels": [16, 16, 16, 16, 24, 24, 24, 24, 24, 24, 24],
    },
    "pit.PiT": {"depth": (1, 1)},
    "sep_vit.SepViT": {"depth": (1, 1), "dim": 16, "dim_head": 16},
    "scalable_vit.ScalableViT": {
        "depth": (1, 1),
        "dim": 16,
        "heads": (2, 2),
        "reduction_factor": (4, 2),
        "window_size": (4, None),
        "ssa_dim_key": 8,
        "ssa_dim_value": 8,
    },
    "crossformer.CrossFormer": {
        "dim": (16, 32),
        "depth": (1, 1),
        "global_window_size": (4, 2),
        "local_window_size": 4,
        "cross_embed_kernel_sizes": ((4, 8), (2, 4)),
        "cross_embed_strides": (4, 2),
    },
    "regionvit.RegionViT": {"dim": (16, 32), "depth": (1, 1)},
    "levit.LeViT": {"image_size": 64, "dim": (32, 48), "depth": 1, "heads": (2, 3), "stages": 2},
    "nest.NesT": {"num_hierarchies": 2, "block_repeats": (1, 1)},
    "t2t.T2TViT": {"dim": 16, "depth": 1, "heads": 2, "mlp_dim": 32},
    "jet_vit.JetViT": {"dim": 64, "heads": 2, "dim_head": 32},
    "looped_vit.LoopedViT": {"image_size": 32},
    "simple_vit_with_fft.SimpleViT": {"freq_patch_size": 8},
    "twins_svt.TwinsSVT": {f"s{i}_{k}": v for i in (1, 2, 3, 4) for k, v in (("emb_dim", 16), ("depth", 1))},
    "cvt.CvT": {f"s{i}_{k}": v for i in (1, 2, 3) for k, v in (("emb_dim", 16), ("depth", 1))},
    "jumbo_vit.JumboViT": {"num_jumbo_cls": 1, "jumbo_cls_k": 2, "jumbo_ff_mult": 1},
    "cross_vit.CrossViT": {"sm_patch_size": 8, "lg_patch_size": 16},
}


def _classes() -> dict[str, type[nn.Module]]:
    found = {}
    for info in pkgutil.iter_modules(vit_pytorch.__path__):
        try:
            module = importlib.import_module(f"vit_pytorch.{info.name}")
        except ImportError:  # one needs torchaudio
            continue
        for name, cls in vars(module).items():
            if not (inspect.isclass(cls) and issubclass(cls, nn.Module) and cls.__module__ == module.__name__):
                continue
            names = {*required(cls), *SPECIAL.get(f"{info.name}.{name}", ())}
            if names & {"image_size", "num_classes"}:
                found[f"{info.name}.{name}"] = cls
    return found


def _prepare(name: str, cls: type[nn.Module]) -> Make:
    special = SPECIAL.get(name, {})
    arguments = {**by_name(cls, {**VALUES, **special}), **special}
    return checked(lambda: cls(**arguments))


def models() -> list[tuple[str, Prepare]]:
    return [(name, functools.partial(_prepare, name, cls)) for name, cls in _classes().items()]
