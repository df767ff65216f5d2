"""A thin shell over CMakeLists.txt, the one native build."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


def find_nvcc() -> Path | None:
    """From CUDACXX, PATH, CUDA_HOME or CUDA_PATH, or PyPI's wheels, which pip's isolation hides but leaves in place."""
    for name in (os.environ.get("CUDACXX"), "nvcc"):
        found = shutil.which(name) if name else None
        if found:
            return Path(found)
    roots = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for site in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        roots.extend(sorted(Path(site).glob("nvidia/cu*")))
    for root in roots:
        if os.access(root / "bin" / "nvcc", os.X_OK):
            return root / "bin" / "nvcc"
    return None


def cuda_settings(environment: dict[str, str]) -> list[str]:
    """CMake's options; what nvcc needs goes into the environment. SHARDINIT_CUDA=0 or 1 forces."""
    wish = os.environ.get("SHARDINIT_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"SHARDINIT_CUDA must be 0 (CPU only), 1 (an error without nvcc) or unset, got {wish!r}")
    nvcc = None if wish == "0" else find_nvcc()
    if nvcc is None:
        if wish == "1":
            raise SystemExit(
                "SHARDINIT_CUDA=1: nvcc must be in CUDACXX, PATH, CUDA_HOME/bin or CUDA_PATH/bin, or installed with "
                "pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl nvidia-nvvm; "
                "found none"
            )
        return ["-DSHARDINIT_CUDA=OFF"]
    environment["CUDACXX"] = str(nvcc)
    settings = ["-DSHARDINIT_CUDA=ON"] if wish == "1" else []
    root = nvcc.parent.parent
    if root.parent.name == "nvidia":  # a wheel: its libraries lie where no linker looks
        settings.append(f"-DCUDAToolkit_ROOT={root}")
        environment["LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(root / "lib"), os.environ.get("LIBRARY_PATH")]))
    return settings


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        import pybind11

        source = Path(__file__).resolve().parent
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = Path(self.build_temp).resolve()
        # A cache of an earlier build names tools of pip's isolated environment, which is gone by now.
        shutil.rmtree(build, ignore_errors=True)
        build.mkdir(parents=True)
        environment = dict(os.environ)
        configure = [
            "cmake",
            str(source),
            "-GNinja",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DPYTHON_EXECUTABLE={sys.executable}",
            f"-DPython_INCLUDE_DIR={sysconfig.get_path('include')}",
            *cuda_settings(environment),
        ]
        subprocess.run(configure, cwd=build, check=True, env=environment)
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        subprocess.run(
            ["cmake", "--build", ".", "--target", "_native", "-j", jobs], cwd=build, check=True, env=environment
        )


setup(ext_modules=[Extension("torch_shardinit._native", sources=[])], cmdclass={"build_ext": CMakeBuild})
