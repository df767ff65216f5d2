"""How setup.py looks for a CUDA compiler, and what SHARDINIT_CUDA forces."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import pytest

SETUP = Path(__file__).resolve().parents[1] / "setup.py"


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """setup.py's names, without an nvcc anywhere."""
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    names = runpy.run_path(str(SETUP))
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "SHARDINIT_CUDA", "LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "site"))
    return names


def compiler(folder: Path) -> Path:
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    return nvcc


def test_without_nvcc_the_cpu_kernels_alone(build: dict[str, Any]) -> None:
    assert build["find_nvcc"]() is None
    assert build["cuda_settings"]({}) == ["-DSHARDINIT_CUDA=OFF"]


@pytest.mark.parametrize("name", ["CUDACXX", "PATH", "CUDA_HOME", "CUDA_PATH"])
def test_nvcc_of_the_environment(
    build: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    nvcc = compiler(tmp_path / "toolkit")
    value = {"CUDACXX": nvcc, "PATH": nvcc.parent}.get(name, nvcc.parent.parent)
    monkeypatch.setenv(name, str(value))
    environment: dict[str, str] = {}
    assert build["cuda_settings"](environment) == [] and environment == {"CUDACXX": str(nvcc)}
    monkeypatch.setenv("SHARDINIT_CUDA", "1")
    assert build["cuda_settings"]({}) == ["-DSHARDINIT_CUDA=ON"]
    monkeypatch.setenv("SHARDINIT_CUDA", "0")
    assert build["cuda_settings"]({}) == ["-DSHARDINIT_CUDA=OFF"]


def test_nvcc_of_a_wheel_brings_its_libraries(
    build: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvcc = compiler(tmp_path / "site" / "nvidia" / "cu13")
    monkeypatch.setenv("LIBRARY_PATH", "elsewhere")
    environment: dict[str, str] = {}
    assert build["cuda_settings"](environment) == [f"-DCUDAToolkit_ROOT={nvcc.parent.parent}"]
    assert environment["LIBRARY_PATH"] == os.pathsep.join([str(nvcc.parent.parent / "lib"), "elsewhere"])


def test_what_is_forced_and_missing_is_an_error(build: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDINIT_CUDA", "1")
    with pytest.raises(SystemExit, match=r"SHARDINIT_CUDA=1: nvcc must be in .* found none"):
        build["cuda_settings"]({})
    monkeypatch.setenv("SHARDINIT_CUDA", "yes")
    with pytest.raises(SystemExit, match=r"SHARDINIT_CUDA must be 0 .* got 'yes'"):
        build["cuda_settings"]({})
