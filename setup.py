"""A thin shell over CMakeLists.txt, the one native build."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        import pybind11

        source = Path(__file__).resolve().parent
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = Path(self.build_temp).resolve()
        # A cache of an earlier build names tools of pip's isolated environment, which is gone by now.
        shutil.rmtree(build, ignore_errors=True)
        build.mkdir(parents=True)
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
        ]
        subprocess.run(configure, cwd=build, check=True)
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        subprocess.run(["cmake", "--build", ".", "--target", "_native", "-j", jobs], cwd=build, check=True)


setup(ext_modules=[Extension("torch_shardinit._native", sources=[])], cmdclass={"build_ext": CMakeBuild})
