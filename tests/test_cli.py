"""python -m torch_shardinit: what it prints and its exit status, and that its checks can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn

import torch_shardinit
from torch_shardinit.record import record
from torch_shardinit.verify import factory_of
from torch_shardinit.verify_layouts import LAYOUTS, build, select_layouts
from torch_shardinit.verify_reference import check_values, values_by_reference

TESTS = Path(__file__).resolve().parent
ROOT = Path(torch_shardinit.__file__).resolve().parent.parent
FEW = "unsharded,fsdp1-full-orig,fsdp2"


def run(*arguments: str, sabotage: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SABOTAGE": sabotage, "COLUMNS": "200"}
    command = [sys.executable, "-m", "torch_shardinit", *arguments]
    return subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=120)


def verify_small(factory: str, *arguments: str, sabotage: str = "") -> subprocess.CompletedProcess[str]:
    options = ["--nproc", "2", "--layouts", FEW, "--no-today", *arguments]
    return run("verify", "--model", f"cli_models:{factory}", *options, sabotage=sabotage)


def rows_of(output: str) -> dict[str, list[str]]:
    """The table's cells by layout."""
    names = [*LAYOUTS, "torch today, fsdp2"]
    return {
        name: line[len(name) :].split() for name in names for line in output.splitlines() if line.startswith(name + " ")
    }


def test_verify_of_the_tiny_model(tmp_path: Path) -> None:
    result = run(
        "verify", "--model", "torch_shardinit.demo_model:tiny", "--nproc", "2", "--seed", "-5", "--json",
        str(tmp_path / "report.json"),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    rows = rows_of(result.stdout)
    assert list(rows) == [*LAYOUTS, "torch today, fsdp2"]
    num_elements = 2 * (55_800 + 2 * 32 * 6)
    for name, layout in LAYOUTS.items():
        assert rows[name][:4] == [layout.init_by, f"{num_elements:,}", "0", "0"], name
        assert float(rows[name][4]) >= 0
    today = rows["torch today, fsdp2"]
    assert int(today[2].replace(",", "")) > num_elements / 2  # and the exit status is 0 nevertheless
    for program in ("normal(", "trunc_normal(", "uniform("):
        assert f" = {program}" in result.stdout
    assert result.stdout.count("differ from the NumPy reference") == 3
    assert result.stdout.count(": 0 of ") == 3
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] and report["seed"] == -5 and report["num_parameters"] == 55_800
    assert [row["layout"] for row in report["rows"]] == list(LAYOUTS)
    assert all(row["num_differing"] == 0 for row in report["rows"]) and report["today"]["num_differing"] > 0
    assert report["build"]["stream"] == torch_shardinit.STREAM_VERSION


def test_verify_of_a_users_model() -> None:
    result = verify_small("small")
    assert result.returncode == 0, result.stdout + result.stderr
    assert list(rows_of(result.stdout)) == FEW.split(",")


def test_error_values_that_depend_on_the_rank() -> None:
    result = verify_small("rank_dependent")
    assert result.returncode == 1
    assert [cells[2] for cells in rows_of(result.stdout).values()] == ["3", "3", "3"]  # on rank 1 alone
    assert "FAILED fsdp2: rank: element 0 is the first that differs" in result.stdout


def test_error_shards_filled_at_the_wrong_place() -> None:
    result = verify_small("small", sabotage="offset")
    assert result.returncode == 1
    differing = {name: int(cells[2]) for name, cells in rows_of(result.stdout).items()}
    assert differing["unsharded"] == 0 and differing["fsdp1-full-orig"] > 0 and differing["fsdp2"] > 0


def test_error_zeros() -> None:
    """Every layout is equal then; the values themselves must be looked at."""
    result = verify_small("small", sabotage="zeros")
    assert result.returncode == 1
    assert [cells[2] for cells in rows_of(result.stdout).values()] == ["0", "0", "0"]
    assert "FAILED values: blocks.0.weight is random, and must not be constant" in result.stdout
    assert "FAILED values: blocks.0.weight and blocks.1.weight are random, and must differ" in result.stdout
    assert "must equal the reference" in result.stdout


def test_error_a_collective_is_issued() -> None:
    result = verify_small("small", sabotage="collective")
    assert result.returncode == 1
    rows = rows_of(result.stdout)
    assert [cells[2:4] for cells in rows.values()] == [["0", "1"]] * 3


def test_error_the_generator_is_moved() -> None:
    result = verify_small("small", sabotage="generator")
    assert result.returncode == 1
    assert "FAILED fsdp2: the init moved torch's generator" in result.stdout


