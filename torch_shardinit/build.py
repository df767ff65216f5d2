"""What was built, and what runs of it."""

from __future__ import annotations

from typing import Any

import torch

from . import _native
from .stream import STREAM_VERSION


def build_info() -> dict[str, Any]:
    """The build as a dictionary: stream (version), compiler, isas (that this processor can run), isa (in use), cuda
    (nvcc's version and the architectures that it compiled for, as "13.0.88 all-major"; None where the build has no CUDA
    kernels), torch (version)."""
    return {
        "stream": STREAM_VERSION,
        "compiler": _native.COMPILER,
        "isas": _native.available_isas(),
        "isa": _native.active_isa(),
        "cuda": _native.CUDA,
        "torch": torch.__version__,
    }
