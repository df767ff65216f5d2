"""What an adapter reads of a framework's private attributes goes through here, so that a version of the framework that
keeps them elsewhere, or means something else by them, is an error that names that version, and never a wrong fill."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

from ..errors import ShardInitError


def package_version(package: str) -> str:
    """A framework's version, as it says itself, else as it was installed."""
    version = getattr(sys.modules.get(package), "__version__", None)
    if version is None:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "(of unknown version)"
    return f"{package} {version}"


def check_private(holds: bool, must: str, got: object, package: str = "torch") -> None:
    """Raises ShardInitError, which says what must hold and what came, unless `holds`."""
    if not holds:
        raise ShardInitError(
            f"{must}, got {got}: {package_version(package)} may keep its private attributes in another way than the "
            "versions in the README's table of layouts"
        )


def private(owner: Any, attribute: str, package: str = "torch") -> Any:
    """owner.attribute, which must be there."""
    try:
        return getattr(owner, attribute)
    except AttributeError:
        kind = owner.__name__ if isinstance(owner, type) else type(owner).__name__
        check_private(False, f"a {kind} must have the attribute {attribute}", "none", package)
        raise
