"""Seed checkpoints without a model in memory: a Plan's values written shard by shard."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from . import region
from .apply import check_patterns, matches
from .checkpoint import SAFETENSORS_DTYPES
from .errors import UninitializedError
from .plan import Entry, Plan
from .program import Exact, Unwritten
from .progress import Progress, to_stderr
from .stream import resolve_seed

CHUNK_BYTES = 1 << 24
FILE_BYTES = 5 * 10**9  # of a safetensors file, about
FORMATS = ("dcp", "safetensors")

_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}


def _num_bytes(entry: Entry) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize


def _entries(plan: Plan, keep: Sequence[str]) -> list[tuple[str, Entry]]:
    """(name, entry) for each name of what a state dict holds, tied names apart."""
    unwritten = {}
    found = []
    for entry in plan.entries.values():
        if not entry.persistent or matches(entry.aliases, keep):
            continue
        if isinstance(entry.program, Unwritten) and 0 not in entry.shape:
            unwritten[entry.name] = "it keeps the value it had" if entry.kept else entry.program.describe()
        found += [(alias, entry) for alias in entry.aliases]
    if unwritten:
        listed = "; ".join(f"{name} ({reason})" for name, reason in sorted(unwritten.items()))
        raise UninitializedError(
            f"export: no recorded code initialises {len(unwritten)} tensors: {listed}. Build the model inside "
            "recording(), pass an init_fn that writes them, or name them in keep= to leave them out."
        )
    return sorted(found, key=lambda one: one[0])


class _Source:
    """The values of a plan's tensors, a part at a time; a tensor that is played is evaluated once, whole."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan, self.seed = plan, seed
        self.played: tuple[str, torch.Tensor] | None = None

    def run(self, entry: Entry, start: int, out: torch.Tensor) -> torch.Tensor:
        """The row-major elements from `start` on, in `out`, which is 1-D."""
        if isinstance(entry.program, Exact):
            return self.plan.fill_(entry.name, out, offset=start, seed=self.seed)
        if self.played is None or self.played[0] != entry.name:
            self.played = None  # dropped before the next is made
            full = torch.empty(entry.shape, dtype=entry.dtype)
            self.plan.fill_(entry.name, full, seed=self.seed)
            self.played = entry.name, full.reshape(-1)
        out.copy_(self.played[1][start : start + out.numel()])
        return out


def _runs(entry: Entry) -> Iterator[tuple[int, int]]:
    numel, step = math.prod(entry.shape), CHUNK_BYTES // entry.dtype.itemsize
    for start in range(0, numel, step):
        yield start, min(step, numel - start)


# ---- safetensors


def _files(entries: list[tuple[str, Entry]]) -> list[list[tuple[str, Entry]]]:
    files: list[list[tuple[str, Entry]]] = [[]]
    size = 0
    for name, entry in entries:
        if files[-1] and size + _num_bytes(entry) > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append((name, entry))
        size += _num_bytes(entry)
    return files


