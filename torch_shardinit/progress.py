"""How far a long job is: one line that is rewritten on a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """total: bytes. Nothing is shown where the stream is None, or for jobs that end in a second."""

    def __init__(self, what: str, total: int, stream: TextIO | None = None) -> None:
        self.what = what
        self.total = total
        self.done = 0
        self.stream = stream
        self.begin = time.monotonic()
        self.shown = self.begin
        self.drawn = False

    def add(self, num_bytes: int) -> None:
        self.done += num_bytes
        now = time.monotonic()
        terminal = self.stream is not None and self.stream.isatty()
        if self.stream is None or now - self.shown < (0.2 if terminal else 10) or now - self.begin < 1:
            return
        self.shown, self.drawn = now, True
        rate = self.done / (now - self.begin)
        left = max(0, self.total - self.done) / rate if rate else 0
        share = 100 * self.done / self.total if self.total else 100
        text = (
            f"{self.what}: {self.done / 2**30:.2f} of {self.total / 2**30:.2f} GiB, {share:.0f} %, "
            f"{rate / 2**20:.0f} MiB/s, {left:.0f} s left"
        )
        print(f"\r{text}\x1b[K" if terminal else text, end="" if terminal else "\n", file=self.stream, flush=True)

    def close(self) -> None:
        if self.drawn and self.stream is not None and self.stream.isatty():
            print("\r\x1b[K", end="", file=self.stream, flush=True)


def to_stderr(what: str, total: int, quiet: bool = False) -> Progress:
    return Progress(what, total, None if quiet else sys.stderr)
