"""Small collectives that end: every wait is bounded, and a rank that can't take part says so instead of staying away.

These are off the init path, which communicates nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .errors import ShardInitError

DEFAULT_TIMEOUT = 120.0  # seconds


class Exchange:
    """All ranks of a group, or this process alone.

    what: the call that this is part of, for messages. group: None is the default group, where there is one.
    timeout: seconds that any one collective may take.
    """

    def __init__(self, what: str, group: Any = None, *, timeout: float | None = None, alone: bool = False) -> None:
        self.what = what
        self.timeout = DEFAULT_TIMEOUT if timeout is None else float(timeout)
        if not 0 < self.timeout < 1e9:
            raise ValueError(f"{what}: timeout must be a positive number of seconds, got {timeout!r}")
        running = dist.is_available() and dist.is_initialized()
        if group is not None and not running:
            raise ValueError(f"{what}: a group needs torch.distributed.init_process_group first")
        self.group = group
        self.alone = alone or not running
        self.world = 1 if self.alone else dist.get_world_size(group)
        self.rank = 0 if self.alone else dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"{what}: this process must be in the group, got one that it is not part of")

    def global_ranks(self, ranks: list[int]) -> list[int]:
        """Ranks of the group as ranks of the default group."""
        if self.alone or self.group is None:
            return ranks
        return [dist.get_global_rank(self.group, rank) for rank in ranks]

    def _device(self) -> torch.device:
        kinds = {device.type for device in getattr(self.group or dist.group.WORLD, "_device_types", [])}
        if not kinds or "cpu" in kinds:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def _wait(self, start: Callable[[], Any]) -> None:
        try:
            work = start()
            if work is not None:
                work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ShardInitError(
                f"{self.what}: every one of {self.world} ranks must take part within {self.timeout:g} s, but at least "
                f"one died, stays away or is in another call: {first}"
            ) from error

    def gather(self, row: np.ndarray) -> np.ndarray:
        """One array of each rank, all of one shape and dtype: (world, *shape)."""
        if self.alone:
            return row[None]
        raw = np.ascontiguousarray(row).reshape(-1).view(np.uint8)
        if not raw.size:
            return np.empty((self.world, *row.shape), row.dtype)
        device = self._device()
        ours = torch.from_numpy(raw.copy()).to(device)
        all_of_them = torch.empty(self.world * raw.size, dtype=torch.uint8, device=device)
        gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the older name, before 2.13
        self._wait(lambda: gather(all_of_them, ours, group=self.group, async_op=True))
        return all_of_them.cpu().numpy().view(row.dtype).reshape(self.world, *row.shape)

    def broadcast(self, data: bytes | None, length: int, source: int) -> bytes:
        """`length` bytes of the rank `source` of the group."""
        if self.alone or not length:
            return data or b""
        device = self._device()
        if self.rank == source:
            assert data is not None and len(data) == length
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        else:
            buffer = torch.empty(length, dtype=torch.uint8, device=device)
        (root,) = self.global_ranks([source])
        self._wait(lambda: dist.broadcast(buffer, src=root, group=self.group, async_op=True))
        return bytes(buffer.cpu().numpy())

    def gather_distinct(self, data: bytes) -> tuple[list[bytes], list[int]]:
        """The distinct data of all ranks, and which of them each rank has: 40 bytes of each rank, and one broadcast for
        each distinct data where there are several."""
        head = hashlib.sha256(data).digest() + len(data).to_bytes(8, "little")
        heads = [raw.tobytes() for raw in self.gather(np.frombuffer(head, np.uint8))]
        speakers: dict[bytes, int] = {}
        for rank, one in enumerate(heads):
            speakers.setdefault(one, rank)
        if len(speakers) == 1:
            return [data], [0] * self.world
        found = [
            self.broadcast(data if one == head else None, int.from_bytes(one[32:], "little"), rank)
            for one, rank in speakers.items()
        ]
        number = {one: k for k, one in enumerate(speakers)}
        return found, [number[one] for one in heads]
