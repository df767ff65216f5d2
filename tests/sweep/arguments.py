"""Arguments for constructors by the names of their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn

from .examine import MAX_ELEMENTS, Make, NotBuilt


def required(cls: type[nn.Module]) -> list[str]:
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in kinds]


def by_name(cls: type[nn.Module], values: Mapping[str, Any], optional: bool = False) -> dict[str, Any]:
    """What `values` has for the required parameters of `cls`, and for the others too if `optional`."""
    names = required(cls)
    unknown = [name for name in names if name not in values]
    if unknown:
        raise NotBuilt(f"no rule for {', '.join(unknown)}")
    if optional:
        names += [name for name in inspect.signature(cls.__init__).parameters if name in values and name not in names]
    return {name: values[name] for name in names}


def checked(make: Callable[[], nn.Module], max_elements: int = MAX_ELEMENTS) -> Make:
    """`make`, once it was seen to work on meta with few enough parameters."""
    try:
        with torch.device("meta"):
            model = make()
    except Exception as error:
        # Code that needs values, which a recording has and a meta tensor has not.
        if isinstance(error, (RuntimeError, NotImplementedError)) and "meta" in str(error):
            return make
        raise NotBuilt(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}") from error
    # Lazy parameters have no size.
    count = sum(p.numel() for p in model.parameters() if not nn.parameter.is_lazy(p))
    if count > max_elements:
        raise NotBuilt(f"{count:,} parameters by rule, more than {max_elements:,}")
    if not count:
        raise NotBuilt("no parameters")
    return make


def classes_of(module: Any, base: type = nn.Module) -> dict[str, type[nn.Module]]:
    """The public classes of a module that are modules of torch."""
    found = {name: getattr(module, name, None) for name in dir(module) if not name.startswith("_")}
    return {name: cls for name, cls in sorted(found.items()) if inspect.isclass(cls) and issubclass(cls, base)}
