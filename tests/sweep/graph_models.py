"""torch_geometric: its convolutions, models, norms, pools and aggregations, with small arguments by name."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn
import torch_geometric.nn as geometric

from .arguments import by_name, checked, classes_of, required
from .examine import Make, NotBuilt, Prepare

VALUES: dict[str, Any] = {
    **{"in_channels": 7, "out_channels": 12, "hidden_channels": 12, "channels": 12, "num_layers": 2, "num_nodes": 11},
    **{"num_relations": 3, "k": 3, "alpha": 0.5, "edge_dim": 5, "dim": 2, "kernel_size": 3, "num_types": 2, "K": 3},
    **{"embedding_dim": 6, "heads": 2, "num_blocks": 2, "num_spherical": 3, "num_radial": 4, "num_timesteps": 2},
    **{"num_bilinear": 3, "int_emb_size": 6, "basis_emb_size": 5, "out_emb_channels": 6, "hidden_node_channels": 8},
    **{"hidden_edge_channels": 8, "groups": 3, "depth": 2, "space_dimensions": 3, "propagate_dimensions": 4},
    **{"num_node_types": 3, "num_edge_types": 3, "edge_type_emb_dim": 4, "edge_attr_emb_dim": 4, "num_classes": 5},
    **{"max_num_elements": 4, "num_clusters": 3, "filter_size": 3, "patch_size": 4, "input_dim": 8, "hidden_dim": 8},
    **{"output_dim": 6, "num_heads": 2, "num_rels": 3, "seq_len": 3, "processing_steps": 2, "first_aggr": True},
    **{"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.tensor([0, 3, 2, 1]), "mode": "lstm"},
    **{"walk_length": 4, "context_size": 2, "edge_index": torch.tensor([[0, 1, 2], [1, 2, 0]]), "dim_emb": 8},
    **{"dim_pe_in": 4, "dim_pe_out": 4, "metadata": (["a", "b"], [("a", "to", "b"), ("b", "to", "a")])},
}
# Submodules that a class takes ready made, and what the names say too little of.
SPECIAL: dict[str, dict[str, Any]] = {
    "HeteroDictLinear": {"in_channels": {"a": 5, "b": 6}},
    "HANConv": {"in_channels": 8, "heads": 2},
    "HGTConv": {"in_channels": 8, "heads": 2},
    "JumpingKnowledge": {"channels": 8, "num_layers": 2},
    "HeteroJumpingKnowledge": {"types": ["a", "b"], "channels": 8, "num_layers": 2},
    "MLP": {"channel_list": [7, 12, 5]},
    "PNA": {"aggregators": ["mean"], "scalers": ["identity"], "deg": torch.tensor([0, 3, 2, 1])},
    "SetTransformerAggregation": {"channels": 12, "heads": 2, "layer_norm": True},
    "GraphMultisetTransformer": {"channels": 12, "heads": 2, "layer_norm": True},
    "GATConv": {"heads": 3, "edge_dim": 5, "residual": True},
    "GATv2Conv": {"heads": 3, "edge_dim": 5},
    "TransformerConv": {"heads": 2, "edge_dim": 5, "beta": True},
    "RGCNConv": {"num_bases": 2},
    "SchNet": {"hidden_channels": 16, "num_filters": 16, "num_interactions": 2},
    "ViSNet": {"hidden_channels": 16, "num_heads": 2, "num_layers": 2, "num_rbf": 8},
    "GPSE": {"dim_in": 6, "dim_out": 8, "dim_inner": 8, "layers_mp": 2},
    "EGConv": {"num_heads": 2},
    "FusedGATConv": {"in_channels": 7, "out_channels": 12},
    "EquilibriumAggregation": {"num_layers": [8, 8]},
    "MLPAggregation": {"num_layers": 1},
    "InstanceNorm": {"affine": True, "track_running_stats": True},
    "MetaPath2Vec": {
        "edge_index_dict": {
            ("a", "to", "b"): torch.tensor([[0, 1], [1, 0]]),
            ("b", "to", "a"): torch.tensor([[0], [1]]),
        },
        "metapath": [("a", "to", "b"), ("b", "to", "a")],
    },
}
MODULES = ("nn", "gate_nn", "encoder", "conv", "discriminator", "mlp_h", "mlp_f", "mlp_g")


def _build(cls: type[nn.Module], given: dict[str, Any]) -> nn.Module:
    small = {
        name: nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 7)) for name in MODULES if name in required(cls)
    }
    for name in ("encoder", "conv"):
        if name in small:
            small[name] = geometric.GCNConv(12, 12)
    return cls(**{**small, **given})


def _prepare(name: str) -> Make:
    cls = classes_of(geometric)[name]
    special = SPECIAL.get(name, {})
    arguments = {**by_name(cls, {**VALUES, **special, **dict.fromkeys(MODULES)}), **special}
    given = {key: value for key, value in arguments.items() if key not in MODULES}
    if "cugraph" in cls.__module__.lower():
        raise NotBuilt("it needs CUDA")
    return checked(lambda: _build(cls, given))


def models() -> list[tuple[str, Prepare]]:
    return [(name, functools.partial(_prepare, name)) for name in classes_of(geometric)]
