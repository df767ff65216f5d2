"""Fingerprints of checkpoints on disk, read as a stream: safetensors files and folders, and torch's distributed
checkpoints (DCP). No tensor is held in memory, whatever its size, but for DCP chunks that were stored with gaps."""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from . import region
from .digest import Sum, add_sums, digest_parts, dtype_text, extent, whole
from .fingerprint import Fingerprint, fingerprint_of
from .progress import Progress, to_stderr

CHUNK_BYTES = 1 << 24
_MOST_HEADER = 100 * 10**6  # as the format's own library allows

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


@dataclass
class Stored:
    """Some elements of a tensor in a file: the box at `offset` of `sizes`, row-major from byte `at` on."""

    path: Path
    at: int
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    dcp_length: int = 0  # DCP: of the torch.save archive that `at` is the beginning of


@dataclass
class StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[Stored] = field(default_factory=list)

    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Checkpoint:
    """skipped: names of entries that are no tensors."""

    tensors: dict[str, StoredTensor]
    skipped: list[str] = field(default_factory=list)


def _safetensors_file(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, _MOST_HEADER):
            raise ValueError(f"{path}: a safetensors file must begin with the length of its header, got {length}")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = [
                (name, one["dtype"], tuple(map(int, one["shape"])), *map(int, one["data_offsets"]))
                for name, one in header.items()
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: a safetensors header must be as the format has it: {error!r}") from None
    found = {}
    for name, code, shape, begin, end in entries:
        if code not in SAFETENSORS_DTYPES:
            raise ValueError(f"{path}: {name}: dtype must be one of {', '.join(SAFETENSORS_DTYPES)}, got {code!r}")
        tensor = StoredTensor(SAFETENSORS_DTYPES[code], shape)
        if not 0 <= begin <= end <= size - 8 - length or end - begin != tensor.num_bytes():
            raise ValueError(
                f"{path}: {name}: {list(shape)} of {code} must take {tensor.num_bytes()} bytes inside the file, got "
                f"[{begin}, {end}) of {size - 8 - length}"
            )
        tensor.parts.append(Stored(path, 8 + length + begin, (0,) * len(shape), shape))
        found[name] = tensor
    return found


def _safetensors_folder(folder: Path) -> dict[str, StoredTensor]:
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise ValueError(f"{folder}: one index of safetensors files is needed, got {[path.name for path in indices]}")
    files = sorted(folder.glob("*.safetensors"))
    found: dict[str, StoredTensor] = {}
    place: dict[str, str] = {}
    for path in files:
        for name, tensor in _safetensors_file(path).items():
            if name in found:
                raise ValueError(f"{folder}: {name} must be in one file, got it in {place[name]} and {path.name}")
            found[name], place[name] = tensor, path.name
    if indices:
        weight_map = json.loads(indices[0].read_text())["weight_map"]
        if weight_map != place:
            wrong = sorted({name for name, _ in weight_map.items() ^ place.items()})
            raise ValueError(f"{folder}: {indices[0].name} must list what the files hold; they differ in {wrong[:5]}")
    return found


def _dcp_folder(folder: Path) -> Checkpoint:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = FileSystemReader(folder).read_metadata()
    checkpoint = Checkpoint({})
    chunks: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in cast(dict, metadata.storage_data).items():
        chunks[index.fqn, tuple(index.offset or ())] = info
    for name, one in metadata.state_dict_metadata.items():
        if not isinstance(one, TensorStorageMetadata):
            checkpoint.skipped.append(name)
            continue
        tensor = checkpoint.tensors[name] = StoredTensor(one.properties.dtype, tuple(one.size))
        for chunk in one.chunks:
            offset, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            info = chunks.get((name, offset), chunks.get((name, ())) if not any(offset) else None)
            if info is None:
                raise ValueError(
                    f"{folder}: {name}: each chunk must be in a file, got one at {list(offset)} that is not"
                )
            if getattr(info, "transform_descriptors", None):
                raise ValueError(
                    f"{folder}: {name}: chunks must be stored as they are, got {info.transform_descriptors}"
                )
            tensor.parts.append(Stored(folder / info.relative_path, info.offset, offset, sizes, info.length))
    return checkpoint


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """What a safetensors file, a folder of them or a DCP folder holds; no tensor is read.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: it is none of these, or damaged; the message says what must hold.
    """
    where = Path(path)
    if where.is_dir():
        if (where / ".metadata").exists():
            return _dcp_folder(where)
        if any(where.glob("*.safetensors")):
            return Checkpoint(_safetensors_folder(where))
    elif where.exists():
        return Checkpoint(_safetensors_file(where))
    else:
        raise FileNotFoundError(f"{where}: no such file or folder")
    raise ValueError(
        f"{where}: a checkpoint must be a safetensors file, a folder of them, or a DCP folder with its .metadata"
    )


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self.file, self.begin, self.length, self.position = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = offset + {0: 0, 1: self.position, 2: self.length}[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self.length - self.position)]
        self.file.seek(self.begin + self.position)
        count = self.file.readinto(view)  # type: ignore[attr-defined]
        self.position += count
        return count


