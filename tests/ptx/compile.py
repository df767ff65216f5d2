"""CUDA source to PTX text, with whatever nvcc this machine has. Nothing that it builds runs here."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

_CACHE = Path(__file__).resolve().parents[2] / "build" / "ptx"
_HEADER_SUFFIXES = (".h", ".cuh", ".hpp", ".cu")


def find_nvcc() -> Path | None:
    """From CUDACXX, PATH, CUDA_HOME or CUDA_PATH, or the wheels of PyPI (site-packages/nvidia/*/bin)."""
    named = os.environ.get("CUDACXX")
    if named and shutil.which(named):
        return Path(shutil.which(named) or named)
    on_path = shutil.which("nvcc")
    if on_path:
        return Path(on_path)
    roots = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        roots.extend(sorted(Path(site).glob("nvidia/*")))
    for root in roots:
        candidate = root / "bin" / "nvcc"
        if os.access(candidate, os.X_OK):
            return candidate
    return None


needs_nvcc = pytest.mark.skipif(
    find_nvcc() is None, reason="no nvcc: looked at CUDACXX, PATH, CUDA_HOME, CUDA_PATH and PyPI's nvidia wheels"
)


@functools.cache
def _version(nvcc: Path) -> str:
    return subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout


def compile_to_ptx(source: Path | str, arch: str, flags: Sequence[str] = (), include: Sequence[Path] = ()) -> str:
    """PTX of a .cu file, or of CUDA source text, for an architecture such as "sm_90".

    flags go to nvcc as they are; include are folders of headers. The text is kept under build/ptx, by the content of
    the source, of all headers in `include`, the flags and nvcc's version. Raises RuntimeError with nvcc's words if it
    fails.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("nvcc was not found; mark the test needs_nvcc")
    text = source.read_text() if isinstance(source, Path) else source
    folders = [*include, *([source.parent] if isinstance(source, Path) else [])]
    digest = hashlib.sha256()
    for piece in (_version(nvcc), arch, *flags, text):
        digest.update(piece.encode() + b"\0")
    for directory in folders:
        for header in sorted(directory.iterdir()):
            if header.suffix in _HEADER_SUFFIXES:
                digest.update(header.name.encode() + b"\0" + header.read_bytes() + b"\0")
    kept = _CACHE / f"{digest.hexdigest()[:32]}.ptx"
    if not kept.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
            cu = Path(folder) / "source.cu"
            cu.write_text(text)
            ptx = Path(folder) / "out.ptx"
            command = [
                str(nvcc),
                "-std=c++17",
                "-ptx",
                f"-arch={arch.replace('sm_', 'compute_')}",
                *flags,
                *(f"-I{path}" for path in folders),
                "-o",
                str(ptx),
                str(cu),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
            os.replace(ptx, kept)
    return kept.read_text()
