"""One PTX instruction beside one C expression: both run over the same operands and give arrays of patterns.

Types are those of PTX (u8 ... s64, f32, f64, pred); arrays of patterns are unsigned integers, a predicate is 0 or 1 as
u32.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .machine import Module, SeedError
from .memory import Memory


@dataclass(frozen=True)
class Case:
    """ptx: the instruction's text with {d}, {a}, {b}, {c}, {e} for its operands, or several instructions.
    expression: the same in C++ over a, b, c, e with the helpers of isa.h. nonzero: operands that must not be 0."""

    ptx: str
    destination: str
    sources: tuple[str, ...]
    expression: str
    nonzero: str = ""

    @property
    def name(self) -> str:
        return self.ptx.split(";")[0].split("{")[0].strip() + ("" if self.ptx.count(";") < 2 else " ...")


def stored(type_: str) -> np.dtype:
    return np.dtype(np.uint32) if type_ == "pred" else np.dtype(f"u{int(type_[1:]) // 8}")


def _register_type(type_: str) -> str:
    """8-bit values live in wider registers."""
    return "b16" if type_[1:] == "8" else type_


# ---- C ------------------------------------------------------------------------------------------------------------


def c_source(cases: Sequence[Case]) -> str:
    lines = ['#include "isa.h"']
    for number, case in enumerate(cases):
        types = {name: type_ for name, type_ in zip("abce", case.sources, strict=False)}
        given = "".join(f"const {'u32' if t == 'pred' else t}* {n}_, " for n, t in types.items())
        loads = " ".join(f"const {'bool' if t == 'pred' else t} {n} = {n}_[i];" for n, t in types.items())
        target = "u32" if case.destination == "pred" else case.destination
        lines.append(
            f'extern "C" void case_{number}({given}{target}* d, long count) {{\n'
            f"  for (long i = 0; i < count; ++i) {{ {loads} d[i] = static_cast<{target}>({case.expression}); }}\n}}"
        )
    return "\n".join(lines) + "\n"


def build_c(source: str, folder: Path) -> ctypes.CDLL:
    """Compiled once; no contraction, no -march: fma() is libm's."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    assert compiler, "a C++ compiler is needed, as to build the package"
    path, library = folder / "cases.cpp", folder / "cases.so"
    path.write_text(source)
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fwrapv", "-shared", "-fPIC", f"-I{Path(__file__).parent}"]
    subprocess.run([compiler, *flags, "-o", str(library), str(path), "-lm"], check=True)
    return ctypes.CDLL(str(library))


def run_c(library: ctypes.CDLL, number: int, case: Case, operands: Sequence[np.ndarray]) -> np.ndarray:
    result = np.empty(operands[0].size, stored(case.destination))
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*operands, result)]
    getattr(library, f"case_{number}")(*pointers, ctypes.c_long(result.size))
    return result


# ---- PTX ----------------------------------------------------------------------------------------------------------


def ptx_source(case: Case) -> str:
    """A kernel of one instruction: load the operands of element i, compute, store."""
    names = "abce"[: len(case.sources)]
    declare, load, names_of = [], [], {}
    for name, type_ in zip(names, case.sources, strict=True):
        declare.append(f".reg .{_register_type(type_)} %{name};")
        names_of[name] = f"%{name}"
        size = stored(type_).itemsize
        load += [f"ld.param.u64 %at, [p_{name}];", f"mad.wide.u32 %at, %i, {size}, %at;"]
        if type_ == "pred":
            load += ["ld.global.u32 %t, [%at];", f"setp.ne.u32 %{name}, %t, 0;"]
        else:
            load.append(f"ld.global.{type_} %{name}, [%at];")
    destination = case.destination
    declare.append(f".reg .{_register_type(destination)} %d;")
    store = ["ld.param.u64 %at, [p_d];", f"mad.wide.u32 %at, %i, {stored(destination).itemsize}, %at;"]
    if destination == "pred":
        store += ["selp.u32 %t, 1, 0, %d;", "st.global.u32 [%at], %t;"]
    else:
        store.append(f"st.global.{destination} [%at], %d;")
    parameters = ", ".join(f".param .u64 p_{name}" for name in (*names, "d", "n"))
    body = [
        *declare,
        ".reg .b64 %at, %n; .reg .b32 %i, %t, %x; .reg .pred %out, %q, %r;",
        "mov.u32 %x, %ctaid.x; mov.u32 %t, %ntid.x; mov.u32 %i, %tid.x; mad.lo.u32 %i, %x, %t, %i;",
        "ld.param.u64 %n, [p_n]; cvt.u64.u32 %at, %i; setp.ge.u64 %out, %at, %n; @%out ret;",
        *load,
        case.ptx.format(d="%d", **names_of),
        *store,
        "ret;",
    ]
    return (
        ".version 9.0\n.target sm_90\n.address_size 64\n"
        f".visible .entry one({parameters})\n{{\n" + "\n".join(body) + "\n}\n"
    )


