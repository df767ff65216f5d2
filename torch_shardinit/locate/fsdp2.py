"""fully_shard (FSDP2): its parameters are DTensors, which dtensor.py locates; here, whether a module shows them, and
what class it had."""

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


def written_class(module: nn.Module) -> type:
    """The class of a module as its author knows it. fully_shard and replicate give a module a class of their own, made
    of theirs and of the one it had: init code that asks for `type(module)` or its `__module__` is misled by it."""
    cls = type(module)
    base = cls.__mro__[1].__name__ if len(cls.__mro__) > 2 else ""
    if base in ("FSDPModule", "ReplicateModule", "DDP") and cls.__mro__[1].__module__.startswith("torch.distributed."):
        return cls.__mro__[getattr(cls, "_orig_cls_mro_index", 2)]
    return cls


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
