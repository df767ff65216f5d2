"""Any rank of any world size in one machine: torch's fake process group runs the real sharding code of FSDP1, FSDP2 and
DTensor without communication. Each rank is a forked process, since device meshes remember the rank of the process."""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch._dynamo  # imported here, so that no forked child has to: it takes longer than a case
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: F401
from torch.distributed.tensor import DTensor  # noqa: F401
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_shardinit import region
from torch_shardinit.locate import Piece, boxes_of_piece

PARALLEL = 2  # ranks that run at once


def _child(write_end: int, fn: Callable[..., Any], rank: int, world: int, args: tuple[Any, ...]) -> None:
    try:
        torch.set_num_threads(1)  # a forked child has no OpenMP threads
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        answer = (True, fn(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    with os.fdopen(write_end, "wb") as pipe:
        pickle.dump(answer, pipe)


def run_places(fn: Callable[..., Any], places: list[tuple[int, int]], *args: Any, timeout: float = 60.0) -> list[Any]:
    """fn(*args) as each of these (rank, world); the results in their order. A failure is an AssertionError with the
    child's traceback; a rank that takes longer than `timeout` seconds is killed."""
    results: dict[tuple[int, int], Any] = {}
    waiting, running = list(places), {}
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or running:
                while waiting and len(running) < PARALLEL:
                    rank, world = waiting.pop(0)
                    read_end, write_end = os.pipe()
                    pid = os.fork()
                    if pid == 0:
                        try:
                            os.close(read_end)
                            _child(write_end, fn, rank, world, args)
                        finally:
                            os._exit(0)
                    os.close(write_end)
                    running[read_end] = (rank, world, pid, time.monotonic() + timeout, bytearray())
                    selector.register(read_end, selectors.EVENT_READ)
                for key, _ in selector.select(timeout=0.5):
                    rank, world, pid, _, data = running[key.fd]
                    part = os.read(key.fd, 1 << 16)
                    data += part
                    if part:
                        continue
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    del running[key.fd]
                    os.waitpid(pid, 0)
                    ok, answer = pickle.loads(data) if data else (False, "it died without an answer")
                    assert ok, f"rank {rank} of {world}, {fn.__name__}: {answer}"
                    results[rank, world] = answer
                for rank, world, _, deadline, _ in running.values():
                    assert time.monotonic() < deadline, f"rank {rank} of {world}, {fn.__name__}: over {timeout} s"
        finally:
            for read_end, (_, _, pid, _, _) in running.items():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                os.close(read_end)
    return [results[place] for place in places]


def run_ranks(fn: Callable[..., Any], ranks: list[int], world: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    return run_places(fn, [(rank, world) for rank in ranks], *args, timeout=timeout)


def run_world(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    return run_ranks(fn, list(range(world)), world, *args, timeout=timeout)


def numbered(shape: tuple[int, ...], start: int = 0) -> torch.Tensor:
    """A tensor whose every element is its own row-major index, exact in fp64."""
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def assert_pieces(pieces: list[Piece], truth: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Each piece holds, at its place, the values of the whole tensor `truth[name]` that the framework put there.
    Returns how often each element of each tensor is held, to be summed over ranks by `assert_covered`."""
    held = {name: np.zeros(tuple(whole.shape), np.int64) for name, whole in truth.items()}
    for piece in pieces:
        whole = truth[piece.name]
        assert piece.global_shape == tuple(whole.shape), piece
        assert not piece.local.requires_grad and piece.name == piece.aliases[0]
        boxes = [region.slices(box) for box in boxes_of_piece(piece)]
        if isinstance(piece.offset, int):
            assert piece.local.dim() == 1
            expected = whole.flatten()[piece.offset : piece.offset + piece.local.numel()]
        else:
            assert len(piece.offset) == whole.dim() == piece.local.dim()
            expected = whole[boxes[0]]
        assert torch.equal(piece.local, expected), (piece, expected)
        for box in boxes:
            held[piece.name][box] += 1
    return held


def assert_covered(held_of_ranks: list[dict[str, np.ndarray]], copies: int) -> int:
    """Over all ranks every element is held exactly `copies` times. Returns the number of tensors."""
    for name in held_of_ranks[0]:
        total = sum(held[name] for held in held_of_ranks)
        assert np.all(total == copies), f"{name}: elements must be held {copies} times, got {total}"
    return len(held_of_ranks[0])
