"""What our kernels are made of: their PTX audited for each architecture, their SASS held to limits."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from ptx import inspect
from ptx.compile import needs_nvcc
from ptx_fills import ARCHITECTURES, FLAGS, ptx_text

pytestmark = needs_nvcc
ROOT = Path(__file__).resolve().parents[1]


def declared(suffix: str) -> set[str]:
    """The kernels that launch.h lists."""
    text = (ROOT / "csrc" / "launch.h").read_text()
    block = text.partition(f"#define SHARDINIT_{suffix}_KERNELS(X)")[2].partition("\n\n")[0]
    return {f"shardinit_{suffix.lower()}_{name}" for name in re.findall(r"X\((\w+),", block)}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_ptx_uses_only_operations_of_one_meaning(arch: str) -> None:
    found = inspect(ptx_text(arch))
    assert found.violations == []
    assert set(found.opcodes) == declared("RUN") | declared("GRID") and len(found.opcodes) == 40
    for kernel, opcodes in found.opcodes.items():
        approximate = {opcode for opcode in opcodes if ".approx" in opcode or ".ftz" in opcode}
        assert approximate <= {"rsqrt.approx.ftz.f32"}, kernel
        if kernel.endswith("_f32") or kernel in ("shardinit_run_bits32", "shardinit_grid_normal_32"):
            assert found.stores_128_bits(kernel), f"{kernel} must store a block's 16 bytes at once"
        if kernel.endswith("_bf16"):
            assert opcodes["st.global.v2.b32"] > 0
            assert ("cvt.rn.bf16x2.f32" in opcodes) == (arch != "sm_75")  # which has none
        assert not any(".local" in opcode or ".shared" in opcode for opcode in opcodes)
    assert "rsqrt.approx.ftz.f32" in found.opcodes["shardinit_run_normal_f32"]


def test_ptx_is_compiled_as_the_extension_is() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    for flag in ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"):
        assert flag in text and flag in FLAGS
    assert "--default-stream=legacy" in text and "use_fast_math" not in text


def test_ptx_sass_within_limits() -> None:
    """bench/count_sass.py: instructions per element, registers, spills."""
    wheels = Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/cuobjdump")
    if not (shutil.which("cuobjdump") or any(wheels)):
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    script = ROOT / "bench" / "count_sass.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^normal_f32 +3[0-3]\.\d+ ", done.stdout, re.MULTILINE)
