"""PTX that nvcc emits, in the interpreter, beside NumPy: none of our library takes part."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_bitwise_equal
from ptx import Memory, MemoryFault, Misaligned, Module, PtxError, audit, inspect
from ptx import compile as ptx_compile
from ptx.compile import compile_to_ptx, find_nvcc, needs_nvcc

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
GRIDS = [(1, 32), (7, 96), (132, 256), ((2, 1, 1), (8, 4, 1))]
BASE = 0x7F12_3456_7000

# Words of Philox4x32-10: a scalar head up to the first aligned address, blocks of four words by 16-byte stores in a
# grid-stride loop, a scalar tail. Then floats made of them, with a division, a square root and a branch per element.
SOURCE = r"""
#include <cstdint>

struct Params {
  uint32_t* out;
  float* floats;
  uint64_t numel;
  uint64_t first;
  uint32_t key[2];
  int64_t divisor;
};

__device__ uint4 block_of(const Params& p, uint64_t counter) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = p.key[0], k1 = p.key[1];
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

__device__ uint32_t word_of(const Params& p, uint64_t i) {
  const uint4 b = block_of(p, i / 4);
  const uint32_t lane = i & 3;
  return lane == 0 ? b.x : lane == 1 ? b.y : lane == 2 ? b.z : b.w;
}

