"""Where the models of the zoo are listed."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn as nn

MODELS: dict[str, Callable[[], nn.Module]] = {}


def zoo(cls: type[nn.Module]) -> type[nn.Module]:
    MODELS[cls.__name__] = cls
    return cls
