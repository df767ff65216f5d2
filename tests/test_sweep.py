"""A few models of real packages; `make sweep` has them by the hundred. `python -m sweep --sample` is a process of
its own, since other packages behave otherwise where they can import these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from sweep import examine as ex
from sweep.workers import run

TESTS = Path(__file__).parent
# Where tests/sweep/requirements.txt is installed; `make test` sets it for the torch that it is for.
PACKAGES = os.environ.get("SHARDINIT_SWEEP_PACKAGES", "")
NUM_SAMPLE = 12


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not PACKAGES:
        assert os.environ.get("SHARDINIT_REQUIRE_FRAMEWORKS") != "1", "SHARDINIT_SWEEP_PACKAGES must name a folder"
        pytest.skip("SHARDINIT_SWEEP_PACKAGES names no folder of the packages of tests/sweep/requirements.txt")
    folder = tmp_path_factory.mktemp("sweep")
    path = os.pathsep.join([PACKAGES, str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "sweep", "--sample", "--json", "rows.json", "--messages", "messages.txt"],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (folder / "rows.json").exists(), done.stderr
    rows = json.loads((folder / "rows.json").read_text())
    return {
        "rows": rows,
        "table": done.stdout,
        "rc": done.returncode,
        "messages": (folder / "messages.txt").read_text(),
    }


def test_models_of_real_packages_are_the_same_on_shards(sample: dict[str, Any]) -> None:
    rows = sample["rows"]
    assert len(rows) == NUM_SAMPLE and len({row["package"] for row in rows}) == 7
    for row in rows:
        assert not row["failure"] and not row["not_built"], f"{row['model']}: {row['failure']}\n{sample['messages']}"
        assert row["classes"]["exact"] and row["num_elements"] <= row["compared"], row
    assert sample["rc"] == 0


def test_models_of_real_packages_equal_stock_torch(sample: dict[str, Any]) -> None:
    assert {row["model"]: row["stock"] for row in sample["rows"]} == {row["model"]: "ok" for row in sample["rows"]}


def test_the_table_is_aligned(sample: dict[str, Any]) -> None:
    header, _, *lines = sample["table"].splitlines()[: NUM_SAMPLE + 2]
    at = header.index("result")
    assert [line[at:] for line in lines] == ["ok"] * NUM_SAMPLE


class Unwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.empty(4, 3))
        self.linear = nn.Linear(3, 5)


class OnMetaOnly(nn.Module):
    """What a recording must not be taken in by: other values where it is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        nn.init.constant_(self.linear.bias, 1.0 if self.linear.weight.device.type == "meta" else 2.0)


class EveryTimeOther(nn.Module):
    count = 0

    def __init__(self) -> None:
        super().__init__()
        EveryTimeOther.count += 1
        self.linear = nn.Linear(3, 5)
        nn.init.constant_(self.linear.bias, EveryTimeOther.count)


def test_tensors_that_stock_torch_does_not_write_either() -> None:
    row = ex.examine(ex.Row("here", "unwritten"), Unwritten)
    assert row.classes == {"unwritten": 1, "exact": 2} and row.stock == "ok" and row.compared == 20


@pytest.mark.parametrize("make", [OnMetaOnly, EveryTimeOther])
def test_what_differs_is_a_failure(make: ex.Make) -> None:
    with pytest.raises(ex.Failure, match=r"does not give torch's values|two recordings differ"):
        ex.examine(ex.Row("here", "differs"), make)


def test_a_wrong_shard_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    init_model_ = ex.shardinit.init_model_

    def wrong_on_ranks(model: nn.Module, seed: int, **options: Any) -> nn.Module:
        init_model_(model, seed, **options)
        if torch.distributed.is_initialized():
            with torch.no_grad():
                model.linear.weight.to_local().mul_(2)  # type: ignore[union-attr, operator]
        return model

    monkeypatch.setattr(ex.shardinit, "init_model_", wrong_on_ranks)
    with pytest.raises(ex.Failure, match=r"rank 0 of 3: 1 tensors differ from the unsharded ones: \['linear.weight'\]"):
        ex.examine(ex.Row("here", "wrong"), Unwritten)


def dies() -> nn.Module:
    os._exit(3)


def hangs() -> nn.Module:
    while True:
        pass


def not_there() -> ex.Make:
    raise ex.NotBuilt("too large")


def test_models_that_die_hang_or_are_not_built_are_rows() -> None:
    seen: list[str] = []
    makes = {"good": lambda: Unwritten, "dies": lambda: dies, "not": not_there}
    items = [("here", name, make) for name, make in makes.items()]
    results = run(items, 2, 60.0, lambda row, trace: seen.append(row.model))
    results += run([("here", "hangs", lambda: hangs)], 2, 2.0, lambda row, trace: seen.append(row.model))
    rows = {row.model: row for row, _ in results}
    assert list(rows) == [*makes, "hangs"] and sorted(seen) == sorted(rows)
    assert rows["good"].stock == "ok" and not rows["good"].failure
    assert rows["dies"].failure == "it died without an answer"
    assert rows["hangs"].failure == "it took longer than 2 s"
    assert rows["not"].not_built == "too large" and not rows["not"].failure
