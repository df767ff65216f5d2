"""Each model in a process of its own, two at a time: what a model's code leaves behind reaches no other model, and one
that hangs or dies is a row of the table."""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable

from .examine import NotBuilt, Prepare, Row, examine

Item = tuple[str, str, Prepare]  # package, model, how to build it


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    # "3 tensors cannot be recorded:" says less than the line after it; run_world's assertion ends with the cause.
    if len(lines) > 1 and lines[0].endswith("cannot be recorded:"):
        lines[0] += " " + lines[1]
    if isinstance(error, AssertionError) and len(lines) > 1:
        lines[0] += " " + lines[-1]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _child(item: Item, write_end: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    warnings.simplefilter("ignore")
    package, name, prepare = item
    row, trace = Row(package, name), ""
    try:
        examine(row, prepare())
    except NotBuilt as error:
        row.not_built = str(error)
    except BaseException as error:
        row.failure, trace = first_line(error), traceback.format_exc()
    with os.fdopen(write_end, "wb") as pipe:
        pickle.dump((row, trace), pipe)


def run(
    items: Iterable[Item], parallel: int, timeout: float, done: Callable[[Row, str], None]
) -> list[tuple[Row, str]]:
    """(row, traceback or "") of each model, in their order; `done` is called as they end."""
    waiting, running = list(enumerate(items)), {}
    results: dict[int, tuple[Row, str]] = {}
    with selectors.DefaultSelector() as selector:
        while waiting or running:
            while waiting and len(running) < parallel:
                index, item = waiting.pop(0)
                read_end, write_end = os.pipe()
                sys.stdout.flush()
                pid = os.fork()
                if pid == 0:
                    try:
                        os.setpgid(0, 0)  # so that its ranks end with it
                        os.close(read_end)
                        _child(item, write_end)
                    finally:
                        os._exit(0)
                os.close(write_end)
                running[read_end] = (index, item, pid, time.monotonic(), bytearray())
                selector.register(read_end, selectors.EVENT_READ)
            ended = []
            for key, _ in selector.select(timeout=0.5):
                part = os.read(key.fd, 1 << 16)
                running[key.fd][4].extend(part)
                if not part:
                    ended.append((key.fd, "it died without an answer"))
            for read_end, (_, _, _, start, _) in running.items():
                if time.monotonic() - start > timeout and all(read_end != fd for fd, _ in ended):
                    ended.append((read_end, f"it took longer than {timeout:g} s"))
            for read_end, why in ended:
                index, item, pid, start, data = running.pop(read_end)
                selector.unregister(read_end)
                os.close(read_end)
                try:
                    row, trace = pickle.loads(data)
                except Exception:
                    row, trace = Row(item[0], item[1], failure=why, seconds=time.monotonic() - start), ""
                    try:
                        os.killpg(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                os.waitpid(pid, 0)
                results[index] = row, trace
                done(row, trace)
    return [results[index] for index in sorted(results)]