def run_ptx(case: Case, operands: Sequence[np.ndarray], rsqrt_ulp: SeedError = 0) -> np.ndarray:
    """operands: patterns of each source's type, all of one size."""
    module = Module(ptx_source(case))
    size = operands[0].size
    result = np.zeros(size, stored(case.destination))
    memory, addresses = Memory(count_writes=True), []
    for number, array in enumerate((*operands, result)):
        writable = array is result
        addresses.append(memory.map(array.view(np.uint8), (number + 1) << 40, writable))
    params = b"".join(value.to_bytes(8, "little") for value in (*addresses, size))
    module.launch("one", -(-size // 256), 256, params, memory, rsqrt_ulp)
    assert (memory.write_counts(addresses[-1]) == 1).all()
    return result


# ---- operands -----------------------------------------------------------------------------------------------------

_SPECIAL_FLOATS = [
    *(
        0.0,
        1.0,
        0.5,
        0.75,
        1.5,
        2.5,
        3.5,
        3.0,
        2.0,
        1e-3,
        1e10,
        65504.0,
        65519.0,
        65520.0,
        2.0**-14,
        2.0**-24,
        2.0**-25,
    ),
    *(2.0**24 - 1, 2.0**24, 2.0**24 + 2, 2.0**31, 2.0**32, 2.0**63, 2.0**64, 2.0**53 - 1, 127.5, 128.5, 255.5, 256.0),
    *(32767.5, 65535.5, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, float("inf"), float("nan")),
]


def special_patterns(type_: str) -> np.ndarray:
    """The edges of a type."""
    dtype = stored(type_)
    if type_ == "pred":
        return np.array([0, 1], dtype)
    if type_[0] == "f":
        kind = np.dtype(f"f{dtype.itemsize}")
        info = np.finfo(kind)
        values = np.array([*_SPECIAL_FLOATS, info.max, info.tiny, info.smallest_subnormal], kind)
        patterns = values.view(dtype)
        magnitudes = np.concatenate([patterns, patterns + dtype.type(1), patterns[1:] - dtype.type(1)])
        top = dtype.type(1 << (8 * dtype.itemsize - 1))
        return np.unique(np.concatenate([magnitudes, magnitudes | top]))
    bits = 8 * dtype.itemsize
    near = {0, 1, 2, 3, 5, 7, 31, 32, 33, 63, 64, 65, 255}
    near |= {(1 << shift) + more for shift in range(3, bits + 1) for more in (-1, 0, 1)}
    near |= {-x for x in near}
    return np.array(sorted({x & ((1 << bits) - 1) for x in near}), dtype)


def random_patterns(type_: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Half of all patterns alike; half of middling sizes, where arithmetic does not overflow at once."""
    dtype = stored(type_)
    if type_ == "pred":
        return rng.integers(0, 2, count, dtype)
    patterns = rng.integers(0, 1 << (8 * dtype.itemsize), count, dtype, endpoint=False)
    if type_[0] == "f":
        kind = np.dtype(f"f{dtype.itemsize}")
        middling = (rng.standard_normal(count) * 2.0 ** rng.integers(-12, 24, count)).astype(kind).view(dtype)
    else:
        middling = patterns >> rng.integers(0, 8 * dtype.itemsize, count, dtype)
    return np.where(rng.integers(0, 2, count) == 1, patterns, middling)


def operands_of(case: Case, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """`count` random operands after every pair of edges, or a sample of the triples."""
    edges = [special_patterns(type_) for type_ in case.sources]
    total = int(np.prod([len(e) for e in edges]))
    chosen = np.arange(total) if total <= 40_000 else rng.integers(0, total, 40_000)
    picked = np.unravel_index(chosen, [len(e) for e in edges])
    columns = []
    for name, type_, edge, index in zip("abce", case.sources, edges, picked, strict=False):
        column = np.concatenate([edge[index], random_patterns(type_, count, rng)])
        if name in case.nonzero:
            column[column == 0] = 1
        columns.append(np.ascontiguousarray(column))
    return columns
