"""A group of gloo processes on loopback that runs one function, ends within a time limit and shows what went wrong."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# One rank's failure often makes others fail in their next collective, and they may be heard of first.
_GRACE_SECONDS = 1.0


class ChildError(RuntimeError):
    """A process of the group failed, died or ran past the time limit; the message holds its traceback."""


def _child(
    function: Callable[..., Any],
    rank: int,
    world: int,
    backend: str,
    port: int,
    threads: int,
    limit: float,
    pipe: Any,
    args: tuple,
) -> None:
    try:
        # Host names often don't resolve in containers; gloo would look for its interface by them.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch
        import torch.distributed as dist

        torch.set_num_threads(threads)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        timeout = timedelta(seconds=limit)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        answer = (True, function(rank, world, *args))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        pipe.close()
        # Others may wait for this rank in a collective; an orderly end could wait for them.
        os._exit(1)
    pipe.send(answer)
    pipe.close()
    dist.destroy_process_group()


def _end_of(process: Any) -> str:
    process.join(5)
    return f"it ended without an answer, exit code {process.exitcode}"


def _messages(failures: dict[int, str], world: int) -> list[str]:
    """What went wrong, causes first: a rank that only lost another one is a line."""

    def is_cause(rank: int) -> bool:
        return "onnection closed by peer" not in failures[rank] and "onnection reset by peer" not in failures[rank]

    messages = []
    for rank in sorted(failures, key=lambda rank: (not is_cause(rank), rank)):
        text = failures[rank].strip()
        messages.append(f"rank {rank} of {world} failed:\n{text if is_cause(rank) else text.splitlines()[-1]}")
    return messages


def run_gloo(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    limit: float = 300.0,
    threads: int | None = None,
    backend: str = "gloo",
) -> list[Any]:
    """function(rank, world, *args) in ``world`` spawned processes that form a gloo group on the loopback interface.

    Args:
        function: importable by name; what it returns must pickle.
        limit: seconds until all are ended.
        threads: intra-op threads of each process; by default the machine's CPUs are shared out.
        backend: "nccl" gives each process the GPU of its rank's number.

    Returns:
        The results, in the order of the ranks.

    Raises:
        ChildError: a process raised (its traceback is the message), died, or was still running at the limit.
    """
    import torch.distributed as dist

    if threads is None:
        threads = max(1, (os.cpu_count() or 1) // world)
    # The store takes a free port itself, so that no other process can take it in between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + limit
    processes, pipes = [], []
    results: dict[int, Any] = {}
    try:
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_child,
                args=(function, rank, world, backend, store.port, threads, limit, theirs, args),
                daemon=True,
            )
            process.start()
            theirs.close()  # so that the end of the child is the end of the pipe
            processes.append(process)
            pipes.append(ours)
        failures: dict[int, str] = {}
        while len(results) + len(failures) < world:
            waiting = [rank for rank in range(world) if rank not in results and rank not in failures]
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait([pipes[rank] for rank in waiting], timeout=left) if left > 0 else []
            if not ready and failures:
                break
            if not ready:
                raise ChildError(f"ranks {waiting} of {world} must end within {limit:g} s, got no answer from them")
            for rank in waiting:
                if pipes[rank] not in ready:
                    continue
                try:
                    ok, answer = pipes[rank].recv()
                except EOFError:
                    ok, answer = False, _end_of(processes[rank])
                (results if ok else failures)[rank] = answer
                if not ok:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if failures:
            raise ChildError("\n".join(_messages(failures, world)))
        for process in processes:
            process.join(max(0.0, min(10.0, deadline - time.monotonic())))
        return [results[rank] for rank in range(world)]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in pipes:
            pipe.close()
