"""Shared fixtures: every instruction set this machine runs, and byte-exact comparison."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from torch_shardinit import _native

TORCH_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_PATTERNS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_UNSIGNED = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _native.force_isa(request.param)
    yield request.param
    _native.force_isa("")


def patterns(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's elements as unsigned integers of their width, row-major."""
    size = tensor.element_size()
    return tensor.detach().contiguous().view(_PATTERNS[size]).numpy().view(_UNSIGNED[size])


def assert_bitwise_equal(got: np.ndarray, want: np.ndarray, what: str = "") -> None:
    """Equal to the last bit; else says how many differ, where first, and both patterns."""
    assert got.shape == want.shape, f"{what}: shapes {got.shape} and {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtypes {got.dtype} and {want.dtype}"
    differs = np.flatnonzero(got.ravel() != want.ravel())
    if differs.size:
        at = int(differs[0])
        raise AssertionError(
            f"{what}: {differs.size} of {got.size} elements differ, first at {at}: "
            f"got {int(got.ravel()[at]):#x}, want {int(want.ravel()[at]):#x}"
        )
