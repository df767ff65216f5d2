"""FairScale's FullyShardedDataParallel: runs of each parameter in the local shard of a flat parameter.

A unit concatenates its parameters, each row-major, without alignment, into a FlatParameter of its FlattenParamsWrapper;
with flatten_parameters=False each parameter is one for itself. A sharded one is cut as torch.chunk cuts it, rank r of
the unit's group keeps chunk r, and all chunks are padded at their end to the length of the first. A FlatParameter that
no unit has sharded (a FlattenParamsWrapper alone, a group of one rank) is whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn

from .. import region
from .fsdp1 import padding_runs, runs_of_entry, view_of_run
from .held import Held, HeldParameters, Parts, misfit, read
from .names import is_a

PACKAGE = "fairscale"


def is_unit(module: nn.Module) -> bool:
    return is_a(module, PACKAGE, "FullyShardedDataParallel")


def _is_flattener(module: nn.Module) -> bool:
    return is_a(module, PACKAGE, "FlattenParamsWrapper")


def _read(owner: object, attribute: str) -> Any:
    return read(PACKAGE, "a FullyShardedDataParallel model of FairScale", owner, attribute)


def _is_flat(parameter: torch.Tensor) -> bool:
    return is_a(parameter, PACKAGE, "FlatParameter")


# --- what is read of the framework ---------------------------------------------------------------------------------


def _parameters_of_units(modules: Sequence[nn.Module]) -> dict[int, tuple[torch.Tensor, nn.Module]]:
    """(parameter, the first unit that lists it) by id: flat or not."""
    found: dict[int, tuple[torch.Tensor, nn.Module]] = {}
    for unit in filter(is_unit, modules):
        for parameter in _read(unit, "params"):
            found.setdefault(id(parameter), (parameter, unit))
    return found


def _parameters_of_flatteners(modules: Sequence[nn.Module]) -> Iterator[torch.Tensor]:
    for wrapper in filter(_is_flattener, modules):
        yield from _read(wrapper, "flat_params")


_Entries = list[tuple[tuple[tuple[nn.Module, str], ...], tuple[int, ...]]]


def _entries_of(flat: torch.Tensor) -> _Entries:
    """(holders, shape) of each parameter of a FlatParameter, in its order."""
    shared: dict[tuple[int, str], list[tuple[nn.Module, str]]] = {}
    for _, _, module, attribute, first_module, first_attribute in _read(flat, "_shared_param_infos"):
        shared.setdefault((id(first_module), first_attribute), []).append((module, attribute))
    infos, numels, shapes = (_read(flat, key) for key in ("_param_infos", "_param_numels", "_param_shapes"))
    entries: _Entries = []
    for (_, module, attribute), numel, shape in zip(infos, numels, shapes, strict=True):
        name = f"{type(module).__name__}.{attribute} in a flat parameter"
        if region.numel(region.full_box(tuple(shape))) != numel:
            raise misfit(PACKAGE, name, f"its {numel} elements must be those of its shape, got {tuple(shape)}")
        entries.append((((module, attribute), *shared.get((id(module), attribute), ())), tuple(shape)))
    return entries


def _is_sharded(parameter: torch.Tensor) -> bool:
    return bool(_read(parameter, "_is_sharded"))


def _check_at_rest(parameter: torch.Tensor, name: str) -> None:
    """A fill of the local shard is lost while the unit computes with another tensor. From the first forward on (or
    summon_full_params) the parameter knows its shard and the full tensor that it gathers into."""
    shard = getattr(parameter, "_fp32_shard", None)
    full = getattr(parameter, "_full_param_padded", None)
    moved = shard is not None and shard.untyped_storage()._cdata != parameter.untyped_storage()._cdata
    if moved or (full is not None and full.untyped_storage().size() > 0):
        raise ValueError(
            f"{name}: a FairScale parameter must be its own local shard, got one that is gathered (inside "
            "summon_full_params, or between a forward and the end of its backward)"
        )


def _local_shard(parameter: torch.Tensor, unit: nn.Module | None, numel: int, name: str) -> tuple[torch.Tensor, int]:
    """(the local shard as a detached 1-D view, the element of the whole that it starts at)."""
    _check_at_rest(parameter, name)
    local = parameter.detach()
    rank, world = 0, 1
    if unit is not None and _is_sharded(parameter):
        rank, world = _read(unit, "rank"), _read(unit, "world_size")
        original = _read(parameter, "_orig_size")
        if original.numel() != numel:
            raise misfit(PACKAGE, name, f"the unsharded size must be of {numel} elements, got {tuple(original)}")
    length = -(-numel // world)
    if local.dim() != 1 or local.numel() != length or not local.is_contiguous() or not 0 <= rank < world:
        raise misfit(
            PACKAGE,
            name,
            f"the local shard must be 1-D and contiguous with {length} of {numel} elements, got shape "
            f"{tuple(local.shape)} and strides {local.stride()} on rank {rank} of {world}",
        )
    return local, rank * length


# --- what follows from it ------------------------------------------------------------------------------------------


def _registrations(modules: Sequence[nn.Module]) -> dict[int, list[tuple[nn.Module, str]]]:
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((module, attribute))
    return found


def _lies_inside(parameter: torch.Tensor) -> bool:
    """Whether a parameter that no unit at hand lists is one's shard all the same."""
    return hasattr(parameter, "_orig_size") and bool(getattr(parameter, "_is_sharded", False))


