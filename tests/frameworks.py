"""Frameworks that tests need and that may not be there: TorchRec and FairScale load with one version of torch only."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


def require(*names: str) -> list[ModuleType]:
    """Imports modules. Where that fails the tests of the calling file are skipped, with the reason; it is an error
    where SHARDINIT_REQUIRE_FRAMEWORKS=1 (`make test` sets it for the torch that tests/frameworks.txt is for)."""
    try:
        return [importlib.import_module(name) for name in names]
    except Exception as error:  # a library built for another torch fails as it likes
        if os.environ.get("SHARDINIT_REQUIRE_FRAMEWORKS") == "1":
            raise
        pytest.skip(
            f"{names[0]} can't be imported, see tests/frameworks.txt: {type(error).__name__}: {error}",
            allow_module_level=True,
        )
