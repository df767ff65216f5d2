"""python -m torch_shardinit explain: what it prints, writes and returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cli import run

from torch_shardinit.cli import main
from torch_shardinit.plan import Plan

Explain = Callable[..., tuple[int, str, str]]


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str]) -> Explain:
    """In this process: a new one takes seconds to import torch."""

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main(["explain", *arguments])
        except SystemExit as exit:
            status = int(exit.code or 0)
        return (status, *capsys.readouterr())

    return call


def test_explain_as_a_command() -> None:
    result = run("explain", "--model", "cli_models:incomplete")
    assert result.returncode == 1 and not result.stderr and "1 unwritten (7 elements)" in result.stdout
    lines = [line.split(maxsplit=4) for line in result.stdout.splitlines()]
    assert ["extra", "7", "float32", "unwritten", "nothing wrote it"] in lines


def test_explain_prints_and_writes_the_plan(explain: Explain, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    status, out, error = explain("--model", "cli_models:small", "--json", str(file))
    assert status == 0 and not error
    table, total = out.rsplit("\n\n", 1)
    plan = Plan.from_json(file.read_text())
    assert table == str(plan)
    rows = [line.split(maxsplit=4) for line in table.splitlines()]
    assert rows[0] == ["name", "shape", "dtype", "class", "program"]
    assert ["token", "1x9", "float32", "exact", "normal(std=1, mean=0); mul(0.02)"] in rows
    assert ["norm.num_batches_tracked", "scalar", "int64", "played", "zero_"] in rows
    assert total == "13 tensors: 11 exact (315 elements), 2 played (26 elements)\n"


def test_explain_compares_with_a_file(explain: Explain, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert explain("--model", "cli_models:small", "--json", str(file))[0] == 0
    status, out, _ = explain("--model", "cli_models:small", "--against", str(file))
    assert (status, out) == (0, f"equal to {file}\n")
    whole = json.loads(file.read_text())
    token = next(one for one in whole["tensors"] if one["name"] == "token")
    token["program"]["steps"][1]["args"] = [0.03]
    file.write_text(json.dumps(whole))
    status, out, _ = explain("--model", "cli_models:small", "--against", str(file))
    assert (status, out) == (1, "token: mul 0.03 -> 0.02\n")


def test_error_explain(explain: Explain, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("{}")
    status, _, error = explain("--model", "cli_models:small", "--against", str(file))
    assert status == 1 and error.startswith("explain: Plan.from_json: format: must be")
    status, _, error = explain("--model", "cli_models:nothing")
    assert status == 2 and "nothing" in error
    status, _, error = explain("--model", "cli_models:small", "--json", str(tmp_path / "no" / "plan.json"))
    assert status == 1 and error.startswith("explain: ") and "No such file" in error
    status, _, error = explain("--model", "cli_models:branches_on_random_numbers")
    assert status == 1 and error.startswith("explain: ") and "depend on random numbers" in error


def test_a_reader_that_has_enough_is_no_error() -> None:
    """As `explain | head -1` is: the pipe closes while there is more to print."""
    command = f"{sys.executable} -m torch_shardinit explain | (exec 0<&-; sleep 0.1); echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100, env=os.environ)
    assert done.stdout.split() == ["141"] and "Traceback" not in done.stderr, done.stderr
