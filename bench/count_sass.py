"""Instructions per element of the CUDA kernels' steady loops, from their SASS, and the issue bound that follows.

    python bench/count_sass.py [--arch sm_90] [--curand INCLUDE] [--json FILE]

Needs nvcc and cuobjdump (pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm), no GPU. --curand names the folder of
curand_kernel.h (pip install nvidia-curand), for torch's way of drawing normals beside ours. Exit status 1: a kernel is
over its limit, or spills.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLAGS = (
    "-std=c++17",
    "-O3",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "-DNDEBUG",
)  # as in CMakeLists.txt

# Instructions per element and registers, at most.
LIMITS = {
    "normal_f32": 34.0,
    "normal_bf16": 34.0,
    "uniform_f32": 14.5,
    "uniform_bf16": 15.0,
    "trunc_normal_central_f32": 52.0,
    "trunc_normal_central_bf16": 52.0,
}
MAX_REGISTERS = 40

# Each of an SM's four warp schedulers issues an instruction for one warp a clock (CUDA C++ Programming Guide, section
# "Compute Capability 9.0"). An H100 SXM and an H200 have 132 SMs; the clock is an example.
SCHEDULERS, WARP, SMS, CLOCK_GHZ = 4, 32, 132, 1.755

# torch's normal_ in the form of its kernels (a grid-stride loop, four draws at a time, one store each).
TORCH_WAY = """
#include <curand_kernel.h>
extern "C" __global__ void __launch_bounds__(256, 4) torch_way_f32(
    float* out, unsigned long long n, unsigned long long seed, unsigned long long offset, float std, float mean) {
  const unsigned long long thread = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned long long threads = (unsigned long long)gridDim.x * blockDim.x;
  curandStatePhilox4_32_10_t state;
  curand_init(seed, thread, offset, &state);
  const unsigned long long rounded = (n + threads * 4 - 1) / (threads * 4) * (threads * 4);
#pragma unroll 1
  for (unsigned long long first = thread; first < rounded; first += threads * 4) {
    const float4 draw = curand_normal4(&state);
    const float values[4] = {draw.x, draw.y, draw.z, draw.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const unsigned long long at = first + threads * k;
      if (at < n) out[at] = values[k] * std + mean;
    }
  }
}
"""


@dataclass
class Count:
    kernel: str
    per_element: float
    registers: int
    spill_bytes: int
    pipes: dict[str, float]


def find(tool: str) -> str:
    found = shutil.which(tool)
    if found:
        return found
    for path in sorted(Path(sysconfig.get_path("purelib")).glob(f"nvidia/*/bin/{tool}")):
        return str(path)
    raise SystemExit(f"{tool} must be in PATH or installed with pip (see --help); found none")


def pipe_of(opcode: str) -> str:
    """Where an instruction goes, for the eye: the issue bound counts them all alike."""
    name = opcode.split(".")[0]
    if name in ("FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2", "IMAD"):
        return "multiply-add"
    if name in ("MUFU", "I2F", "F2I"):
        return "special"
    if name in ("STG", "LDC", "LDG", "LDCU", "ULDC"):
        return "memory"
    if name in ("BRA", "BSSY", "BSYNC", "EXIT", "WARPSYNC", "NOP"):
        return "control"
    return "integer and logic"


def build(source: Path, arch: str, folder: Path, include: list[str]) -> tuple[str, dict[str, tuple[int, int]]]:
    """SASS, and registers and spilled bytes of each kernel."""
    cubin = folder / f"{source.stem}.cubin"
    command = [find("nvcc"), *FLAGS, f"-arch={arch}", "-cubin", "-Xptxas=-v", *include, "-o", str(cubin), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    usage, kernel, spilled = {}, "", 0
    for line in done.stderr.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = match[1]
        if match := re.search(r"(\d+) bytes spill stores", line):
            spilled = int(match[1])
        if match := re.search(r"Used (\d+) registers", line):
            usage[kernel] = (int(match[1]), spilled)
    cuobjdump = find("cuobjdump")
    path = os.pathsep.join([str(Path(find("nvdisasm")).parent), os.environ.get("PATH", "")])
    listing = subprocess.run(
        [cuobjdump, "-sass", str(cubin)], capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}
    )
    return listing.stdout, usage


def functions(sass: str) -> dict[str, list[tuple[int, str]]]:
    """Address and text of each instruction, without its predicate."""
    result: dict[str, list[tuple[int, str]]] = {}
    for line in sass.splitlines():
        if match := re.search(r"Function : (\S+)", line):
            result[match[1]] = current = []
        elif match := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line):
            current.append((int(match[1], 16), match[2]))
    return result


def elements_stored(opcode: str, kernel: str) -> float:
    size = 8 if "64" in kernel else 2 if "bf16" in kernel else 4
    bits = re.search(r"\.(128|64|U16|U8)\b", opcode)
    return {"128": 16, "64": 8, "U16": 2, "U8": 1}.get(bits[1] if bits else "", 4) / size


def steady_loop(kernel: str, instructions: list[tuple[int, str]]) -> tuple[float, dict[str, float]] | None:
    """The innermost loop with the fewest instructions an element: the others do the edges."""
    loops = []
    for address, text in instructions:
        match = re.match(r"BRA(?:\.\w+)*\s.*?(0x[0-9a-f]+)", text)
        if match and int(match[1], 16) < address:
            loops.append((int(match[1], 16), address))
    best = None
    for low, high in loops:
        if any(low <= a and b <= high for a, b in loops if (a, b) != (low, high)):
            continue
        opcodes = [text.split()[0] for address, text in instructions if low <= address <= high]
        elements = sum(elements_stored(opcode, kernel) for opcode in opcodes if opcode.startswith("STG"))
        if elements and (best is None or len(opcodes) / elements < best[0]):
            pipes = collections.Counter(pipe_of(opcode) for opcode in opcodes)
            best = (len(opcodes) / elements, {pipe: number / elements for pipe, number in pipes.items()})
    return best


def count(source: Path, arch: str, folder: Path, include: list[str], pattern: str) -> list[Count]:
    sass, usage = build(source, arch, folder, include)
    counts = []
    for name, instructions in functions(sass).items():
        loop = steady_loop(name, instructions) if re.search(pattern, name) else None
        if loop:
            short = name.removeprefix("shardinit_run_")
            pipes = {pipe: round(number, 2) for pipe, number in sorted(loop[1].items())}
            counts.append(Count(short, round(loop[0], 2), *usage[name], pipes))
    return sorted(counts, key=lambda one: one.kernel)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--curand", metavar="INCLUDE", help="folder of curand_kernel.h")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        counts = count(ROOT / "csrc" / "fill_cuda.cu", options.arch, folder, [], r"run_.*(f32|f64|bf16|bits)")
        if options.curand:
            source = folder / "torch_way.cu"
            source.write_text(TORCH_WAY)
            counts += count(source, options.arch, folder, [f"-I{options.curand}"], "torch_way")
    rate = SCHEDULERS * WARP * SMS * CLOCK_GHZ
    failures = []
    print(
        f"{options.arch}, steady loop; bound: {SMS} SMs at {CLOCK_GHZ} GHz, {SCHEDULERS} warp instructions a clock each"
    )
    print(f"{'kernel':28}{'SASS/element':>13}{'limit':>7}{'registers':>11}{'spilled':>9}{'bound, G/s':>12}  pipes")
    for one in counts:
        limit = LIMITS.get(one.kernel)
        pipes = ", ".join(f"{pipe} {number:.1f}" for pipe, number in one.pipes.items())
        print(
            f"{one.kernel:28}{one.per_element:13.2f}{limit or '':>7}{one.registers:11}{one.spill_bytes:9}"
            f"{rate / one.per_element:12.0f}  {pipes}"
        )
        if one.spill_bytes:
            failures.append(f"{one.kernel} spills {one.spill_bytes} bytes")
        if limit and (one.per_element > limit or one.registers > MAX_REGISTERS):
            failures.append(f"{one.kernel} must take at most {limit} instructions and {MAX_REGISTERS} registers")
    if options.json:
        Path(options.json).write_text(
            json.dumps({"arch": options.arch, "kernels": [asdict(one) for one in counts]}, indent=2)
        )
    for failure in failures:
        print(f"over the limit: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