def _inside_error(name: str) -> ValueError:
    return ValueError(
        f"{name}: a parameter of a FairScale FullyShardedDataParallel can only be located from a model that contains "
        "it, got one that lies inside it"
    )


def _add(parameter: torch.Tensor, local: torch.Tensor, start: int, entries: _Entries, found: HeldParameters) -> None:
    position, taken = 0, []
    for holders, shape in entries:
        runs = runs_of_entry(position, shape, range(len(shape)), start, local.numel())
        parts: Parts = [(view_of_run(local, run), run.offset) for run in runs]
        taken += [(run.at, run.length) for run in runs if run.length]
        found.tensors.append(Held(parameter, holders, shape, local.dtype, parameter.requires_grad, parts))
        position += region.numel(region.full_box(shape))
    found.padding += [local[at : at + length] for at, length in padding_runs(taken, local.numel())]


def collect(modules: Sequence[nn.Module], found: HeldParameters) -> None:
    """Adds what FairScale holds of these modules' parameters to `found`."""
    in_units = _parameters_of_units(modules)
    flats = {id(flat): flat for flat in _parameters_of_flatteners(modules)}
    registrations = _registrations(modules)
    for flat in flats.values():
        entries = _entries_of(flat)
        name = ", ".join(f"{type(holders[0][0]).__name__}.{holders[0][1]}" for holders, _ in entries[:3])
        if id(flat) not in in_units and _lies_inside(flat):
            raise _inside_error(f"the flat parameter of {name}")
        numel = sum(region.numel(region.full_box(shape)) for _, shape in entries)
        unit = in_units[id(flat)][1] if id(flat) in in_units else None
        _add(flat, *_local_shard(flat, unit, numel, f"the flat parameter of {name}"), entries, found)
    for key, (parameter, unit) in in_units.items():
        if key in flats or not _is_sharded(parameter):
            continue  # whole and in its place: an ordinary parameter
        holders = tuple(registrations.get(key, ()))
        if not holders or _is_flat(parameter):
            raise misfit(PACKAGE, type(unit).__name__, "each of its parameters must be registered in a module of it")
        shape = tuple(_read(parameter, "_orig_size"))
        name = f"{type(holders[0][0]).__name__}.{holders[0][1]}"
        local, start = _local_shard(parameter, unit, region.numel(region.full_box(shape)), name)
        _add(parameter, local, start, [(holders, shape)], found)
    for key, places in registrations.items():
        module, attribute = places[0]
        if key not in in_units and _lies_inside(module._parameters[attribute]):  # type: ignore[arg-type]
            raise _inside_error(f"{type(module).__name__}.{attribute}")


# --- memory for a model that was wrapped on meta -------------------------------------------------------------------


def materialise_(model: nn.Module, device: torch.device | str) -> None:
    """Gives the shards of units that were wrapped on meta their memory, uninitialised, on `device`.

    Module.to_empty makes plain parameters of them, and units keep lists of their own: so the parameters are replaced
    here, wherever they are, by ones of the same class with the same attributes.
    """
    if PACKAGE not in sys.modules:
        return
    modules = list(model.modules())
    listed = [_read(module, "params") for module in modules if is_unit(module)]
    listed += [_read(module, "flat_params") for module in modules if _is_flattener(module)]
    places: list[Any] = [*listed, *(module._parameters for module in modules)]
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for parameter in (parameter for parameters in listed for parameter in parameters):
        if parameter.is_meta and id(parameter) not in replaced:
            memory = torch.empty_like(parameter.detach(), device=device)
            fresh = torch.Tensor._make_subclass(type(parameter), memory, parameter.requires_grad)  # type: ignore[arg-type]
            fresh.__dict__.update(parameter.__dict__)
            replaced[id(parameter)] = parameter, fresh
    for place in places:
        for key, parameter in list(place.items() if isinstance(place, dict) else enumerate(place)):
            if id(parameter) in replaced:
                place[key] = replaced[id(parameter)][1]
