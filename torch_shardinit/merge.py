"""Whole tensors from what each rank holds: rows of sums exchanged, replicas counted once, coverage checked.

Two collectives where all ranks list the same tensors: a header of a fixed size, then 40 bytes for each tensor. Ranks
with other lists (pipeline stages) cost one broadcast of names for each further list.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .digest import Sum, whole
from .errors import ShardInitError
from .exchange import Exchange
from .holdings import Holding, digest_holdings

_HEADER = struct.Struct("<16sQQQ32s256s")  # call, failed, rows, bytes of the table, its SHA-256, message
_ROW = 5

TableEntry = tuple[tuple[str, ...], str, tuple[int, ...]]  # names, dtype, shape


@dataclass
class Region:
    """Elements of a tensor that some ranks hold, with the ranks of each sum. Several sums are replicas that differ."""

    numel: int
    ranks_of_sum: dict[Sum, list[int]]


class Tensor:
    """One name of a tensor over all ranks.

    rows: (holders, 5), of the ranks `ranks` that hold some of it. With 512 ranks and 2,000 tensors there are a million
    rows, so what every call needs is done on whole arrays.
    """

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], rows: np.ndarray, ranks: np.ndarray) -> None:
        self.name, self.dtype, self.shape = name, dtype, shape
        held = rows[:, 0] != 0
        order = np.argsort(rows[held, 0], kind="stable")
        self.rows, self.ranks = rows[held][order], ranks[held][order]
        again = self.rows[1:, 0] == self.rows[:-1, 0]  # the region of the rank before, in this order
        self.distinct = self.rows[np.concatenate(([True], ~again))[: len(self.rows)]]
        self.agrees = bool((self.rows[1:][again] == self.rows[:-1][again]).all())

    def covered(self) -> bool:
        """Whether the regions make up the tensor once: as many elements, with as great a sum of their indices."""
        numel, moment = self.distinct[:, 1:3].sum(axis=0, dtype=np.uint64)
        return (int(numel), int(moment)) == whole(self.shape)

    def total(self) -> Sum:
        """The whole tensor's sum, each region counted once."""
        words = np.ascontiguousarray(self.distinct[:, 3:]).view("<u4").reshape(-1, 4)
        return int.from_bytes(words.sum(axis=0, dtype="<u4").tobytes(), "little")

    def regions(self) -> list[Region]:
        found: dict[int, Region] = {}
        for rank, row in zip(self.ranks.tolist(), self.rows.tolist(), strict=True):
            key, numel, _, low, high = row
            one = found.setdefault(key, Region(numel, {}))
            one.ranks_of_sum.setdefault(low | high << 64, []).append(rank)
        return list(found.values())


@dataclass
class Tables:
    """What all ranks sent. tables: the distinct lists; table_of_rank: which one a rank has; rows: (rank, row, 5)."""

    tables: list[list[TableEntry]]
    table_of_rank: list[int]
    rows: np.ndarray


def _table_bytes(holdings: Sequence[Holding]) -> bytes:
    return json.dumps([[one.names, one.dtype, one.shape] for one in holdings]).encode()


def _table_of(data: bytes) -> list[TableEntry]:
    return [(tuple(names), dtype, tuple(shape)) for names, dtype, shape in json.loads(data)]


