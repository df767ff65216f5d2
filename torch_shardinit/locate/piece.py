"""What locate returns: the pieces of a model's tensors that this rank holds, and where in the whole they lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from .. import region

Kind = Literal["parameter", "buffer"]


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements of one parameter or buffer that lie in this rank's memory.

    name: the canonical local name, the least of `aliases` in code-point order.
    aliases: every canonical name of this tensor (ties), sorted by code point; name is the first.
    global_shape: the shape of the whole tensor.
    local: a detached strided view of the memory, with any strides; may have no elements.
    offset: an int where local is a 1-D run of consecutive row-major global elements that starts there; else the
        global coordinates of local's first element, one a dimension: local is the box of its own shape there.
    owner: the registered tensor that local is memory of (a parameter, DTensor or FlatParameter): its version counter
        is the one autograd looks at, its device tells whether there is memory at all.
    """

    name: str
    aliases: tuple[str, ...]
    kind: Kind
    global_shape: tuple[int, ...]
    local: torch.Tensor
    offset: int | tuple[int, ...]
    owner: torch.Tensor


@dataclass(frozen=True, eq=False)
class Located:
    """`pieces`, those of FSDP1 units first, else in the order of the model's modules; and the `padding` between and
    behind them in the local shards of flat parameters: views of elements that belong to no parameter.

    copies: pieces again, in further memory that a framework keeps equal to them: to be filled, not to be counted.
    refusals: by the id of an owner, why a fill of it would be lost.
    """

    pieces: list[Piece]
    padding: list[torch.Tensor] = field(default_factory=list)
    copies: list[Piece] = field(default_factory=list)
    refusals: dict[int, str] = field(default_factory=dict)


def boxes_of_piece(piece: Piece) -> list[region.Box]:
    """The global elements of a piece, as boxes in the tensor's own dimensions, in the order of local's elements."""
    if isinstance(piece.offset, int):
        return region.boxes_of_run(piece.global_shape, piece.offset, piece.local.numel())
    return [region.box_at(piece.offset, piece.local.shape)]
