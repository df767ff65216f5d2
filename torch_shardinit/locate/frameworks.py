"""The adapters of frameworks outside torch, together. None imports its framework: what no code has imported, no module
comes from."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch.nn as nn

from . import deepspeed, fairscale, megatron, torchrec
from .held import HeldParameters


def held_by_frameworks(modules: Iterable[nn.Module]) -> HeldParameters:
    """What they hold of the parameters of a model, given all its modules."""
    found = HeldParameters()
    imported = [adapter for adapter in (torchrec, fairscale, deepspeed, megatron) if adapter.PACKAGE in sys.modules]
    if imported:
        distinct = list({id(module): module for module in modules}.values())
        for adapter in imported:
            adapter.collect(distinct, found)
    return found
