"""Shared fixtures: every instruction set this machine runs, and byte-exact comparison."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from torch_shardinit import _native

REQUIRE_CUDA = os.environ.get("SHARDINIT_REQUIRE_CUDA") == "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "cuda: runs on a GPU; skipped without one, or failed if SHARDINIT_REQUIRE_CUDA=1"
    )


def _why_no_cuda() -> str | None:
    if _native.CUDA is None:
        return "torch_shardinit was built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_no_cuda()
    if reason and not REQUIRE_CUDA:
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason=f"GPU tests: {reason}"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if REQUIRE_CUDA and item.get_closest_marker("cuda") and (reason := _why_no_cuda()):
        pytest.fail(f"SHARDINIT_REQUIRE_CUDA=1, and {reason}", pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each reason that tests were skipped for: -q shows none of its own."""
    reasons = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


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
