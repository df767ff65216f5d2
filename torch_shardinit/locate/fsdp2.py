"""fully_shard (FSDP2): its parameters are DTensors, which dtensor.py locates; here, whether a module shows them."""

from __future__ import annotations

from typing import Any

import torch.nn as nn

from .names import is_a
from .private import check_private, private


def _param_groups(module: nn.Module) -> list[Any]:
    """What fully_shard shards and gathers together; earlier versions of torch have one group a module at most."""
    state = private(module, "_get_fsdp_state")()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = private(state, "_fsdp_param_group")
    return [] if group is None else [group]


def check_sharded(module: nn.Module, name: str) -> None:
    """Between a forward and its reshard, modules show FSDP2's unsharded copies: a fill of those would be lost."""
    if not is_a(module, "torch", "FSDPModule"):
        return
    for group in _param_groups(module):
        is_sharded = private(group, "is_sharded")
        check_private(isinstance(is_sharded, bool), "is_sharded of fully_shard's group must be a bool", is_sharded)
        if not is_sharded:
            raise ValueError(
                f"{name or 'the root module'}: a module under fully_shard must be in its sharded state, got one that "
                "is unsharded (after a forward?); call module.reshard() first"
            )
