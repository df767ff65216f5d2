"""Plan: what a recording found, by canonical name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch

from .program import Exact, Played, Program, Unwritten
from .stream import STREAM_VERSION

if TYPE_CHECKING:
    from torch import nn

Rename = Callable[[str], str]


@dataclass(frozen=True)
class Entry:
    """One parameter or buffer of the whole, unsharded model.

    name: canonical, the least of `aliases` in code-point order. shape, dtype: as recorded. persistent: False for
    buffers that a state_dict leaves out. kept: a buffer of an ordinary real model that nothing wrote; it keeps its
    values.
    """

    name: str
    aliases: tuple[str, ...]
    kind: Literal["parameter", "buffer"]
    shape: tuple[int, ...]
    dtype: torch.dtype
    program: Program
    persistent: bool = True
    kept: bool = False

    @property
    def program_class(self) -> str:
        if self.kept:
            return "kept"
        return {Exact: "exact", Played: "played", Unwritten: "unwritten"}[type(self.program)]


class Plan:
    """The program of each parameter and buffer. Plans are equal where their entries and stream versions are."""

    def __init__(self, entries: Iterable[Entry], stream_version: int = STREAM_VERSION) -> None:
        ordered = sorted(entries, key=lambda entry: entry.name)
        self._entries = {entry.name: entry for entry in ordered}
        self._by_alias: dict[str, Entry] = {}
        self.stream_version = stream_version
        for entry in ordered:
            for alias in entry.aliases:
                other = self._by_alias.setdefault(alias, entry)
                if other is not entry:
                    raise ValueError(f"a Plan's names must be distinct, got {alias} for {other.name} and {entry.name}")

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Canonical name -> entry, in code-point order of the names."""
        return MappingProxyType(self._entries)

    def lookup(self, name: str) -> Entry | None:
        """The entry of a tensor by any of its names, or None."""
        return self._by_alias.get(name)

    def apply_(
        self, model: nn.Module, seed: int | None = None, *, rename: Rename | None = None, keep: Sequence[str] = ()
    ) -> None:
        """Fills what this rank holds of the model's parameters and buffers, in place, sharded in any way.

        Args:
            model: has memory (is not on meta).
            seed: int in [-2^63, 2^64); None is the process default (manual_seed).
            rename: from a name in `model` to the name in the Plan.
            keep: glob patterns of tensors to leave alone.

        Raises:
            ValueError: the model has a tensor that the Plan lacks, or of another shape.
            UninitializedError: nothing wrote a tensor; the message names all such.
        """
        from .apply import apply_plan

        apply_plan(self, model, seed, rename, keep)

    def fill_(
        self,
        name: str,
        tensor: torch.Tensor,
        *,
        offset: int | tuple[int, ...] | None = None,
        seed: int | None = None,
    ) -> torch.Tensor:
        """Fills one tensor, or any part of it, with the values of the Plan's tensor `name`: for a sharder of your own
        (examples/own_sharder.py). Nothing else of the model is needed.

        Args:
            name: any name of the tensor in the whole model.
            tensor: filled in place; any strides. A DTensor knows its place.
            offset: an int: `tensor`, 1-D or contiguous, is the run of elements that starts at this row-major index of
                the whole. A tuple: it is the box of its own shape whose first element has these coordinates. None: it
                is the whole.
            seed: as for apply_.

        Returns:
            The tensor.

        Raises:
            ValueError: the Plan lacks the tensor, or the part does not lie in it.
            UninitializedError: nothing wrote the tensor.
        """
        from .apply import fill_named

        return fill_named(self, name, tensor, offset, seed)

    def to_json(self, *, max_constant_bytes: int = 1 << 16) -> str:
        """The Plan as JSON text, from which `from_json` makes an equal one, on any machine.

        Tables that were computed inside recording() are written as their operations. A constant that was captured from
        outside of it is written with its values.

        Args:
            max_constant_bytes: of one captured constant.

        Raises:
            ValueError: a captured constant is larger; or an operator needs values to know the size of its result, or
                takes something that has no JSON form. The message names the tensor.
        """
        from .plan_json import text_of

        return text_of(self, max_constant_bytes)

    @staticmethod
    def from_json(text: str | bytes, *, max_bytes: int = 1 << 26, max_played_bytes: int = 1 << 30) -> Plan:
        """The Plan of a text that `to_json` wrote. The text is data: nothing of it is run, and reading it takes memory
        in proportion to its length.

        Args:
            max_bytes: length of the text.
            max_played_bytes: what the intermediate tensors of one played tensor may take when the Plan is applied,
                beside 64 times the tensor.

        Raises:
            ValueError: the text is longer, is of another format or stream version, or is not as it must be; the message
                says where.
        """
        from .plan_read import plan_of

        return plan_of(text, max_bytes, max_played_bytes)

    def diff(self, other: Plan) -> list[str]:
        """How `other` differs, as lines such as "layers.3.wo.weight: normal std 0.02 -> 0.01"; tensors that only one
        has are "added" or "removed". Empty where the Plans are equal."""
        from .plan_diff import lines_of

        return lines_of(self, other)

    def export(self, path: str | os.PathLike[str], seed: int | None = None, **options: Any) -> None:
        """Writes the unsharded model's initial weights as a checkpoint, without the model; see export.export."""
        from .export import export

        export(self, path, seed, **options)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self.stream_version == other.stream_version and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Plan of {len(self._entries)} tensors>"

    def __str__(self) -> str:
        """A table: name, global shape, dtype, class, program."""
        header = ("name", "shape", "dtype", "class", "program")
        rows = [header, *(_row(entry) for entry in self._entries.values())]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header) - 1)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def _row(entry: Entry) -> tuple[str, ...]:
    others: Any = [alias for alias in entry.aliases if alias != entry.name]
    name = entry.name + (f" (= {', '.join(others)})" if others else "")
    shape = "x".join(map(str, entry.shape)) or "scalar"
    dtype = str(entry.dtype).removeprefix("torch.")
    return name, shape, dtype, entry.program_class, entry.program.describe()