def test_error_in_the_factory() -> None:
    result = verify_small("raises_on_rank_1")
    assert result.returncode == 1
    assert "verify: rank 1 of 2 failed:" in result.stderr and "KeyError: 'the cause'" in result.stderr
    assert "in raises_on_rank_1" in result.stderr
    result = verify_small("incomplete")
    assert result.returncode == 1 and "UninitializedError" in result.stderr and "extra" in result.stderr
    result = verify_small("no_module")
    assert result.returncode == 1 and "the factory must return a torch.nn.Module, got int" in result.stderr
    result = verify_small("rank_dependent_shape")
    assert result.returncode == 1 and "every rank must build the same model" in result.stderr


def test_error_a_process_hangs() -> None:
    started = time.monotonic()
    result = verify_small("waits_on_rank_1", "--timeout", "12")
    assert result.returncode == 1 and time.monotonic() - started < 40
    assert "of 2 must end within 12 s, got no answer from them" in result.stderr


def test_version() -> None:
    result = run("--version")
    assert result.returncode == 0
    info = torch_shardinit.build_info()
    for part in (f"stream version {info['stream']}", info["compiler"], f"active {info['isa']}", torch.__version__):
        assert part in result.stdout


def test_bench_fill_runs(tmp_path: Path) -> None:
    script = TESTS.parent / "bench" / "fill.py"
    command = [sys.executable, str(script), "--log2n", "12", "--json", str(tmp_path / "fill.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "fill.json").read_text())["results"]
    assert {(one["distribution"], one["dtype"]) for one in results} >= {("normal", "fp32"), ("trunc_normal", "fp8")}
    assert all(one["ours"] > 0 for one in results)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("cli_models", "--model must be package.module:factory, got 'cli_models'"),
        ("cli_models:", "--model must be package.module:factory, got 'cli_models:'"),
        (
            "no_such_module:f",
            "--model must name a module that can be imported, got 'no_such_module:f': No module named",
        ),
        (
            "cli_models:nothing",
            "--model must name something in cli_models, got 'cli_models:nothing': it has no nothing",
        ),
        ("cli_models:five", "--model must name a callable that returns a module, got 'cli_models:five', of type int"),
    ],
)
def test_error_bad_model(model: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        factory_of(model)
    assert str(error.value).startswith(message)


def test_error_bad_options() -> None:
    for options, message in (
        (("--model", "cli_models:five"), "--model must name a callable"),
        (("--layouts", "fsdp3"), "layouts must be names or patterns of unsharded, ddp,"),
        (("--nproc", "0"), "--nproc must be at least 1, got 0"),
        (("--seed", str(2**64)), "--seed must be in [-2^63, 2^64)"),
    ):
        result = run("verify", *options)
        assert result.returncode == 2 and message in result.stderr, options


def test_select_layouts() -> None:
    assert select_layouts(None) == list(LAYOUTS)
    assert select_layouts("fsdp2, ddp") == ["ddp", "fsdp2"]
    assert select_layouts("fsdp2*,fsdp1-hybrid*,fsdp2") == ["fsdp1-hybrid", "fsdp1-hybrid-orig", "fsdp2", "fsdp2-hsdp"]


class _Steps(nn.Module):
    """Programs with regions and arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(40, 6, padding_idx=3)
        self.scaled = nn.Parameter(torch.randn(30, 4) * 0.5 + 1)
        self.clamped = nn.Parameter(torch.empty(65).normal_(1.0, 2.0).clamp_(-1, 2).neg_())
        self.parts = nn.Parameter(torch.zeros(9, 8))
        with torch.no_grad():
            nn.init.trunc_normal_(self.parts[2:5], std=0.1)
            self.parts[:, ::3].uniform_(-1, 1).div_(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_by_reference_follow_every_step(dtype: torch.dtype) -> None:
    def factory() -> nn.Module:
        return _Steps().to(dtype) if dtype.itemsize < 4 else _double(dtype)

    def _double(wide: torch.dtype) -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(wide)
        try:
            return _Steps()
        finally:
            torch.set_default_dtype(before)

    model = build(factory)
    plan = record(model)
    torch_shardinit.init_model_(model, 7, device="cpu")
    tensors = dict(model.named_parameters())
    for name, entry in plan.entries.items():
        expected = values_by_reference(entry, np.arange(tensors[name].numel()), 7)
        got = tensors[name].detach().reshape(-1).view(torch.uint8).numpy().view(expected.dtype)
        assert np.array_equal(got, expected), (name, entry.program.describe())
    assert check_values(plan, tensors, 7).problems == []
    assert {"rows.weight", "scaled", "clamped", "parts"} == set(tensors)


def test_check_values_sees_one_wrong_element() -> None:
    model = build(_Steps)
    plan = record(model)
    torch_shardinit.init_model_(model, 7, device="cpu")
    tensors = dict(model.named_parameters())
    checked = [check.name for check in check_values(plan, tensors, 7).compared]
    assert len(checked) == 3
    with torch.no_grad():
        tensors[checked[0]].view(-1)[-1] += 1e-3
    (problem,) = check_values(plan, tensors, 7).problems
    assert problem.startswith(f"{checked[0]} must equal the reference, but 1 of ")
