"""Every file of examples/ runs as its docstring says, and prints what it is there to show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

# name: [(processes under torchrun, or 0 for python; arguments; what it prints, once a match)]
RUNS = {
    "fsdp1_param_init_fn": [(2, "", {r"rank \d holds \d+ elements; 51 of 51 parameters equal the unsharded ones": 2})],
    "fsdp2_meta": [(2, "", {r"rank \d holds 50\d rows of embedding.weight; equal: True": 2})],
    "hsdp_tp": [(8, "", {r"mesh \(2, 2, 2\): \w{16}": 1}), (2, "1 1 2", {r"mesh \(1, 1, 2\): \w{16}": 1})],
    "own_sharder": [(0, "", {r"3 flat shards equal the whole: True; 3 blocks of rows: True": 1})],
    "pipeline": [(2, "", {r"rank \d: (\d) of \1 parameters equal the unsharded model's": 2})],
}

# Examples that need more than torch have tests of their own: test_torchrec_example.py, trainers/test_examples.py.
ELSEWHERE = {"torchrec_tables", "deepspeed_zero3", "fabric", "megatron_tp", "transformers_fsdp2"}


def run(name: str, processes: int, arguments: str) -> str:
    """Its output; an AssertionError with both streams where it fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *arguments.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", RUNS)
def test_example(name: str) -> None:
    outputs = []
    for processes, arguments, printed in RUNS[name]:
        outputs.append(run(name, processes, arguments))
        for pattern, count in printed.items():
            assert len(re.findall(pattern, outputs[-1])) == count, outputs[-1]
    if name == "hsdp_tp":
        assert len({output.split(": ")[1] for output in outputs}) == 1, "the same model on any mesh"


def test_every_example_is_run_and_short() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert {file.stem for file in files} - ELSEWHERE == set(RUNS)
    for file in files:
        text = file.read_text()
        assert len(text.splitlines()) < 80, file
        assert f"examples/{file.name}" in text.split('"""')[1], "its docstring says how to run it"