def exchange_tables(exchange: Exchange, prepare: Callable[[], list[Holding]]) -> tuple[list[Holding], Tables]:
    """This rank's holdings, which `prepare` gives, and everyone's sums.

    Raises ShardInitError on every rank where `prepare` fails on one, or where ranks are in different calls; on the rank
    itself the error is its own.
    """
    failure: Exception | None = None
    holdings: list[Holding] = []
    rows = np.zeros((0, _ROW), np.uint64)
    try:
        holdings = prepare()
        sums = digest_holdings(holdings)
        rows = np.array([one.row(total) for one, total in zip(holdings, sums, strict=True)], np.uint64)
        rows = rows.reshape(-1, _ROW)
    except Exception as error:  # the others must hear of it, whatever it is
        failure = error
    table = _table_bytes(holdings)
    call = hashlib.sha256(exchange.what.encode()).digest()[:16]
    message = (f"{type(failure).__name__}: {failure}" if failure else "").encode()[:256]
    header = _HEADER.pack(call, failure is not None, len(rows), len(table), hashlib.sha256(table).digest(), message)
    headers = [_HEADER.unpack(raw.tobytes()) for raw in exchange.gather(np.frombuffer(header, np.uint8))]
    if failure is not None:
        raise failure
    failed = {rank: header[5] for rank, header in enumerate(headers) if header[1]}
    if failed:
        rank, text = next(iter(failed.items()))
        raise ShardInitError(
            f"{exchange.what}: every rank must be able to take part, but {_ranks(exchange, list(failed))} failed: "
            f"{text.rstrip(bytes(1)).decode(errors='replace')}"
        )
    elsewhere = [rank for rank, header in enumerate(headers) if header[0] != call]
    if elsewhere:
        raise ShardInitError(
            f"{exchange.what}: all ranks of the group must make the same call, but {_ranks(exchange, elsewhere)} "
            "made another one"
        )
    number_of_hash: dict[bytes, int] = {}
    speakers: list[int] = []  # the first rank of each distinct table
    table_of_rank: list[int] = []
    for rank, head in enumerate(headers):
        if head[4] not in number_of_hash:
            number_of_hash[head[4]] = len(speakers)
            speakers.append(rank)
        table_of_rank.append(number_of_hash[head[4]])
    tables = []
    for number, speaker in enumerate(speakers):
        ours = table_of_rank[exchange.rank] == number
        if len(speakers) > 1:
            table_text = exchange.broadcast(table if ours else None, headers[speaker][3], speaker)
        else:
            table_text = table
        tables.append(_table_of(table_text))
    padded = np.zeros((max(head[2] for head in headers), _ROW), np.uint64)
    padded[: len(rows)] = rows
    return holdings, Tables(tables, table_of_rank, exchange.gather(padded))


def _ranks(exchange: Exchange, ranks: list[int]) -> str:
    shown = exchange.global_ranks(ranks)
    return ("rank " if len(shown) == 1 else "ranks ") + show_ranks(shown)


def show_ranks(ranks: Sequence[int]) -> str:
    """0-3, 7"""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs)


def merged(exchange: Exchange, tables: Tables) -> Iterator[Tensor]:
    """Each name of each tensor, in code-point order, with its regions.

    Raises ShardInitError where ranks give one name different dtypes or shapes.
    """
    ranks_of_table: list[list[int]] = [[] for _ in tables.tables]
    for rank, number in enumerate(tables.table_of_rank):
        ranks_of_table[number].append(rank)
    places: dict[str, list[tuple[int, int]]] = {}  # name -> (table, row)
    for number, table in enumerate(tables.tables):
        for row, (names, _, _) in enumerate(table):
            for name in names:
                places.setdefault(name, []).append((number, row))
    for name in sorted(places):
        kinds = {tables.tables[number][row][1:]: number for number, row in reversed(places[name])}
        if len(kinds) > 1:
            shown = "; ".join(
                f"{dtype} {list(shape)} on {_ranks(exchange, ranks_of_table[number])}"
                for (dtype, shape), number in sorted(kinds.items(), key=lambda item: item[1])
            )
            raise ShardInitError(
                f"{exchange.what}: {name or 'the tensor'} must have one dtype and global shape on all ranks, got "
                f"{shown}"
            )
        ((dtype, shape),) = kinds
        rows = [tables.rows[ranks_of_table[number], row] for number, row in places[name]]
        ranks = np.concatenate([ranks_of_table[number] for number, _ in places[name]])
        order = np.argsort(ranks, kind="stable")
        yield Tensor(name, dtype, shape, np.concatenate(rows)[order], ranks[order])
