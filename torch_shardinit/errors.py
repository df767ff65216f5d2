"""The errors of the library that are more than a bad argument (those are ValueError and TypeError)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .mismatch import Mismatch


class ShardInitError(RuntimeError):
    """Base of everything below."""


class RecordError(ShardInitError):
    """Init code did something that a recording cannot follow, or that is not supported yet."""


class UninitializedError(ShardInitError):
    """A parameter or buffer that nothing wrote, or whose program reads elements that nothing wrote."""


class ReplicaMismatchError(ShardInitError):
    """Ranks that must hold equal values do not. mismatches: one mismatch.Mismatch for each tensor."""

    def __init__(self, message: str, mismatches: tuple[Mismatch, ...] = ()) -> None:
        super().__init__(message)
        self.mismatches = mismatches
