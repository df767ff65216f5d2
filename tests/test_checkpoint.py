"""Fingerprints of checkpoints, resharded checkpoints, exported seed checkpoints, and the commands for them."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import torch_shardinit as shardinit
from torch_shardinit import checkpoint as checkpoint_module
from torch_shardinit import export as export_module
from torch_shardinit.checkpoint import SAFETENSORS_DTYPES, fingerprint_checkpoint, open_checkpoint
from torch_shardinit.cli import main
from torch_shardinit.export import export
from torch_shardinit.verify_processes import run_gloo

SEED = 5
CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}


class Net(nn.Module):
    """A tie, a padding row, a scalar, a table that is persistent and one that is not, a second dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(301, 24, padding_idx=0)
        self.head = nn.Linear(24, 301, bias=False)
        self.head.weight = self.embedding.weight
        self.body = nn.Linear(24, 24)
        self.narrow = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("table", torch.arange(10.0).cos())
        self.register_buffer("cache", torch.arange(4.0), persistent=False)
        self.register_buffer("empty", torch.zeros(0, 3))
        nn.init.trunc_normal_(self.body.weight, std=0.02)


def net() -> Net:
    with shardinit.recording():
        model = Net()
    return model


def live() -> Net:
    model = net()
    shardinit.init_model_(model, SEED, device="cpu")
    return model


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    header, at = {}, 0
    for name, one in tensors.items():
        end = at + one.numel() * one.element_size()
        header[name] = {"dtype": CODES[one.dtype], "shape": list(one.shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    data = b"".join(bytes(one.contiguous().reshape(-1).view(torch.uint8).numpy()) for one in tensors.values())
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


@pytest.fixture(params=[1 << 25, 192], ids=["whole", "in-parts"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Buffers that hold every tensor of these tests, and ones that end inside a row."""
    monkeypatch.setattr(checkpoint_module, "CHUNK_BYTES", request.param)
    monkeypatch.setattr(export_module, "CHUNK_BYTES", request.param)
    return request.param


def test_safetensors_of_every_dtype(tmp_path: Path, chunk: int) -> None:
    torch.manual_seed(1)
    tensors = {
        f"t{k}": torch.randint(0, 2, (5, 3, 17), dtype=torch.uint8)
        if dtype is torch.bool
        else torch.randint(-128, 127, (5, 3, 17 * dtype.itemsize), dtype=torch.int8)
        for k, dtype in enumerate(CODES)
    }
    tensors = {name: one.view(dtype) for (name, one), dtype in zip(tensors.items(), CODES, strict=True)}
    write_safetensors(tmp_path / "all.safetensors", tensors)
    found, skipped = fingerprint_checkpoint(tmp_path / "all.safetensors")
    assert found == shardinit.fingerprint(tensors) and not skipped
    assert found.kinds["t1"] == ("float32", (5, 3, 17))


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_an_exported_checkpoint_is_the_live_model(
    tmp_path: Path, chunk: int, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "FILE_BYTES", 20_000)
    plan = shardinit.record(net())
    plan.export(tmp_path / "out", SEED, format=format)
    want = shardinit.fingerprint(live())
    assert "cache" not in want.tensors and want.tensors["head.weight"] == want.tensors["embedding.weight"]
    assert fingerprint_checkpoint(tmp_path / "out")[0] == want
    if format == "safetensors":
        assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
        weight_map = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
        assert set(weight_map) == set(want.tensors)
        for one in open_checkpoint(tmp_path / "out").tensors.values():
            assert one.parts[0].at % one.dtype.itemsize == 0, "a mapped file's tensors must be aligned"
    else:
        state = {name: torch.empty_like(one) for name, one in live().state_dict().items()}
        dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
        assert shardinit.fingerprint(state) == want
        fresh = Net()
        fresh.load_state_dict(state)
        assert shardinit.fingerprint(fresh) == want
    other = tmp_path / "other"
    plan.export(other, SEED + 1, format=format)
    assert fingerprint_checkpoint(other)[0] != want


def test_dcp_with_gaps_nested_names_and_bytes(tmp_path: Path, chunk: int) -> None:
    state = {"model": {"a": torch.randn(9, 8).t(), "b": torch.randn(5)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    found, skipped = fingerprint_checkpoint(tmp_path / "c", prefix="model.")
    assert found == shardinit.fingerprint(state["model"]) and skipped == ["step"]
    assert fingerprint_checkpoint(tmp_path / "c")[0] == shardinit.fingerprint({"model": state["model"]})
    with pytest.raises(ValueError, match=r"some name must begin with 'other\.'"):
        fingerprint_checkpoint(tmp_path / "c", prefix="other.")


# ---- the recipe: a resharded checkpoint is the same


def _saved_by(rank: int, world: int, folder: str) -> list[str]:
    model = net()
    fully_shard(model.body)
    fully_shard(model)
    shardinit.init_model_(model, SEED, device="cpu")
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/fsdp2")
    with shardinit.recording():
        flat = nn.Sequential(nn.Linear(13, 11), nn.Linear(11, 5))
    flat = FullyShardedDataParallel(
        flat,
        param_init_fn=shardinit.param_init_fn(flat, seed=SEED),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    with FullyShardedDataParallel.state_dict_type(flat, torch.distributed.fsdp.StateDictType.SHARDED_STATE_DICT):
        dcp.save(flat.state_dict(), checkpoint_id=f"{folder}/fsdp1")
    return [shardinit.fingerprint(model).digest, shardinit.fingerprint(flat).digest]


def _loaded_by(rank: int, world: int, folder: str) -> str:
    model = net()
    fully_shard(model)
    model.to_empty(device="cpu")
    model.head.weight = model.embedding.weight  # Module.to_empty takes ties apart
    state = model.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/fsdp2")
    model.load_state_dict(state)
    return shardinit.fingerprint(model).digest


def test_a_checkpoint_of_two_ranks_loaded_by_three(tmp_path: Path) -> None:
    saved = run_gloo(_saved_by, 2, str(tmp_path), limit=100)
    assert saved[0] == saved[1] and saved[0][0] == shardinit.fingerprint(live()).digest
    assert [fingerprint_checkpoint(tmp_path / name)[0].digest for name in ("fsdp2", "fsdp1")] == saved[0]
    assert set(run_gloo(_loaded_by, 3, str(tmp_path), limit=100)) == {saved[0][0]}


# ---- errors


def test_error_of_a_damaged_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": torch.zeros(3)})
    good = path.read_bytes()
    for raw, message in [
        (b"", "must begin with the length of its header"),
        (b"\xff" * 20, "must begin with the length of its header"),
        (good[:8] + b"x" + good[9:], "header must be as the format has it"),
        (good[:-1], r"a: \[3\] of F32 must take 12 bytes inside the file"),
        (good.replace(b'"shape": [3]', b'"shape": [4]'), r"a: \[4\] of F32 must take 16 bytes"),
        (good.replace(b"F32", b"F77"), r"a: dtype must be one of F64, .*got 'F77'"),
    ]:
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=message):
            fingerprint_checkpoint(path)


def test_error_of_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        open_checkpoint(tmp_path / "missing")
    with pytest.raises(ValueError, match="a checkpoint must be a safetensors file"):
        open_checkpoint(tmp_path)
    write_safetensors(tmp_path / "a.safetensors", {"a": torch.zeros(3)})
    write_safetensors(tmp_path / "b.safetensors", {"a": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"a must be in one file, got it in a\.safetensors and b\.safetensors"):
        open_checkpoint(tmp_path)
    write_safetensors(tmp_path / "b.safetensors", {"b": torch.zeros(3)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "c": "b.safetensors"}}))
    with pytest.raises(ValueError, match=r"must list what the files hold; they differ in \['b', 'c'\]"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    assert set(open_checkpoint(tmp_path).tensors) == {"a", "b"}


def test_error_of_a_truncated_dcp_folder(tmp_path: Path) -> None:
    dcp.save({"a": torch.randn(1000)}, checkpoint_id=tmp_path, no_dist=True)
    data = next(tmp_path.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:2000])
    with pytest.raises((ValueError, RuntimeError)):
        fingerprint_checkpoint(tmp_path)


def test_error_export(tmp_path: Path) -> None:
    with shardinit.recording():
        model = nn.Linear(3, 3)
        model.extra = nn.Parameter(torch.empty(2))
    plan = shardinit.record(model)
    with pytest.raises(shardinit.UninitializedError, match=r"export: .* 1 tensors: extra \(nothing wrote it\)"):
        export(plan, tmp_path / "out", SEED)
    assert not (tmp_path / "out").exists()
    export(plan, tmp_path / "out", SEED, keep=["extra"])
    assert set(fingerprint_checkpoint(tmp_path / "out")[0].tensors) == {"weight", "bias"}
    with pytest.raises(FileExistsError, match="must be an empty folder"):
        export(plan, tmp_path / "out", SEED, keep=["extra"])
    with pytest.raises(ValueError, match="format must be one of dcp, safetensors, got 'zip'"):
        export(plan, tmp_path / "zip", SEED, format="zip")
    with shardinit.recording():
        model = nn.Module()
        model.register_buffer("z", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"z: safetensors has no dtype torch\.complex128"):
        export(shardinit.record(model), tmp_path / "z", SEED, format="safetensors")


# ---- commands


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "seed"
    assert main(["export", "--model", "test_checkpoint:Net", "--seed", str(SEED), "--out", str(out), "--quiet"]) == 0
    want = shardinit.fingerprint(live())
    assert capsys.readouterr().out.strip() == want.digest
    text = tmp_path / "yesterday.json"
    arguments = ["fingerprint", "--checkpoint", str(out), "--json", str(text), "--expect", want.digest]
    assert main(arguments) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"{want.digest}  {len(want.tensors)} tensors" and len(shown) == 1 + len(want.tensors)
    assert shardinit.Fingerprint.from_json(text.read_text()) == want
    assert main(["fingerprint", "--checkpoint", str(out), "--brief", "--expect", "0" * 32]) == 1
    captured = capsys.readouterr()
    assert captured.out.strip() == want.digest and f"must be {'0' * 32}, got {want.digest}" in captured.err
    assert main(["diff", str(out), str(text)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    changed = dict(live().state_dict())
    changed["body.bias"] = changed["body.bias"].clone()
    changed["body.bias"].view(torch.int32)[3] ^= 1
    del changed["scale"]
    changed["table"] = changed["table"].double()
    write_safetensors(tmp_path / "changed.safetensors", changed)
    assert main(["diff", str(text), str(tmp_path / "changed.safetensors"), "--quiet"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "- scale: only in the first"
    assert lines[1].startswith("! body.bias: values, ") and lines[2] == "! table: dtype float32 and float64"
    assert main(["diff", str(text), str(tmp_path / "missing")]) == 2
    assert "diff: " in capsys.readouterr().err
    assert main(["export", "--model", "test_checkpoint:Net", "--seed", "1", "--out", str(out), "--quiet"]) == 2
    assert "must be an empty folder" in capsys.readouterr().err


_MEMORY = """
import resource, sys, torch
import torch_shardinit as shardinit
from torch_shardinit.checkpoint import fingerprint_checkpoint
torch.set_num_threads(1)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
with shardinit.recording():
    layers = [torch.nn.Linear(2048, 2048, bias=False) for _ in range(12)]  # 16 MiB each
    model = torch.nn.Sequential(torch.nn.Linear(8192, 8192, bias=False), *layers)  # 256 MiB, and 192
plan = shardinit.record(model)
with shardinit.recording():
    small = torch.nn.Linear(8, 8)
shardinit.record(small).export(sys.argv[1] + "/small", 1, format=sys.argv[2])
fingerprint_checkpoint(sys.argv[1] + "/small")
before = peak()
plan.export(sys.argv[1] + "/big", 1, format=sys.argv[2])
fingerprint_checkpoint(sys.argv[1] + "/big")
print(peak() - before)
"""


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_memory_is_bounded(tmp_path: Path, format: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(tmp_path), format], capture_output=True, text=True, timeout=120, check=True
    )
    assert float(done.stdout) < 128, "MiB beyond what a small model takes, for 448"
