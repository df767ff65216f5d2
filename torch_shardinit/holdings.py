"""What a process holds of a model, a state dict or a tensor: names, dtype, global shape and local parts of each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn as nn

from . import region
from .digest import Part, Sum, add_sums, digest_parts, dtype_text, extent
from .locate import locate, locate_dtensor
from .locate.dtensor import is_dtensor
from .locate.names import is_a, join, walk_modules
from .locate.plain import is_plain
from .locate.torchrec import wrapped_shards


@dataclass
class Holding:
    """names: all of a tied tensor's, sorted. parts: (local view, offset) as locate gives them; maybe none."""

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)

    def boxes(self) -> list[tuple[region.Box, torch.Tensor]]:
        """The held elements as boxes of the tensor, each with its memory, in an order that only the boxes decide."""
        found: list[tuple[region.Box, torch.Tensor]] = []
        for view, offset in self.parts:
            if not view.numel():
                continue
            if not isinstance(offset, int):
                found.append((region.box_at(offset, view.shape), view))
                continue
            at = 0
            for box in region.boxes_of_run(self.shape, offset, view.numel()):
                size = region.numel(box)
                found.append((box, view[at : at + size].view([s.size for s in box])))
                at += size
        return sorted(found, key=lambda one: one[0])

    def numel(self) -> int:
        return sum(view.numel() for view, _ in self.parts)

    def row(self, total: Sum) -> tuple[int, int, int, int, int]:
        """What stands for this holding in an exchange, five u64: the region's id (0 for none), its number of elements,
        the sum of their indices, and the two halves of the elements' sum."""
        boxes = [box for box, _ in self.boxes()]
        if not boxes:
            return 0, 0, 0, 0, 0
        raw = ";".join(",".join(f"{s.start}+{s.size}" for s in box) for box in boxes)
        key = int.from_bytes(hashlib.sha256(raw.encode()).digest()[:8], "little") | 1
        extents = [extent(box, self.shape) for box in boxes]
        mask = 2**64 - 1
        return key, sum(n for n, _ in extents), sum(m for _, m in extents) & mask, total & mask, total >> 64


def digest_holdings(holdings: list[Holding]) -> list[Sum]:
    """The sum of what is held of each."""
    parts = [(view, offset, one.shape) for one in holdings for view, offset in one.parts]
    sums = iter(digest_parts(parts))
    return [add_sums(next(sums) for _ in one.parts) for one in holdings]


def _non_persistent(model: nn.Module) -> set[str]:
    names: set[str] = set()
    for prefix, module in walk_modules(model):
        names |= {join(prefix, name) for name in module._non_persistent_buffers_set}
    return names


def _of_model(model: nn.Module, non_persistent: bool) -> list[Holding]:
    skipped = set() if non_persistent else _non_persistent(model)
    found: dict[str, Holding] = {}
    for piece in locate(model).pieces:
        names = tuple(name for name in piece.aliases if name not in skipped)
        if not names:
            continue
        one = found.setdefault(piece.name, Holding(names, dtype_text(piece.local.dtype), piece.global_shape))
        one.parts.append((piece.local, piece.offset))
    return list(found.values())


def _of_sharded_tensor(name: str, value: Any) -> Holding:
    metadata = value.metadata()
    one = Holding((name,), dtype_text(metadata.tensor_properties.dtype), tuple(metadata.size))
    for shard in value.local_shards():
        one.parts.append((shard.tensor.detach(), tuple(shard.metadata.shard_offsets)))
    return one


def _of_tensor(name: str, value: torch.Tensor) -> Holding:
    shown = name or "the tensor"
    one = Holding((name,), dtype_text(value.dtype), tuple(value.shape))
    if is_dtensor(value):
        wrapped = wrapped_shards(value)
        if wrapped is not None:
            one.parts += [(shard.detach(), offset) for shard, offset in wrapped]
            return one
        located = locate_dtensor(cast(Any, value), shown)
        if located is not None:
            one.parts.append((located[0], located[2]))
        return one
    if getattr(value, "_is_flat_param", False):
        raise ValueError(f"{shown}: a FlatParameter holds many tensors; pass the FSDP module that it belongs to")
    if not is_plain(value):
        raise TypeError(f"{shown}: a tensor must be an ordinary one or a DTensor, got a {type(value).__name__}")
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        raise ValueError(f"{shown}: a tensor to digest must be dense (torch.strided), got layout {value.layout}")
    one.parts.append((value.detach(), (0,) * value.dim()))
    return one


def _flatten(state: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        name = join(prefix, str(key))
        if isinstance(value, Mapping):
            yield from _flatten(value, name)
        else:
            yield name, value


def _of_state_dict(state: Mapping[Any, Any]) -> list[Holding]:
    found: dict[str, Holding] = {}
    for name, value in _flatten(state, ""):
        if is_a(value, "torch", "ShardedTensor"):
            one = _of_sharded_tensor(name, value)
        elif isinstance(value, torch.Tensor):
            one = _of_tensor(name, value)
        else:
            raise TypeError(
                f"{name}: a state dict to digest must hold tensors (and dicts of them), got a {type(value).__name__}; "
                "leave it out"
            )
        if name in found:
            raise ValueError(f"{name}: each tensor of a state dict must have a name of its own, got two of this one")
        found[name] = one
    return list(found.values())


def _rename(holdings: list[Holding], rename: Callable[[str], str]) -> None:
    owner: dict[str, Holding] = {}
    for one in holdings:
        one.names = tuple(sorted({rename(name) for name in one.names}))
        for name in one.names:
            if owner.setdefault(name, one) is not one:
                raise ValueError(f"rename must give different tensors different names, got {name} for two")


def holdings_of(
    what: object, *, non_persistent: bool = False, rename: Callable[[str], str] | None = None
) -> list[Holding]:
    """The holdings of a model, a state dict (nested dicts get dotted names) or a tensor (named ""), sorted by name.

    non_persistent: buffers that a model's state_dict leaves out, too. rename: from a name here to the whole model's.
    """
    if isinstance(what, nn.Module):
        found = _of_model(what, non_persistent)
    elif isinstance(what, torch.Tensor):
        found = [_of_tensor("", what)]
    elif is_a(what, "torch", "ShardedTensor"):
        found = [_of_sharded_tensor("", what)]
    elif isinstance(what, Mapping):
        found = _of_state_dict(what)
    else:
        raise TypeError(f"a model, a state dict or a tensor is needed, got a {type(what).__name__}")
    if rename is not None:
        _rename(found, rename)
    return sorted(found, key=lambda one: one.names)