def _write_safetensors(
    folder: Path, entries: list[tuple[str, Entry]], source: _Source, metadata: dict[str, str], progress: Progress
) -> None:
    # Wide types first, so that every tensor of a mapped file is aligned.
    entries = sorted(entries, key=lambda one: -one[1].dtype.itemsize)
    files = _files(entries)
    names = [f"model-{k + 1:05}-of-{len(files):05}.safetensors" for k in range(len(files))]
    names = ["model.safetensors"] if len(files) == 1 else names
    buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    for file_name, held in zip(names, files, strict=True):
        header: dict[str, Any] = {"__metadata__": metadata}
        at = 0
        for name, entry in held:
            end = at + _num_bytes(entry)
            header[name] = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, end]}
            at = end
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with open(folder / file_name, "wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for _, entry in held:
                for start, count in _runs(entry):
                    part = buffer[: count * entry.dtype.itemsize]
                    source.run(entry, start, part.view(entry.dtype))
                    file.write(part.numpy().data)
                    progress.add(part.numel())
    if len(files) > 1:
        total = sum(_num_bytes(entry) for _, entry in entries)
        weight_map = {name: file for file, held in zip(names, files, strict=True) for name, _ in held}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
        (folder / "model.safetensors.index.json").write_text(text + "\n")


# ---- DCP


def _write_dcp(folder: Path, entries: list[tuple[str, Entry]], source: _Source, progress: Progress) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

    entry_of = dict(entries)
    buffer = bytearray(CHUNK_BYTES)

    class Planner(SavePlanner):
        """Chunks that are made when the writer asks for them."""

        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            pass

        def create_local_plan(self) -> SavePlan:
            items = []
            for name, entry in entries:
                boxes = [box for start, count in _runs(entry) for box in region.boxes_of_run(entry.shape, start, count)]
                for box in boxes or [region.full_box(entry.shape)]:
                    offset = torch.Size(s.start for s in box)
                    chunk = ChunkStorageMetadata(offsets=offset, sizes=torch.Size(s.size for s in box))
                    data = TensorWriteData(chunk, TensorProperties(dtype=entry.dtype), torch.Size(entry.shape))
                    items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
            return SavePlan(items)

        def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
            return create_default_global_save_plan(all_plans)

        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            return new_plan

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
            entry = entry_of[write_item.index.fqn]
            assert write_item.tensor_data is not None
            chunk = write_item.tensor_data.chunk
            # One buffer for all: the writer has written the chunk before this one, though it holds on to one of each
            # tensor (torch 2.13). By frombuffer, for the writer copies what is smaller than its storage.
            numel = math.prod(chunk.sizes)
            flat = torch.frombuffer(buffer, dtype=entry.dtype, count=numel) if numel else torch.empty(0)
            out = flat.to(entry.dtype).view(chunk.sizes)
            if out.numel():
                # A chunk is one run of the tensor, since it is a box of a run that boxes_of_run has cut.
                strides = region.row_major_strides(entry.shape)
                start = sum(first * stride for first, stride in zip(chunk.offsets, strides, strict=True))
                source.run(entry, start, out.view(-1))
            progress.add(out.numel() * entry.dtype.itemsize)
            return out

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it should be
        # No copying ahead: one chunk is asked for when the one before is written.
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        dcp.save({}, storage_writer=writer, planner=Planner(), no_dist=True)


def export(
    plan: Plan,
    path: str | os.PathLike[str],
    seed: int | None = None,
    *,
    format: str = "dcp",
    keep: Sequence[str] = (),
    quiet: bool = True,
) -> None:
    """Writes the initial weights that a Plan gives the unsharded model, without the model: what its state_dict would
    hold, tied tensors under each of their names, in the recorded dtypes. Its fingerprint is the live model's.

    Args:
        path: a folder, made where it is missing; it must be empty.
        seed: as for init_model_.
        format: "dcp" (torch.distributed.checkpoint, one file) or "safetensors" (files of 5 GB and an index).
        keep: glob patterns of tensors to leave out.
        quiet: False shows progress on stderr.

    Memory: some chunks of 16 MiB; tensors that are played (not exact) are held whole, one at a time.

    Raises:
        UninitializedError: nothing writes some tensors; it names all of them.
        FileExistsError: the folder is not empty.
        ValueError: safetensors has no such dtype.
    """
    if format not in FORMATS:
        raise ValueError(f"export: format must be one of {', '.join(FORMATS)}, got {format!r}")
    entries = _entries(plan, check_patterns(keep))
    if format == "safetensors":
        for name, entry in entries:
            if entry.dtype not in _CODES:
                raise ValueError(f"export: {name}: safetensors has no dtype {entry.dtype}; use the format dcp")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"export: {folder} must be an empty folder or none")
    key = resolve_seed(seed, warn_for="export")
    source = _Source(plan, key)
    progress = to_stderr("written", sum(_num_bytes(entry) for _, entry in entries), quiet)
    if format == "dcp":
        _write_dcp(folder, entries, source, progress)
    else:
        metadata = {"format": "pt", "torch_shardinit": f"stream {plan.stream_version}, seed {key}"}
        _write_safetensors(folder, entries, source, metadata, progress)
    progress.close()
