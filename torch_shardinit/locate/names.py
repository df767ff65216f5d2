"""Canonical local names: the name a tensor has in the model as its author wrote it, whatever was wrapped around it.

Wrappers hold the wrapped module under an attribute of their own. Most of those attributes are private and theirs
alone; DDP and others call it `module`, which model authors do too, so there the type of the parent decides. Types are
told by name, so that no framework is imported.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn as nn

from .private import private

# Attributes that only a wrapper has.
_WRAPPED_ATTRIBUTES = frozenset(
    {
        "_fsdp_wrapped_module",  # torch FSDP1, FairScale FSDP
        "_fpw_module",  # FairScale FlattenParamsWrapper
        "_orig_mod",  # torch.compile
        "_checkpoint_wrapped_module",  # torch's activation wrappers
        "_forward_module",  # Lightning Fabric, beside ...
        "_original_module",  # ... the same module before its strategy wrapped it
        "_dmp_wrapped_module",  # TorchRec DistributedModelParallel
    }
)

# (top-level package, class) of the wrappers, subclasses included, that hold the wrapped module as `module`.
_MODULE_WRAPPERS = frozenset(
    {
        ("torch", "DataParallel"),
        ("torch", "DistributedDataParallel"),
        ("apex", "DistributedDataParallel"),
        ("deepspeed", "DeepSpeedEngine"),
        ("fairscale", "ShardedDataParallel"),
        ("megatron", "DistributedDataParallel"),
        ("megatron", "Float16Module"),
    }
)


# Asked several times of every module and tensor of a model, which have few classes. Not functools.lru_cache, of which
# torch.compile warns.
_is_subclass: dict[tuple[type, str, str], bool] = {}
_MAX_KNOWN = 4096


def is_a(value: object, package: str, class_name: str) -> bool:
    """Whether a class of this name from this top-level package is among value's classes; imports nothing."""
    kind = type(value)
    known = _is_subclass.get((kind, package, class_name))
    if known is None:
        classes = kind.__mro__
        known = any(cls.__name__ == class_name and cls.__module__.partition(".")[0] == package for cls in classes)
        if len(_is_subclass) >= _MAX_KNOWN:
            _is_subclass.clear()
        _is_subclass[kind, package, class_name] = known
    return known


def is_wrapper_child(parent: nn.Module, child_name: str) -> bool:
    """Whether `child_name` of `parent` is the module that `parent` wraps, so that it adds nothing to a name."""
    if child_name in _WRAPPED_ATTRIBUTES:
        return True
    return child_name == "module" and any(is_a(parent, *wrapper) for wrapper in _MODULE_WRAPPERS)


def _first_number(parent: nn.Module, child_name: str) -> int:
    """What the children of `child_name`, a list, begin to be numbered with in the whole model. Megatron numbers each
    rank's experts from 0; in the whole model they follow those of the ranks before."""
    if child_name == "local_experts" and is_a(parent, "megatron", "SequentialMLP"):
        return private(parent, "ep_group", "megatron").rank() * private(parent, "num_local_experts", "megatron")
    return 0


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def walk_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(canonical name, module) for every path to every module, parents first. A module that is reached by several
    paths comes once for each of its canonical names; a wrapper comes with the name of what it wraps."""
    seen: set[tuple[str, int]] = set()

    def visit(name: str, module: nn.Module, path: frozenset[int], first: int = 0) -> Iterator[tuple[str, nn.Module]]:
        if (name, id(module)) in seen or id(module) in path:  # a module may hold one of its ancestors
            return
        seen.add((name, id(module)))
        yield name, module
        if not module._modules:
            return
        path = path | {id(module)}
        for child_name, child in module._modules.items():
            if child is not None:
                own_name = str(int(child_name) + first) if first else child_name
                child_full_name = name if is_wrapper_child(module, child_name) else join(name, own_name)
                yield from visit(child_full_name, child, path, _first_number(module, child_name))

    yield from visit("", model, frozenset())
