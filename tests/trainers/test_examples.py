"""The examples and the pages that need trainers: each example under torchrun, each Python block of a page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

# name: (numbers of processes, what each run prints: pattern -> times the number of processes, or once where 0)
RUNS: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "transformers_fsdp2": ((1, 2), {r"^model +\w{32}$": 0, r"^adapters \w{32}$": 0, r"rank \d: loss 6\.9788": 1}),
    "deepspeed_zero3": ((1, 2), {r"rank \d holds \d+ elements": 1, r"^model \w{32}, losses [\d.]+ [\d.]+$": 0}),
    "megatron_tp": ((1, 2), {r"rank \d holds \d+ rows of linear_fc1; equal: True": 1, r"^model \w{32}$": 0}),
    "fabric": ((1, 2), {r"^model \w{32}, losses [\d.]+ [\d.]+$": 0}),
}


def run(name: str, processes: int) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [*launcher, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", RUNS)
def test_example(name: str) -> None:
    numbers, printed = RUNS[name]
    found = []
    for processes in numbers:
        output = run(name, processes)
        for pattern, per_process in printed.items():
            count = len(re.findall(pattern, output, re.MULTILINE))
            assert count == (processes if per_process else 1), (pattern, output)
        found.append(sorted(re.findall(r"^(?:model|adapters) +\w{32}.*$", output, re.MULTILINE)))
        assert found[0] and found[-1] == found[0], "the same model on any number of processes"


# Every block of a page, each in a namespace of its own: to import the trainers takes longer than the blocks.
_RUNNER = """
import gc, re, sys
page = sys.argv[1]
for number, block in enumerate(re.findall(r"```python\\n(.*?)```", open(page).read(), re.DOTALL)):
    try:
        exec(compile(block, f"{page}, block {number}", "exec"), {"__name__": "__main__"})
    except Exception as error:
        raise AssertionError(f"{page}, block {number}") from error
    gc.collect()
    print("ran", number)
"""


@pytest.mark.parametrize("page, count", [("docs/migration.md", 8), ("docs/trainers.md", 3)])
def test_blocks_of_a_page_run(page: str, count: int) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    command = [sys.executable, "-W", "error::UserWarning:torch_shardinit", "-c", _RUNNER, str(ROOT / page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [int(number) for number in re.findall(r"^ran (\d+)$", done.stdout, re.MULTILINE)] == list(range(count))


def test_each_section_shows_both_and_fits_a_screen() -> None:
    page = (ROOT / "docs/migration.md").read_text()
    sections = page.split("\n## ")[1:]
    assert [section.splitlines()[0] for section in sections] == [
        "From torch.manual_seed and a broadcast",
        "From sync_module_states",
        "From seed checkpoints",
        "From --use-cpu-initialization",
    ]
    for section in sections:
        assert section.count("```python") == 2, "before and after"
        assert len(section.splitlines()) <= 62, section.splitlines()[0]
