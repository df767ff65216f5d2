"""Random fills that no tensor keeps because they hit a computed weight.

Under weight_norm, spectral_norm and other parametrizations `module.weight` is computed from other tensors each time it
is asked for, so that `nn.init.normal_(module.weight)` writes to a temporary. Torch does not notice.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from .tape import Node, Tape


@functools.cache
def _is_of_a_distribution(path: str) -> bool:
    """Whether a file belongs to an installed distribution, wherever that lies (editable, pip --target)."""
    for name, module in list(sys.modules.items()):
        folders = [] if "." in name else list(getattr(module, "__path__", None) or ())
        if any(path.startswith(os.path.join(folder, "")) for folder in folders):
            return name in importlib.metadata.packages_distributions()
    return False


@dataclass(frozen=True)
class LostFill:
    """names: of the tensors that the filled one was computed from."""

    node: Node
    names: tuple[str, ...]

    @property
    def in_package(self) -> bool:
        """Whether the code is an installed package's: its users can't change it."""
        return _is_of_a_distribution(self.node.where[0])

    def describe(self) -> str:
        return (
            f"{self.names[0]}: {self.node.info.label} at {self.node.line} fills {self._filled()}, which is computed "
            f"from {' and '.join(self.names)}, and nothing keeps its numbers. Initialise what it is computed from, or "
            "the weight before the parametrization is registered"
        )

    def _filled(self) -> str:
        """The module and the weight, where the names tell: those of torch.nn.utils.parametrize, weight_norm and
        spectral_norm."""
        for name in self.names:
            module, found, rest = name.rpartition("parametrizations.")
            if found:
                return f"{module}{rest.partition('.')[0]} under its parametrization"
            base, found, suffix = name.rpartition("_")
            if found and suffix in ("g", "v", "orig"):
                return f"{base} under its weight_norm or spectral_norm"
        return "a temporary"


def lost_fills(tape: Tape, named: Mapping[int, Set[str]], kept: Set[int]) -> Iterator[LostFill]:
    """named: storage -> names of the tensors there. kept: more storages whose contents a tensor holds at the end."""
    readers: dict[int, list[Node]] | None = None
    for node in tape.nodes:
        if not node.writes or not _is_draw(node):
            continue
        storage = node.writes[0].storage
        if storage in kept or storage in named or not _is_computed(tape, storage):
            continue
        if readers is None:
            readers = _readers(tape)
        if any(reader.index > node.index for reader in readers.get(storage, ())):
            continue
        names = sorted(set().union(*(named.get(one, ()) for one in _sources(tape, storage, node.index))))
        if names:
            yield LostFill(node, tuple(names))


def _is_draw(node: Node) -> bool:
    return not node.info.deterministic or node.info.label.startswith("init::")


def _is_computed(tape: Tape, storage: int) -> bool:
    writers = tape.writers(storage)
    first = writers[0][0] if writers else None
    return first is not None and bool(first.reads) and not _is_like(first)


def _is_like(node: Node) -> bool:
    """Whether a node's result does not depend on the values of what it is given."""
    return node.info.is_empty or node.info.name.endswith("_like") or node.info.name.startswith("new_")


def _readers(tape: Tape) -> dict[int, list[Node]]:
    """The nodes that carry values of a storage to another one."""
    found: dict[int, list[Node]] = {}
    for node in tape.nodes:
        written = {ref.storage for ref in node.results()}
        for storage in {ref.storage for ref in node.reads}:
            if written - {storage}:
                found.setdefault(storage, []).append(node)
    return found


def _sources(tape: Tape, storage: int, before: int) -> set[int]:
    """The storages from which the contents of one were computed."""
    found, todo = {storage}, [storage]
    while todo:
        for node, _ in tape.writers(todo.pop()):
            if node.index < before and not _is_like(node):
                new = {ref.storage for ref in node.reads} - found
                found |= new
                todo += new
    return found
