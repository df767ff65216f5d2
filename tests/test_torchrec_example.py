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


def _output(num_ranks: int) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", EXAMPLE]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tables_are_the_same_on_one_and_two_ranks() -> None:
    sums = []
    for world in (1, 2):
        output = _output(world)
        # Processes write when they will, also between another's text and the end of its line.
        trained = re.findall(rf"rank (\d) of {world} has trained for a step", output)
        assert sorted(trained) == [str(rank) for rank in range(world)], output
        sums.append(re.findall(r"([\w.]+) +([0-9a-f]{8})\n", output))
    assert sums[0] == sums[1]
    tables = [f"tables.embedding_bags.{name}.weight" for name in ("country", "item", "shop", "user")]
    assert sorted(name for name, _ in sums[0]) == ["score.bias", "score.weight", *tables]
    assert len({bits for _, bits in sums[0]}) == 6


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 80
