"""fingerprint: what a model's tensors hold, in 128 bits each, whatever the layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .digest import Sum, combined_digest, tensor_digest, whole
from .errors import ShardInitError
from .exchange import Exchange
from .holdings import Holding, digest_holdings, holdings_of
from .merge import Tensor, exchange_tables, merged
from .mismatch import raise_for_mismatches

DIGEST_VERSION = 1


@dataclass(frozen=True)
class FingerprintDiff:
    """What one fingerprint has that another has not. False where they are equal; str() is a line for each tensor.

    only_left, only_right: names. changed: name -> what differs. `left == right` and an empty diff go together.
    """

    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    changed: Mapping[str, str]

    def __bool__(self) -> bool:
        return bool(self.only_left or self.only_right or self.changed)

    def __str__(self) -> str:
        lines = [f"- {name}: only in the first" for name in self.only_left]
        lines += [f"+ {name}: only in the second" for name in self.only_right]
        lines += [f"! {name}: {what}" for name, what in self.changed.items()]
        return "\n".join(lines) if lines else "no difference"


@dataclass(frozen=True)
class Fingerprint:
    """Digests of named tensors (docs/stream.md, section 10).

    tensors: name -> 32 hex digits, over dtype, global shape and every element's bits at its index; a tied tensor comes
        under each of its names. Equal tensors under different names have equal digests.
    kinds: name -> (dtype, global shape).
    partial: names of which local_only saw a part; such a digest stands for that part alone.
    """

    tensors: Mapping[str, str]
    kinds: Mapping[str, tuple[str, tuple[int, ...]]] = field(compare=False)
    partial: frozenset[str] = frozenset()

    @property
    def digest(self) -> str:
        """32 hex digits over all names and their digests."""
        return combined_digest(self.tensors)

    def __hash__(self) -> int:
        return hash(self.digest)

    def diff(self, other: Fingerprint) -> FingerprintDiff:
        """The tensors in which the two differ."""
        if not isinstance(other, Fingerprint):
            raise TypeError(f"diff: a Fingerprint is needed, got a {type(other).__name__}")
        mine, theirs = self.tensors, other.tensors
        names_of: dict[str, list[str]] = {}
        for name, digest in theirs.items():
            names_of.setdefault(digest, []).append(name)
        changed = {}
        for name in sorted(mine.keys() & theirs.keys()):
            if mine[name] == theirs[name] and (name in self.partial) == (name in other.partial):
                continue
            (dtype, shape), (other_dtype, other_shape) = self.kinds[name], other.kinds[name]
            if dtype != other_dtype:
                changed[name] = f"dtype {dtype} and {other_dtype}"
            elif shape != other_shape:
                changed[name] = f"shape {list(shape)} and {list(other_shape)}"
            elif (name in self.partial) or (name in other.partial):
                changed[name] = "a part of it, digested by local_only, and another part or the whole"
            else:
                changed[name] = f"values, {mine[name]} and {theirs[name]}"
                elsewhere = [one for one in names_of.get(mine[name], []) if mine.get(one) != theirs[one]]
                if elsewhere:
                    changed[name] += f"; the first's is the second's {elsewhere[0]}"
        return FingerprintDiff(
            tuple(sorted(mine.keys() - theirs.keys())), tuple(sorted(theirs.keys() - mine.keys())), changed
        )

    def to_json(self) -> str:
        """JSON text that from_json reads, and that any later version will."""
        return json.dumps(
            {
                "torch_shardinit_fingerprint": DIGEST_VERSION,
                "digest": self.digest,
                "tensors": {
                    name: {"dtype": self.kinds[name][0], "shape": list(self.kinds[name][1]), "digest": digest}
                    | ({"partial": True} if name in self.partial else {})
                    for name, digest in self.tensors.items()
                },
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str) -> Fingerprint:
        """The fingerprint that to_json wrote.

        Raises:
            ValueError: the text is none, of another version, or its digests do not belong together.
        """
        try:
            raw = json.loads(text)
            version = raw["torch_shardinit_fingerprint"]
            tensors = {name: str(one["digest"]) for name, one in raw["tensors"].items()}
            kinds = {name: (str(one["dtype"]), tuple(map(int, one["shape"]))) for name, one in raw["tensors"].items()}
            partial = frozenset(name for name, one in raw["tensors"].items() if one.get("partial"))
            found = Fingerprint(tensors, kinds, partial)
            digest = found.digest
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"a fingerprint's JSON must be what to_json wrote, got {text[:80]!r}: {error}") from None
        if version != DIGEST_VERSION:
            raise ValueError(f"a fingerprint's version must be {DIGEST_VERSION}, got {version!r}")
        if raw.get("digest") != digest:
            raise ValueError(f"a fingerprint's digest must be that of its tensors, {digest}, got {raw.get('digest')!r}")
        return found

    def __str__(self) -> str:
        """The digest, then a line for each tensor: its digest, dtype, shape and name."""
        rows = [
            (digest, self.kinds[name][0], "x".join(map(str, self.kinds[name][1])) or "scalar", name)
            for name, digest in self.tensors.items()
        ]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        lines = [f"{self.digest}  {len(rows)} tensor{'s' * (len(rows) != 1)}"]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            lines.append("  ".join([*cells, row[3]]).rstrip() + (" (part)" if row[3] in self.partial else ""))
        return "\n".join(lines)


def _local(holdings: list[Holding]) -> Fingerprint:
    """Of what this process holds. A part's digest is over its place, too, and is no whole tensor's."""
    tensors: dict[str, str] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    partial = set()
    for one, summed in zip(holdings, digest_holdings(holdings), strict=True):
        key, numel, moment, *_ = one.row(summed)
        digest = tensor_digest(one.dtype, one.shape, summed)
        is_whole = (numel, moment) == whole(one.shape)
        if not is_whole:
            raw = f"part {key} {numel} {moment} of {digest}".encode()
            digest = hashlib.sha256(raw).hexdigest()[:32]
        for name in one.names:
            tensors[name], kinds[name] = digest, (one.dtype, one.shape)
            if not is_whole:
                partial.add(name)
    return Fingerprint(dict(sorted(tensors.items())), kinds, frozenset(partial))


def fingerprint_of(sums: Mapping[str, tuple[str, tuple[int, ...], Sum]]) -> Fingerprint:
    """From each name's dtype, global shape and sum over all elements."""
    return Fingerprint(
        {name: tensor_digest(dtype, shape, summed) for name, (dtype, shape, summed) in sorted(sums.items())},
        {name: (dtype, shape) for name, (dtype, shape, _) in sums.items()},
    )