def _dcp_data(part: Stored, file: BinaryIO, dtype: torch.dtype) -> int | torch.Tensor:
    """Where the row-major elements of a chunk begin in its file; or the chunk, where they are not so."""
    archive = io.BufferedReader(_Slice(file, part.at, part.dcp_length))
    shell = torch.load(archive, map_location="meta", weights_only=True)
    if tuple(shell.shape) != part.sizes or shell.dtype != dtype:
        raise ValueError(
            f"{part.path}: a chunk must be {dtype} {list(part.sizes)} as .metadata has it, got {shell.dtype} "
            f"{list(shell.shape)}"
        )
    archive.seek(0)
    with zipfile.ZipFile(archive) as members:
        data = [member for member in members.infolist() if "/data/" in member.filename]
        order = [members.read(name) for name in members.namelist() if name.endswith("/byteorder")]
    if (
        shell.is_contiguous()
        and len(data) == 1
        and data[0].compress_type == zipfile.ZIP_STORED
        and order == [b"little"]
    ):
        # The local header: 30 bytes, of which the last four are the lengths of the name and the padding behind it.
        archive.seek(data[0].header_offset + 26)
        lengths = archive.read(4)
        begin = (
            data[0].header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        )
        return part.at + begin + shell.storage_offset() * dtype.itemsize
    archive.seek(0)
    return cast(torch.Tensor, torch.load(archive, map_location="cpu", weights_only=True))


def _sum_of_part(part: Stored, tensor: StoredTensor, buffer: torch.Tensor, progress: Progress) -> Sum:
    numel, size = math.prod(part.sizes), tensor.dtype.itemsize
    if not numel:
        return 0
    with open(part.path, "rb") as file:
        at: int | torch.Tensor = part.at
        if part.dcp_length:
            at = _dcp_data(part, file, tensor.dtype)
        if isinstance(at, torch.Tensor):
            progress.add(numel * size)
            return digest_parts([(at, part.offset, tensor.shape)])[0]
        file.seek(at)
        sums = []
        step = buffer.numel() // size
        raw = buffer.numpy().data
        for start in range(0, numel, step):
            count = min(step, numel - start)
            if file.readinto(raw[: count * size]) != count * size:
                raise ValueError(f"{part.path}: the file must hold {count * size} more bytes, but ends")
            values = buffer[: count * size].view(tensor.dtype)
            sums += digest_parts(list(_boxes(values, part, start, tensor.shape)))
            progress.add(count * size)
        return add_sums(sums)


def _boxes(
    values: torch.Tensor, part: Stored, start: int, shape: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]]:
    """The elements start, start + 1, ... of a part's box, as boxes of the tensor."""
    at = 0
    for box in region.boxes_of_run(part.sizes, start, values.numel()):
        count = region.numel(box)
        corner = tuple(first + s.start for first, s in zip(part.offset, box, strict=True))
        yield values[at : at + count].view([s.size for s in box]), corner, shape
        at += count


def _check_parts(name: str, tensor: StoredTensor) -> None:
    extents = [extent(region.box_at(part.offset, part.sizes), tensor.shape) for part in tensor.parts]
    if (sum(n for n, _ in extents), sum(m for _, m in extents) % 2**64) != whole(tensor.shape):
        raise ValueError(
            f"{name}: the chunks must make up a tensor of shape {list(tensor.shape)} once, got "
            f"{[(list(part.offset), list(part.sizes)) for part in tensor.parts[:5]]}"
        )


def fingerprint_checkpoint(
    path: str | os.PathLike[str], *, prefix: str = "", quiet: bool = True
) -> tuple[Fingerprint, list[str]]:
    """The fingerprint of a checkpoint, and the names of its entries that are no tensors, which do not count.

    Args:
        path: see open_checkpoint.
        prefix: only names that begin with it count, without it ("model." for a checkpoint of {"model": ...}).
        quiet: False shows progress on stderr.

    Memory: a buffer of 16 MiB beside what names and shapes take.
    """
    checkpoint = open_checkpoint(path)
    tensors = {name.removeprefix(prefix): one for name, one in checkpoint.tensors.items() if name.startswith(prefix)}
    if prefix and not tensors:
        raise ValueError(f"{path}: some name must begin with {prefix!r}, got {list(checkpoint.tensors)[:5]}")
    progress = to_stderr("read", sum(one.num_bytes() for one in tensors.values()), quiet)
    buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    sums = {}
    for name, one in tensors.items():
        _check_parts(name, one)
        total = add_sums(_sum_of_part(part, one, buffer, progress) for part in one.parts)
        sums[name] = (dtype_text(one.dtype), one.shape, total)
    progress.close()
    return fingerprint_of(sums), checkpoint.skipped
