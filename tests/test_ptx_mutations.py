"""The proof by PTX can fail: faults put into the PTX of our kernels, one at a time, are each seen."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np
import pytest
from ptx import Module, PtxError
from ptx.compile import needs_nvcc
from ptx.parse import extract_kernel
from ptx_fills import GUARD_BYTE, Fill, bytes_of_cpu, bytes_of_ptx, expected_writes, last_of_ptx, ptx_text

pytestmark = needs_nvcc

_LARGE_ADDRESS = 0x7000_0000_0000


def _runs(distribution: str, params: tuple[float, ...]) -> list[Fill]:
    """Through the loop over whole passes, the one over single blocks, and parts of blocks; aligned and not."""
    fills = [Fill(distribution, params, "float32", (12_000,), 2**34 - 901, skip=3, tensor_id=1)]
    fills.append(Fill(distribution, params, "float32", (6_000,), 3, tensor_id=2))
    fills += [Fill(distribution, params, "float32", (400 + k,), k, skip=k % 4, tensor_id=10 + k) for k in range(16)]
    return [*fills, Fill(distribution, params, "float32", (1,), 3, skip=3, tensor_id=3)]


_BOXES = [
    Fill("uniform", (-0.3, 0.8), "float32", (30, 43), 2**34 - 901, (64, 1), (44, 1), skip=1),
    Fill("uniform", (-0.3, 0.8), "float32", (3, 40, 7), 2**62 + 5, (1, 64, 3), (10**7, 1, 100), (("mul", (3.0,)),)),
]
# kernel: what it fills, and what is too large to be filled but for its end
CASES = {
    "shardinit_run_normal_f32": (
        _runs("normal", (0.7, 0.3)),
        Fill("normal", (0.7, 0.3), "float32", (2**33 + 54_321,), 2**40 + 3),
    ),
    "shardinit_run_trunc_normal_central_f32": (
        _runs("trunc_normal", (0.7, 0.3, -1.0, 1.1)),
        Fill("trunc_normal", (0.7, 0.3, -1.0, 1.1), "float32", (2**33 + 54_321,), 2**40 + 3),
    ),
    "shardinit_grid_uniform_32": (
        _BOXES,
        Fill("uniform", (0.0, 1.0), "float32", (2**20, 2**20), 2**40, (2**20 + 32, 1), (2**21, 1)),
    ),
}


def _large(fill: Fill, kernels: Module) -> np.ndarray:
    memory = np.full(600_000 if len(fill.sizes) == 1 else 20_000, GUARD_BYTE, np.uint8)
    last_of_ptx(fill, kernels, _LARGE_ADDRESS, memory)
    return memory


@functools.cache
def _expected(kernel: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    fills, large = CASES[kernel]
    return bytes_of_cpu(fills), expected_writes(fills), _large(large, Module(extract_kernel(ptx_text(), kernel)))


def _is_seen(kernel: str, text: str) -> bool:
    fills, large = CASES[kernel]
    values, writes, end = _expected(kernel)
    try:
        module = Module(text)
        got = bytes_of_ptx(fills, module, max_instructions=200_000)
        return not (
            np.array_equal(got.buffer, values)
            and np.array_equal(got.writes, writes)
            and np.array_equal(_large(large, module), end)
        )
    except PtxError:  # a fault, a race, an endless loop
        return True


Mutation = Callable[[str, list[str]], str | None]
_INSTRUCTION = re.compile(r"\s*(?:@!?%p\d+\s+)?([\w.]+)\s+([^,]+),\s*(.*);")


def _parts(line: str) -> tuple[str, str, list[str]] | None:
    match = _INSTRUCTION.match(line)
    return (match[1], match[2], [part.strip() for part in match[3].split(",")]) if match else None


def _literals(lines: list[str]) -> dict[str, str]:
    """Registers that only ever hold a constant."""
    found = {}
    for line in lines:
        parts = _parts(line)
        if parts and re.fullmatch(r"mov\.[bf]32", parts[0]) and re.fullmatch(r"0f[0-9A-F]{8}", parts[2][0]):
            found[parts[1]] = parts[2][0]
    return found


# The last coefficients of the log, the cosine, the sine and the quantile, whose rounding reaches the value most often.
_LAST_COEFFICIENTS = {"0fBF7FFFFE", "0fBEFFFFFE", "0f3F7FFFFF", "0f3F490FDB", "0f4087E45F"}


def _fma_in_two(line: str, lines: list[str]) -> str | None:
    """As ptxas would not, but a compiler without fused operations does."""
    parts = _parts(line)
    if not parts or parts[0] != "fma.rn.f32":
        return None
    literals = _literals(lines)
    loaded = {parts[1] for other in lines if (parts := _parts(other)) and parts[0].startswith("ld.param")}
    parts = _parts(line)
    assert parts
    a, b, c = parts[2]
    addend = c if c.startswith("0f") else literals.get(c, "")
    if addend not in _LAST_COEFFICIENTS and not (c in loaded and b in loaded):
        return None
    return f"mul.rn.f32 %mutant, {a}, {b};\nadd.rn.f32 {parts[1]}, %mutant, {c};"


def _dropped_key(line: str, lines: list[str]) -> str | None:
    """A round of Philox without its key, or without its other half."""
    parts = _parts(line)
    return f"mov.b32 {parts[1]}, {parts[2][0]};" if parts and parts[0] == "xor.b32" and "-" not in line else None


def _addresses(lines: list[str]) -> set[int]:
    """Lines whose 64-bit results reach the address of a store."""
    wanted = {m[1] for line in lines if (m := re.search(r"st\.global\S*\s+\[(%rd\d+)", line))}
    found: set[int] = set()
    while True:
        more = set()
        for number, line in enumerate(lines):
            parts = _parts(line)
            if parts and parts[1] in wanted and number not in found:
                if re.fullmatch(r"(?:add|sub|shl|mul\.lo|mad\.lo|mov)\.[sub]64", parts[0]):
                    more.add(number)
                    wanted |= set(re.findall(r"%rd\d+", line))
        if not more:
            return found
        found |= more


def _narrow_index(line: str, lines: list[str]) -> str | None:
    """An address that is widened to 64 bits too late."""
    parts = _parts(line)
    if not parts or not re.fullmatch(r"(?:add|sub|shl|mul\.lo|mad\.lo)\.[sub]64", parts[0]):
        return None
    return f"{line}\nand.b64 {parts[1]}, {parts[1]}, 4294967295;" if lines.index(line) in _addresses(lines) else None


def _tail(line: str, lines: list[str]) -> str | None:
    """One block or one element too many or too few at the end."""
    parts = _parts(line)
    if parts and parts[0] == "min.u64":
        return line.replace("min.u64", "max.u64")
    if parts and parts[0] == "add.s64" and parts[2][1] == "3":  # (end + 3) / 4
        return line.replace(", 3;", ", 0;")
    return None


# mutation: (how many are tried in each kernel, which part of them must be seen)
MUTATIONS: dict[str, tuple[Mutation, int, float]] = {
    "fma in two": (_fma_in_two, 10, 1.0),
    "key dropped": (_dropped_key, 12, 1.0),
    # Numbers of spans and of a run's blocks stay below 2^32, since the plan cuts pieces there, as do strides and
    # remainders of these boxes.
    "index narrowed": (_narrow_index, 30, 0.5),
    "tail": (_tail, 10, 1.0),
}


# The only fma of the last kernel is b - a times a power of two, which is exact: in two it is the same.
@pytest.mark.parametrize(
    ("mutation", "kernel"),
    [(m, k) for m in MUTATIONS for k in CASES if (m, k) != ("fma in two", "shardinit_grid_uniform_32")],
)
def test_ptx_mutations_are_seen(mutation: str, kernel: str) -> None:
    mutate, most, least = MUTATIONS[mutation]
    text = extract_kernel(ptx_text(), kernel)
    lines = text.split("\n")
    assert not _is_seen(kernel, text), "the kernel itself must pass"
    numbers = [number for number, line in enumerate(lines) if mutate(line, lines)]
    assert numbers, "nothing to mutate: has the compiler's output changed?"
    chosen = numbers[:: max(1, len(numbers) // most)]
    missed = []
    for number in chosen:
        mutated = [*lines[:number], mutate(lines[number], lines) or "", *lines[number + 1 :]]
        if not _is_seen(kernel, "\n".join(mutated).replace("{", "{\n.reg .f32 %mutant;", 1)):
            missed.append(f"line {number}: {lines[number].strip()}")
    assert len(missed) <= (1 - least) * len(chosen), missed
