"""examples/torchrec_tables.py by torchrun, as its users run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from frameworks import require

require("torchrec")
EXAMPLE = Path(__file__).parent.parent / "examples" / "torchrec_tables.py"


def _output(num_ranks: int) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", EXAMPLE]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_tables_are_the_same_on_one_and_two_ranks() -> None:
    one, two = _output(1), _output(2)
    for lines, world in ((one, 1), (two, 2)):  # processes write in any order
        for rank in range(world):
            lines.remove(f"rank {rank} of {world} has trained for a step")
    assert one == two
    names = [line.split()[0] for line in one]
    tables = [f"tables.embedding_bags.{name}.weight" for name in ("country", "item", "shop", "user")]
    assert sorted(names) == ["score.bias", "score.weight", *tables]
    assert len({line.split()[1] for line in one}) == 6 and all(re.search(r" [0-9a-f]{8}$", line) for line in one)


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 80
