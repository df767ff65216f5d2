"""The square root of the CUDA kernels is exact for every seed within 8 units: tried for all of them, on the CPU."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = """
#include <cmath>
#include "numeric.h"
using namespace shardinit;
// Wrong roots among all mantissas of an exponent's parity; seeds are the nearest to 1/sqrt(x), shifted.
extern "C" long wrong_roots(int parity, int shift, float scale) {
  long wrong = 0;
  for (uint32_t i = 0; i < 1u << 23; ++i) {
    const float x = float_of_bits((parity ? 0x40000000u : 0x3f800000u) | i);
    const float seed = float_of_bits(bits_of(static_cast<float>(1.0 / std::sqrt(static_cast<double>(x)))) + shift);
    wrong += sqrt_from_seed(x * scale * scale, seed / scale) != std::sqrt(x) * scale;
  }
  return wrong;
}
"""


def test_ptx_sqrt_of_every_mantissa_and_seed(tmp_path: Path) -> None:
    source, library = tmp_path / "sqrt.cpp", tmp_path / "sqrt.so"
    source.write_text(SOURCE)
    flags = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC"]
    soft = ROOT / "csrc" / "soft_fma.cpp"
    subprocess.run(["g++", *flags, f"-I{ROOT / 'csrc'}", source, soft, "-o", library], check=True)
    wrong_roots = ctypes.CDLL(str(library)).wrong_roots
    wrong_roots.restype = ctypes.c_long
    wrong_roots.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_float]
    for parity in (0, 1):
        for shift in range(-8, 9):
            assert wrong_roots(parity, shift, 1.0) == 0, (parity, shift)
        # The ends of the range that the kernels need are as good as its middle, being powers of four away.
        assert wrong_roots(parity, 8, 2.0**-30) == 0 and wrong_roots(parity, -8, 2.0**29) == 0
    assert wrong_roots(0, 5000, 1.0) > 0, "a seed too far away must be seen"
