"""Small kernels for tests: a body of PTX over one buffer."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from .machine import Module, Statistics
from .memory import Memory

BASE = 0x7F12_3456_7000

PROLOGUE = """.version 9.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 k_param_0, .param .u32 k_param_1)
{
.reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<20>; .reg .f32 %f<9>; .reg .b64 %rd<20>; .reg .f64 %fd<9>;
ld.param.u64 %rd1, [k_param_0];
ld.param.u32 %r2, [k_param_1];
mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mov.u32 %r5, %tid.x;
mad.lo.u32 %r1, %r3, %r4, %r5;
mad.wide.u32 %rd2, %r1, 4, %rd1;
"""
FIRST_LINE = PROLOGUE.count("\n") + 1  # of a body


def module(body: str) -> Module:
    """%r1 is the thread, %rd1 the buffer, %rd2 the thread's word in it, %r2 a number."""
    return Module(PROLOGUE + body + "\nret;\n}\n")


def run(
    body: str, size: int, grid: int = 1, block: int = 32, number: int = 0, base: int = BASE, **launch: Any
) -> tuple[np.ndarray, Memory, Statistics]:
    """The buffer of `size` bytes after the kernel, where 0xCC stands before it."""
    buffer = np.full(size, 0xCC, np.uint8)
    memory = Memory(count_writes=True)
    memory.map(buffer, base)
    statistics = module(body).launch("k", grid, block, struct.pack("<QI", base, number), memory, **launch)
    return buffer, memory, statistics


def words(body: str, threads: int = 32, number: int = 0, block: int = 32, **launch: Any) -> np.ndarray:
    """One word of each thread."""
    buffer, memory, _ = run(body, 4 * threads, -(-threads // block), block, number, **launch)
    assert (memory.write_counts(BASE) == 1).all()
    return buffer.view(np.uint32)