__device__ uint64_t thread_number() {
  const uint64_t block = blockIdx.x;
  return (block * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
}

extern "C" __global__ void words(const __grid_constant__ Params p) {
  const uint64_t num_threads = uint64_t{gridDim.x} * blockDim.x * blockDim.y, thread = thread_number();
  uint64_t head = (4 - (p.first & 3)) & 3;
  if (head > p.numel) head = p.numel;
  const uint64_t blocks = (p.numel - head) / 4, tail = p.numel - head - 4 * blocks;
  if (thread < head) p.out[thread] = word_of(p, p.first + thread);
  uint32_t* whole = p.out + head;
  const bool aligned = (reinterpret_cast<uintptr_t>(whole) & 15) == 0;
  for (uint64_t b = thread; b < blocks; b += num_threads) {
    const uint4 value = block_of(p, (p.first + head) / 4 + b);
    if (aligned) {
      reinterpret_cast<uint4*>(whole)[b] = value;
    } else {
      whole[4 * b] = value.x;
      whole[4 * b + 1] = value.y;
      whole[4 * b + 2] = value.z;
      whole[4 * b + 3] = value.w;
    }
  }
  if (thread < tail) whole[4 * blocks + thread] = word_of(p, p.first + head + 4 * blocks + thread);
}

extern "C" __global__ void values(const __grid_constant__ Params p) {
  const uint64_t num_threads = uint64_t{gridDim.x} * blockDim.x * blockDim.y;
  for (uint64_t i = thread_number(); i < p.numel; i += num_threads) {
    const uint32_t w = p.out[i];
    float x = __fmaf_rn(__uint2float_rn(w), 0x1p-32f, -0.5f);
    x = x < 0.0f ? __fsqrt_rn(-x) : __fdiv_rn(x, 3.0f);
    const int64_t signed_word = static_cast<int64_t>(w) - 0x80000000ll;
    x = __fadd_rn(x, static_cast<float>(signed_word / p.divisor));
    for (uint32_t k = 0; k < (w & 7); ++k) x = __fmul_rn(x, 1.25f);  // loops of different lengths
    p.floats[i] = x;
  }
}

extern "C" __global__ void off_by_one(const __grid_constant__ Params p) {
  const uint64_t i = thread_number();
  if (i <= p.numel) p.out[i] = 1;
}

extern "C" __global__ void wide_store(const __grid_constant__ Params p) {
  reinterpret_cast<uint4*>(p.out)[thread_number()] = make_uint4(1, 2, 3, 4);
}
"""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def module(request: pytest.FixtureRequest) -> Module:
    ptx = compile_to_ptx(SOURCE, request.param, ["--fmad=false"])
    assert audit(ptx) == []
    assert {k for k in inspect(ptx).opcodes if inspect(ptx).stores_128_bits(k)} == {"words", "wide_store"}
    module = Module(ptx)
    assert module.target == request.param
    return module


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 in a few lines: (blocks, 4) counter words to (blocks, 4) words."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & low
        c2, c3 = (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack([c0, c1, c2, c3], 1).astype(np.uint32)


def test_ptx_reference_philox_known_answers() -> None:
    """Random123's kat_vectors."""
    for counter, key, want in (
        ([0] * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ):
        words = philox(np.array([counter]), key)[0]
        assert " ".join(f"{word:08x}" for word in words) == want


KEY = (0xA4093822, 0x299F31D0)


def reference_words(first: int, numel: int) -> np.ndarray:
    blocks = np.arange(first // 4, (first + numel + 3) // 4, dtype=np.uint64)
    zero = np.zeros_like(blocks)
    counter = np.stack([blocks & np.uint64(0xFFFFFFFF), blocks >> np.uint64(32), zero, zero], 1)
    return philox(counter, KEY).ravel()[first % 4 :][:numel]


def params(out: int, floats: int, numel: int, first: int, divisor: int = 1) -> bytes:
    return struct.pack("<QQQQIIq", out, floats, numel, first, *KEY, divisor)


@needs_nvcc
@pytest.mark.parametrize(("grid", "block"), GRIDS)
@pytest.mark.parametrize("misalignment", [0, 4, 12])
def test_ptx_philox_fill_equals_numpy(module: Module, grid: int, block: int, misalignment: int) -> None:
    for numel, first in ((1, 0), (3, 2), (4, 0), (13, 1), (1000, 3), (4099, 2**34 - 5), (2500, 2**63 - 2600)):
        buffer = np.full(4 * numel, 0xCC, np.uint8)
        memory = Memory(count_writes=True)
        out = memory.map(buffer, BASE + misalignment)
        module.launch("words", grid, block, params(out, 0, numel, first), memory)
        assert_bitwise_equal(buffer.view(np.uint32), reference_words(first, numel), f"{numel} from {first}")
        assert (memory.write_counts(out) == 1).all()


@needs_nvcc
@pytest.mark.parametrize(("grid", "block"), GRIDS)
@pytest.mark.parametrize("divisor", [7, -3, 2**33 + 1])
def test_ptx_float_kernel_equals_numpy(module: Module, grid: int, block: int, divisor: int) -> None:
    numel = 5003
    words, floats = np.random.default_rng(0).integers(0, 2**32, numel, np.uint32), np.zeros(numel, np.float32)
    memory = Memory(count_writes=True)
    source = memory.map(words.view(np.uint8), BASE, writable=False)
    target = memory.map(floats.view(np.uint8), 1 << 40)
    module.launch("values", grid, block, params(source, target, numel, 0, divisor), memory)

    scaled = words.astype(np.float32).astype(np.float64) * 2.0**-32 - 0.5  # exact, so one rounding follows
    x = scaled.astype(np.float32)
    x = np.where(x < 0, np.sqrt(np.abs(x)), x / np.float32(3))
    quotient = np.array([int(abs(w) // abs(divisor)) * (1 if (w < 0) == (divisor < 0) else -1) for w in
                         (words.astype(np.int64) - 2**31).tolist()])  # fmt: skip
    x = x + quotient.astype(np.float32)
    for k in range(7):
        x = np.where((words & 7) > k, x * np.float32(1.25), x)
    assert x.dtype == np.float32
    assert_bitwise_equal(floats.view(np.uint32), x.view(np.uint32))
    assert (memory.write_counts(target) == 1).all()


@needs_nvcc
@pytest.mark.parametrize(("kernel", "offset", "kind"), [("off_by_one", 0, MemoryFault), ("wide_store", 8, Misaligned)])
def test_ptx_error_of_a_compiled_kernel(module: Module, kernel: str, offset: int, kind: type[PtxError]) -> None:
    memory = Memory()
    out = memory.map(np.zeros(4 * 100, np.uint8), BASE + offset)
    with pytest.raises(kind) as caught:
        module.launch(kernel, 2, 64, params(out, 0, 100, 0), memory)
    assert f"{kernel}, line" in str(caught.value) and f"{out + 4 * (100 if offset == 0 else 0):#x}" in str(caught.value)


# ---- finding and calling nvcc --------------------------------------------------------------------------------------


def _fake(folder: Path) -> Path:
    folder.mkdir(parents=True)
    program = folder / "nvcc"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


def test_ptx_nvcc_is_found_where_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, on_path = _fake(tmp_path / "named"), _fake(tmp_path / "path")
    home, wheel = _fake(tmp_path / "home" / "bin"), _fake(tmp_path / "site" / "nvidia" / "cu13" / "bin")
    monkeypatch.setattr(ptx_compile.sysconfig, "get_path", lambda name: str(tmp_path / "site"))
    monkeypatch.setenv("CUDACXX", str(named))
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert find_nvcc() == named
    monkeypatch.delenv("CUDACXX")
    assert find_nvcc() == on_path
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_nvcc() == home
    monkeypatch.delenv("CUDA_HOME")
    assert find_nvcc() == wheel
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "home"))
    assert find_nvcc() == home
    monkeypatch.delenv("CUDA_PATH")
    wheel.unlink()
    assert find_nvcc() is None


@needs_nvcc
def test_ptx_compilation_depends_on_flags_and_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_compile, "_CACHE", tmp_path / "cache")
    headers = tmp_path / "include"
    headers.mkdir()
    (headers / "value.h").write_text("#define VALUE 41")
    source = '#include "value.h"\nextern "C" __global__ void k(int* x) { *x = VALUE; }'
    assert ", 41;" in compile_to_ptx(source, "sm_90", include=[headers])
    (headers / "value.h").write_text("#define VALUE 42")
    assert ", 42;" in compile_to_ptx(source, "sm_90", include=[headers])
    assert ", 43;" in compile_to_ptx(source.replace("VALUE;", "VALUE + ONE;"), "sm_90", ["-DONE=1"], [headers])
    assert ".target sm_80" in compile_to_ptx(source, "sm_80", include=[headers])
    with pytest.raises(RuntimeError, match="NOWHERE"):
        compile_to_ptx('extern "C" __global__ void k() { NOWHERE(); }', "sm_90")
