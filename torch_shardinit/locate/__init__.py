"""locate: which elements of which tensor this rank's memory holds, for plain, DDP, FSDP1 and DTensor (FSDP2, HSDP, TP)
models, wrapped and nested in any way. One small adapter a framework; integers below it (region.py).

Nothing here allocates device memory, communicates, or changes the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn as nn

from . import fsdp2
from .dtensor import dtensor_box, is_dtensor, locate_dtensor
from .frameworks import held_by_frameworks
from .fsdp1 import flat_parameter_of, handle_of, is_inside_unit, parts_of_handle
from .held import HeldParameters
from .names import join, walk_modules
from .piece import Kind, Located, Piece, boxes_of_piece
from .plain import check_strided, geometry, is_plain

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Located", "Piece", "boxes_of_piece", "dtensor_box", "locate", "locate_dtensor"]


@dataclass
class _Found:
    """A registered tensor, or a parameter of an FSDP1 flat parameter, with the names found so far."""

    owner: torch.Tensor
    kind: Kind
    names: set[str] = field(default_factory=set)
    global_shape: tuple[int, ...] = ()
    parts: list[tuple[torch.Tensor, int | tuple[int, ...]]] = field(default_factory=list)
    copies: tuple[tuple[torch.Tensor, int | tuple[int, ...]], ...] = ()


def _registered(modules: list[tuple[str, nn.Module]], buffers: bool) -> dict[int, _Found]:
    """Every registered tensor once, by id, with all its names."""
    found: dict[int, _Found] = {}
    kinds: tuple[Kind, ...] = ("parameter", "buffer") if buffers else ("parameter",)
    for prefix, module in modules:
        for kind in kinds:
            registry = module._parameters if kind == "parameter" else module._buffers
            for name, tensor in registry.items():
                if tensor is not None:
                    one = found.setdefault(id(tensor), _Found(tensor, kind))
                    one.names.add(join(prefix, name))
    return found


def _names_of_module(modules: list[tuple[str, nn.Module]]) -> dict[int, set[str]]:
    names: dict[int, set[str]] = {}
    for name, module in modules:
        names.setdefault(id(module), set()).add(name)
    return names


def _fsdp1(modules: list[tuple[str, nn.Module]], registered: dict[int, _Found]) -> tuple[list[_Found], list[Any]]:
    """The parameters of all FSDP1 units and the units' padding; what they hold is taken out of `registered`."""
    handles = {id(handle): (name, handle) for name, module in modules if (handle := handle_of(module)) is not None}
    names_of_module = _names_of_module(modules) if handles else {}
    found, padding = [], []
    for name, handle in handles.values():
        flat = flat_parameter_of(handle)
        registered.pop(id(flat), None)
        parts_of_entries, unit_padding = parts_of_handle(handle, f"FSDP unit {name!r}")
        padding += unit_padding
        for entry, parts in parts_of_entries:
            one = _Found(flat, "parameter", global_shape=entry.global_shape, parts=parts)
            for module, attribute in entry.owners:
                one.names |= {join(prefix, attribute) for prefix in names_of_module.get(id(module), ())}

            for shown in entry.shown(flat):
                if id(shown) in registered:
                    one.names |= registered.pop(id(shown)).names
            if not one.names:
                raise ValueError(
                    f"FSDP unit {name!r}: the module that holds each flattened parameter must still be in the model, "
                    f"got a {type(entry.owners[0][0]).__name__} that is not, with parameter {entry.owners[0][1]!r}"
                )
            found.append(one)
    return found, padding


def _of_frameworks(
    modules: list[tuple[str, nn.Module]], registered: dict[int, _Found]
) -> tuple[list[_Found], HeldParameters]:
    """What frameworks outside torch hold; what they register in its place is taken out of `registered`."""
    held = held_by_frameworks(module for _, module in modules)
    names_of_module = _names_of_module(modules) if held.tensors else {}
    found = []
    for tensor_id in held.hidden | {id(one.owner) for one in held.tensors}:
        registered.pop(tensor_id, None)
    for one in held.tensors:
        names = {
            join(prefix, attribute)
            for module, attribute in one.holders
            for prefix in names_of_module.get(id(module), ())
        }
        if not names:
            module, attribute = one.holders[0]
            raise ValueError(
                "the module that holds each sharded parameter must still be in the model, got a "
                f"{type(module).__name__} that is not, with parameter {attribute!r}"
            )
        found.append(_Found(one.owner, "parameter", names, one.shape, one.parts, one.copies))
    return found, held


