"""The benchmarks on small sizes: they run, they write what the pictures need, and what they count is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_world import run_places

import torch_shardinit as shardinit
from torch_shardinit.demo_model import tiny
from torch_shardinit.locate import locate
from torch_shardinit.model import materialise_, param_init_fn

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "bench"
sys.path.append(str(BENCH))

import llama  # noqa: E402
import one_rank  # noqa: E402


def run(script: str, *options: str, status: int = 0) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(BENCH / script), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def results(path: Path) -> list[dict[str, Any]]:
    data = json.loads(path.read_text())
    assert data["machine"]["torch"] == torch.__version__ and data["machine"]["cpus"] >= 1
    return data["results"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measurements")


def test_record(folder: Path) -> None:
    run("record.py", "--shapes", "tiny", "--world", "4", "--json", str(folder / "record.json"))
    (one,) = results(folder / "record.json")
    # Nine a layer, the embedding, the norm, the output and the rotary table.
    assert one["tensors"] == 9 * llama.SHAPES["tiny"].num_layers + 4
    assert all(0 < seconds < 60 for key, seconds in one.items() if key.endswith("_seconds"))


def test_scale(folder: Path) -> None:
    run("scale.py", "--shapes", "tiny", "--worlds", "2,4,8", "--json", str(folder / "scale.json"))
    ones = results(folder / "scale.json")
    with torch.device("meta"):
        whole = sum(parameter.numel() for parameter in llama.Llama(llama.SHAPES["tiny"]).parameters())
        table = llama.Llama(llama.SHAPES["tiny"]).rotary.numel()
    for one in ones:
        assert one["world"] * (one["elements"] - table) == pytest.approx(whole, rel=0.2)
        assert 4 * one["elements"] <= one["shard_bytes"] < 4.5 * one["elements"]
        assert one["extra_bytes"] is None or one["extra_bytes"] < 64 * 2**20
    assert [(one["layout"], one["world"]) for one in ones] == [
        (layout, world) for layout in ("fsdp2", "fsdp1") for world in (2, 4, 8)
    ]


def test_scale_takes_fewer_layers_or_says_why_not(tmp_path: Path) -> None:
    path = tmp_path / "scale.json"
    options = ["--shapes", "tiny", "--layouts", "fsdp2", "--json", str(path)]
    text = run("scale.py", *options, "--worlds", "1,8", "--max-gib", "0.0005")
    small, large = results(path)
    assert (small["num_layers"], small["all_layers"]) == (1, 3) and "1 of 3" in text
    assert large["num_layers"] == 3
    text = run("scale.py", *options, "--worlds", "1", "--max-gib", "0.0001")
    assert "skipped: not one layer fits" in text and "skipped" in results(path)[0]


def flat_shards(layout: str, copying: bool) -> list[torch.Tensor]:
    with shardinit.recording():
        # No size of it is a multiple of the 16 bytes to which FSDP1 aligns.
        model = llama.build(llama.LlamaConfig(6, 3, num_heads=3, hidden_dim=9, num_kv_heads=1, vocab_size=11))
    if copying:
        from torch.distributed.fsdp import FullyShardedDataParallel

        sharded = FullyShardedDataParallel(
            model,
            use_orig_params=True,
            auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, llama.Block),
            param_init_fn=param_init_fn(model, device="cpu", fill=False),
            device_id=torch.device("cpu"),
        )
    else:
        sharded = one_rank.SHARDERS[layout](model, list(model.layers))
    materialise_(sharded, "cpu")
    shardinit.init_model_(sharded, 3)
    return [piece.local.clone() for piece in locate(sharded).pieces]


def test_fsdp1_without_its_copies_has_the_shards_of_fsdp1() -> None:
    places = [(0, 3), (1, 3), (2, 3), (7, 8)]
    for ours, theirs in zip(
        run_places(flat_shards, places, "fsdp1", False), run_places(flat_shards, places, "fsdp1", True), strict=True
    ):
        assert len(ours) == len(theirs) > 30
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_small(folder: Path) -> None:
    run("small.py", "--tensors", "30", "--repeats", "1", "--json", str(folder / "small.json"))
    ones = results(folder / "small.json")
    assert {one["kind"] for one in ones} == {"batch", "call"}
    assert all(one["microseconds"] > 0 for one in ones)


def test_fill_and_boxes(folder: Path) -> None:
    text = run("fill.py", "--log2n", "10", "--seconds", "0.002", "--json", str(folder / "fill.json"))
    ones = results(folder / "fill.json")
    assert {one["log2n"] for one in ones} == {10}
    assert {one["distribution"] for one in ones} == {"normal", "uniform", "trunc_normal", "random_bits"}
    by_case = {(one["distribution"], one["dtype"], one["threads"], one["log2n"]): one for one in ones}
    assert by_case["normal", "fp32", 1, 10]["numpy"] > 0 and by_case["trunc_normal", "fp32", 1, 10]["numpy"] is None
    assert all(one["ours"] > 0 and one["fill_"] > 0 for one in ones)
    has_jax = any(one.get("jax") for one in ones)
    assert has_jax != ("not installed" in text)
    run("boxes.py", "--log2n", "13", "--seconds", "0.002", "--json", str(folder / "boxes.json"))
    assert len(results(folder / "boxes.json")) == 30


def test_broadcast(folder: Path) -> None:
    options = ["--models", "tiny", "--worlds", "2", "--repeats", "0", "--json", str(folder / "broadcast.json")]
    run("broadcast.py", *options)
    ones = results(folder / "broadcast.json")
    model = tiny()
    tensors = [*model.parameters(), *model.buffers()]
    state = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    for one in ones:
        assert one["backend"] == "gloo" and one["num_parameters"] == sum(p.numel() for p in model.parameters())
        if one["method"] in ("ours", "wrapping alone", "full init, slice"):
            assert one["collectives"] == one["sent_bytes"] == 0, one
        elif one["method"] == "rank 0, broadcast":
            # Rank 1 receives all; FSDP2's state_dict has the tied embedding twice, and metadata beside the tensors.
            more = 1.6 if one["layout"] == "fsdp2" else 1.01
            assert state <= one["sent_bytes"] < more * state, one
        assert one["equal"] is (None if one["method"] == "wrapping alone" else True), one
        assert one["trains"] is one["equal"], one
    assert len(ones) == 11


def test_pictures_of_what_was_measured(folder: Path) -> None:
    """Last: from the files of the tests above."""
    pytest.importorskip("matplotlib")
    for name in ("record", "scale", "small", "fill", "boxes", "broadcast"):
        if not (folder / f"{name}.json").exists():
            pytest.skip(f"the test that writes {name}.json was not run")
    written = run("plots.py", str(folder)).split()
    assert len(written) == 7
    for path in written:
        assert Path(path).read_bytes().startswith(b"\x89PNG") and Path(path).stat().st_size > 8000
    run("plots.py", str(folder / "nothing"), status=2)


def test_all_runs_what_is_asked_and_says_what_failed(tmp_path: Path) -> None:
    text = run("all.py", "--quick", "--only", "small", "--out", str(tmp_path))
    assert "us a tensor" in text and "us a tensor" in (tmp_path / "small.txt").read_text()
    assert (tmp_path / "small.json").exists()
    (tmp_path / "boxes.json").mkdir()
    text = run("all.py", "--quick", "--only", "boxes", "--out", str(tmp_path), status=1)
    assert "failed: boxes" in text