def _check_covered(what: str, tensor: Tensor) -> None:
    if tensor.covered():
        return
    held = sum(one.numel for one in tensor.regions())
    raise ShardInitError(
        f"{what}: the group's ranks must hold each element of {tensor.name or 'the tensor'} between them, as equal or "
        f"disjoint regions; its shape is {list(tensor.shape)}, {whole(tensor.shape)[0]} elements, and "
        f"{len(tensor.distinct)} regions of {held} elements are there. Is the group the right one?"
    )


def fingerprint(
    what: Any,
    *,
    group: Any = None,
    local_only: bool = False,
    rename: Callable[[str], str] | None = None,
    non_persistent: bool = False,
    timeout: float | None = None,
) -> Fingerprint:
    """The layout-independent fingerprint of a model, a state dict or a tensor: equal for one process and for any
    number of them, whoever holds what, on CPU or GPU, as long as dtype, global shape and every bit agree.

    Replicas count once and must agree, pipeline stages merge by name, padding does not count, NaNs and signed zeros
    count by their bits.

    Args:
        what: a model in any layout that locate knows, a state dict (tensors, DTensors, ShardedTensors, nested dicts),
            or one tensor or DTensor (named "").
        group: the ranks that together hold everything; None is the default group, or this process alone where there is
            none. Every rank must call.
        local_only: looks at what this process holds alone and communicates nothing. Parts of tensors are marked.
        rename: from a name here to the name in the whole model, where this is a part of it (a pipeline stage).
        non_persistent: counts buffers that a model's state_dict leaves out, too. Without, a model, its state dict
            and its checkpoint have one fingerprint.
        timeout: seconds that each of the collectives may take, 120 by default.

    Raises:
        ReplicaMismatchError: ranks that hold the same elements hold other bits; it says which and where.
        ShardInitError: a rank is missing, fails, or gives a name another dtype or shape; or elements have no holder.
    """
    exchange = Exchange("fingerprint", group, timeout=timeout, alone=local_only)

    def prepare() -> list[Holding]:
        return holdings_of(what, non_persistent=non_persistent, rename=rename)

    if local_only:
        return _local(prepare())
    holdings, tables = exchange_tables(exchange, prepare)
    sums: dict[str, tuple[str, tuple[int, ...], Sum]] = {}
    differing = []
    for tensor in merged(exchange, tables):  # one at a time: together they would be a second copy of the tables
        _check_covered("fingerprint", tensor)
        sums[tensor.name] = tensor.dtype, tensor.shape, tensor.total()
        if not tensor.agrees:
            differing.append(tensor)
    raise_for_mismatches(exchange, holdings, differing, len(sums))
    return fingerprint_of(sums)