def _find_parts(one: _Found) -> bool:
    """Ordinary tensors and DTensors: shape and parts. False where this rank holds none of it."""
    tensor, name = one.owner, min(one.names)
    if is_inside_unit(tensor):
        raise ValueError(
            f"{name}: a parameter of an FSDP1 unit can only be located from a model that contains the unit, got one "
            "that lies inside it; pass the FullyShardedDataParallel module or its root"
        )
    if is_dtensor(tensor):
        placed = locate_dtensor(cast("DTensor", tensor), name)
        if placed is None:
            return False
        local, _, offset = placed
    elif is_plain(tensor):
        local, offset = tensor.detach(), (0,) * tensor.dim()
    else:
        raise TypeError(
            f"{name}: a {one.kind} must be an ordinary tensor, a DTensor or part of an FSDP1 unit, got a "
            f"{type(tensor).__name__}"
        )
    check_strided(local, name)
    one.global_shape = tuple(tensor.shape)
    one.parts = [(local, offset)]
    return True


def _tie_key(one: _Found) -> tuple[object, ...]:
    """Equal for two objects that are one tensor: the same memory, element for element."""
    return (one.global_shape, *((offset, *geometry(local)) for local, offset in one.parts))


def _join_ties(found: list[_Found]) -> list[_Found]:
    tied: dict[tuple[object, ...], _Found] = {}
    for one in found:
        first = tied.setdefault(_tie_key(one), one)
        if first is not one:
            first.names |= one.names
            if one.kind == "parameter" and first.kind == "buffer":
                first.kind, first.owner = one.kind, one.owner
    return list(tied.values())


def locate(model: nn.Module, *, buffers: bool = True) -> Located:
    """The pieces of every parameter and buffer of `model` that lie in this rank's memory.

    Works on a plain model and through any nesting of DDP, FSDP1 (before its first forward and whenever it is sharded),
    FSDP2, DTensor parallelism, torch.compile and checkpoint wrappers. A tensor of which this rank holds nothing has a
    piece of no elements; one whose mesh this rank is not part of has none. A piece may be split: parameters that are
    not contiguous have up to 2 * ndim - 1 pieces in an FSDP1 flat parameter.

    Raises TypeError for a tensor of a kind that is not known, ValueError for one that has no elements of its own to
    fill (Partial, sparse, expanded), for FSDP in its unsharded state, and for two tensors with one name.
    """
    modules = list(walk_modules(model))
    for name, module in modules:
        fsdp2.check_sharded(module, name)
    registered = _registered(modules, buffers)
    flat, padding = _fsdp1(modules, registered)
    held, of_frameworks = _of_frameworks(modules, registered)
    # Ties within FSDP1 are known by name; its empty views share geometry without being tied.
    found = [*flat, *held, *_join_ties([one for one in registered.values() if _find_parts(one)])]
    pieces: list[Piece] = []
    copies: list[Piece] = []
    owner_of_name: dict[str, _Found] = {}
    for one in found:
        aliases = tuple(sorted(one.names))
        for alias in aliases:
            other = owner_of_name.setdefault(alias, one)
            if other is not one:
                raise ValueError(
                    f"{alias}: each tensor must have a name of its own once wrappers are taken out of it, got two: of "
                    f"shapes {other.global_shape} and {one.global_shape}"
                )
        for found_in, places in ((pieces, one.parts), (copies, one.copies)):
            found_in += [
                Piece(aliases[0], aliases, one.kind, one.global_shape, local, offset, one.owner)
                for local, offset in places
            ]
    return Located(pieces, padding + of_frameworks.padding, copies, of_frameworks.refusals)
