"""What an adapter of a framework outside torch tells: parameters that the framework holds in a form of its own.

Each such framework has one file here that reads its attributes, all through `read`, and checks that what it finds fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from .private import package_version

Parts = list[tuple[torch.Tensor, int | tuple[int, ...]]]


@dataclass(frozen=True, eq=False)
class Held:
    """One parameter of the unsharded model.

    owner: the registered tensor whose memory holds this rank's part of it.
    holders: (module, attribute) of each place where the unsharded model has it.
    shape, dtype: of the whole. requires_grad: as the framework keeps it.
    parts: (local view, offset) as in Piece, at least one; of no elements where this rank holds none.
    copies: further memory that must hold the same values and does not count: what a framework keeps gathered.
    """

    owner: torch.Tensor
    holders: tuple[tuple[nn.Module, str], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    parts: Parts
    copies: tuple[tuple[torch.Tensor, int | tuple[int, ...]], ...] = ()


@dataclass
class HeldParameters:
    """`hidden`: ids of registered tensors, beside the owners, that the unsharded model does not have: a framework's own
    tables of indices. `padding`: views of elements that belong to no parameter. `refusals`: by the id of a registered
    tensor, why a fill of it would be lost."""

    tensors: list[Held] = field(default_factory=list)
    hidden: set[int] = field(default_factory=set)
    padding: list[torch.Tensor] = field(default_factory=list)
    refusals: dict[int, str] = field(default_factory=dict)


def misfit(package: str, name: str, message: str) -> ValueError:
    """The error of an adapter that finds something else than the version it was written for has."""
    return ValueError(f"{name}: {message} ({package_version(package)}; see the README for the versions that were run)")


def read(package: str, name: str, owner: object, attribute: str) -> Any:
    """An attribute that a framework does not promise. `name` is for the message."""
    try:
        return getattr(owner, attribute)
    except AttributeError:
        raise misfit(package, name, f"a {type(owner).__name__} must have {attribute}, got one without") from None
