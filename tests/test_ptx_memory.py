"""The PTX interpreter's memory and parameters: what faults, and that bytes go where they should."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
from ptx import (
    LaunchError,
    Memory,
    MemoryFault,
    Misaligned,
    Module,
    PtxError,
    Race,
)
from ptx.harness import BASE, FIRST_LINE, PROLOGUE, module, run, words


@pytest.mark.parametrize(
    ("store", "size", "thread", "address"),
    [
        ("st.global.u32 [%rd2], %r1;", 127, 31, BASE + 124),
        ("st.global.u32 [%rd2+4], %r1;", 128, 31, BASE + 128),
        ("st.global.u32 [%rd2+-4], %r1;", 128, 0, BASE - 4),
        ("add.s64 %rd3, %rd2, %rd2; st.global.u32 [%rd3], %r1;", 128, 0, 2 * BASE),
        ("ld.global.u32 %r7, [%rd2+8];", 128, 30, BASE + 128),
        ("st.global.u8 [%rd2+3], %r1;", 127, 31, BASE + 127),
        ("ld.global.v2.u32 {%r7, %r8}, [%rd1+128];", 132, 0, BASE + 128),
    ],
)
def test_ptx_error_memory_fault(store: str, size: int, thread: int, address: int) -> None:
    with pytest.raises(MemoryFault) as caught:
        run(f"\n{store}", size)
    error = caught.value
    assert (error.kernel, error.line) == ("k", FIRST_LINE + 1)
    assert error.thread == ((0, 0, 0), (thread, 0, 0))
    assert error.address == address
    assert error.instruction == store.split(";")[-2].strip()
    for part in ("k", f"line {error.line}", error.instruction, f"{address:#x}", f"thread ({thread}, 0, 0)"):
        assert part in str(error)


def test_ptx_fault_leaves_guard_bytes_alone_and_names_a_thread_of_a_later_block() -> None:
    buffer = np.full(4 * 100 + 64, 0xCC, np.uint8)
    memory = Memory()
    memory.map(buffer[32 : 32 + 400], BASE)
    with pytest.raises(MemoryFault) as caught:
        module("st.global.u32 [%rd2], %r1;").launch("k", 4, 32, struct.pack("<QI", BASE, 0), memory)
    assert caught.value.thread == ((3, 0, 0), (4, 0, 0))
    assert (buffer[:32] == 0xCC).all() and (buffer[-32:] == 0xCC).all()


def test_ptx_buffers_at_any_address_of_host_and_device() -> None:
    """Bytes go where they should, whatever the alignment of the host's array and of the device's address."""
    for host in range(4):
        for device in range(8):
            whole = np.full(300, 0xCC, np.uint8)
            memory = Memory(count_writes=True)
            base = memory.map(whole[host : host + 280], BASE + device)
            aligned = -(-base // 8) * 8
            body = """
            mad.wide.u32 %rd3, %r1, 8, %rd1;
            st.global.v2.u32 [%rd3], {%r1, %r2};
            ld.global.u8 %r7, [%rd3+1]; ld.global.u32 %r8, [%rd3]; add.u32 %r7, %r7, %r8;
            st.global.u16 [%rd3+4], %r7;"""
            module(body).launch("k", 1, 32, struct.pack("<QI", aligned, 0x01020304), memory)
            expected = np.full(300, 0xCC, np.uint8)
            start = host + aligned - base
            rows = np.stack([np.arange(32), np.full(32, 0x01020000) + np.arange(32)], 1).astype(np.uint32)
            expected[start : start + 256] = rows.ravel().view(np.uint8)
            assert (whole == expected).all()
            counts = memory.write_counts(base)[aligned - base :][:256].reshape(32, 8)
            assert (counts == [1, 1, 1, 1, 2, 2, 1, 1]).all()


def test_ptx_several_buffers_in_one_access() -> None:
    first, second = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    memory = Memory(count_writes=True)
    memory.map(first, BASE)
    memory.map(second, BASE + 4096)
    body = """
    shr.u32 %r7, %r1, 4; and.b32 %r8, %r1, 15; mul.wide.u32 %rd3, %r7, 4096; add.s64 %rd3, %rd3, %rd1;
    mad.wide.u32 %rd3, %r8, 4, %rd3; st.global.u32 [%rd3], %r1;
    ld.global.u32 %r9, [%rd3]; add.u32 %r9, %r9, 1000; st.global.u32 [%rd3], %r9;"""
    module(body).launch("k", 1, 32, struct.pack("<QI", BASE, 0), memory)
    assert (first.view(np.uint32) == np.arange(16) + 1000).all()
    assert (second.view(np.uint32) == np.arange(16, 32) + 1000).all()
    assert (memory.write_counts(BASE) == 2).all() and (memory.write_counts(BASE + 4096) == 2).all()


def test_ptx_error_access_across_two_buffers() -> None:
    memory = Memory()
    memory.map(np.zeros(8, np.uint8), BASE)
    memory.map(np.zeros(8, np.uint8), BASE + 8)
    body = "st.global.v4.u32 [%rd1], {%r1, %r1, %r1, %r1};"
    with pytest.raises(MemoryFault):
        module(body).launch("k", 1, 1, struct.pack("<QI", BASE, 0), memory)


@pytest.mark.parametrize(
    ("access", "base", "address"),
    [
        ("st.global.v4.f32 [%rd1], {%f1, %f1, %f1, %f1};", BASE + 8, BASE + 8),
        ("st.global.v2.f32 [%rd1+4], {%f1, %f1};", BASE, BASE + 4),
        ("st.global.v4.u8 [%rd1+2], {%r1, %r1, %r1, %r1};", BASE, BASE + 2),
        ("st.global.u16 [%rd1], %r1;", BASE + 1, BASE + 1),
        ("st.global.u32 [%rd1+2], %r1;", BASE, BASE + 2),
        ("ld.global.f64 %fd1, [%rd1+4];", BASE, BASE + 4),
    ],
)
def test_ptx_error_misaligned(access: str, base: int, address: int) -> None:
    with pytest.raises(Misaligned, match=re.escape(f"{address:#x}")) as caught:
        run("mov.f32 %f1, 0f00000000; " + access, 256, block=1, base=base)
    assert caught.value.address == address


def test_ptx_error_race() -> None:
    with pytest.raises(Race) as caught:
        run("shr.u32 %r7, %r1, 1; mad.wide.u32 %rd3, %r7, 4, %rd1; st.global.u32 [%rd3], %r1;", 128)
    assert caught.value.address in range(BASE, BASE + 64, 4)
    with pytest.raises(Race):
        run("st.global.u32 [%rd1], %r1;", 128)
    with pytest.raises(Race):  # addresses that fall, and meet at the end
        run("sub.u32 %r7, 31, %r1; max.u32 %r7, %r7, 1; mad.wide.u32 %rd3, %r7, 4, %rd1; st.global.u32 [%rd3], 5;", 128)


def test_ptx_stores_in_falling_order_are_no_race() -> None:
    got = words("sub.u32 %r7, 31, %r1; mad.wide.u32 %rd3, %r7, 4, %rd1; st.global.u32 [%rd3], %r1;")
    assert (got == np.arange(31, -1, -1)).all()


def test_ptx_write_counts_show_a_second_write_and_a_missing_one() -> None:
    body = "st.global.u32 [%rd2], %r1; setp.ge.u32 %p1, %r1, 30; @%p1 ret; st.global.u8 [%rd2+5], %r1;"
    _, memory, _ = run(body, 132)
    expected = np.ones((33, 4), np.uint8)
    expected[32] = 0
    expected[1:31, 1] = 2
    assert (memory.write_counts(BASE).reshape(33, 4) == expected).all()
    with pytest.raises(ValueError, match="count_writes"):
        plain = Memory()
        plain.write_counts(plain.map(np.zeros(4, np.uint8), BASE))


def test_ptx_error_read_only_buffer_and_bad_maps() -> None:
    memory = Memory()
    memory.map(np.zeros(128, np.uint8), BASE, writable=False)
    with pytest.raises(MemoryFault, match="read-only"):
        module("st.global.u32 [%rd2], %r1;").launch("k", 1, 32, struct.pack("<QI", BASE, 0), memory)
    frozen = np.zeros(16, np.uint8)
    frozen.flags.writeable = False
    for array, address in (
        (np.zeros(16, np.uint8), BASE + 100),
        (np.zeros(16, np.uint32), 64),
        (np.zeros(32, np.uint8)[::2], 64),
        (np.zeros(16, np.uint8), 0),
        (np.zeros(16, np.uint8), 2**64 - 8),
        (frozen, 64),
    ):
        with pytest.raises(ValueError):
            memory.map(array, address)


def test_ptx_write_counts_stop_at_255() -> None:
    body = """
    mov.u32 %r7, 0;
    AGAIN: st.global.u32 [%rd2], %r7; st.global.u8 [%rd2+1], %r7;
    add.u32 %r7, %r7, 1; setp.lt.u32 %p1, %r7, %r2; @%p1 bra AGAIN;"""
    for times, others, second in ((5, 5, 10), (127, 127, 254), (128, 128, 255), (300, 255, 255)):
        _, memory, _ = run(body, 128, number=times)
        assert (memory.write_counts(BASE).reshape(32, 4) == [others, second, others, others]).all()


# ---- parameters ---------------------------------------------------------------------------------------------------

STRUCT = """.version 9.0
.target sm_90
.address_size 64
.visible .entry s(.param .u32 s_param_0, .param .align 8 .b8 s_param_1[48], .param .u8 s_param_2)
{
.reg .b16 %rs<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
mov.b64 %rd1, s_param_1;
mov.u32 %r1, %tid.x;
ld.param.u64 %rd2, [%rd1];
BODY
ret;
}
"""


def run_struct(body: str, size: int = 128) -> np.ndarray:
    buffer = np.zeros(size, np.uint8)
    memory = Memory()
    memory.map(buffer, BASE)
    params = struct.pack("<I4xQ8H6IB", 7, BASE, *range(100, 108), *range(1000, 1006), 0xFE)
    Module(STRUCT.replace("BODY", body)).launch("s", 1, 4, params, memory)
    return buffer.view(np.uint32)


def test_ptx_parameters_by_name_by_register_and_by_generic_address() -> None:
    store = "mad.wide.u32 %rd3, %r1, 4, %rd2; st.global.u32 [%rd3], %r2;"
    assert run_struct(f"ld.param.u32 %r2, [s_param_0]; {store}")[3] == 7
    assert run_struct(f"ld.param.u32 %r2, [s_param_1+24]; {store}")[3] == 1000
    assert run_struct(f"add.s64 %rd5, %rd1, 32; ld.param.u32 %r2, [%rd5+-4]; {store}")[3] == 1001
    assert run_struct(f"ld.param.v2.u32 {{%r3, %r2}}, [%rd1+32]; {store}")[3] == 1003
    assert run_struct(f"ld.param.u8 %r2, [s_param_2]; {store}")[3] == 0xFE
    assert run_struct(f"ld.param.s8 %r2, [s_param_2]; {store}")[3] == 0xFFFFFFFE
    # Another element for each thread.
    indexed = "mad.wide.u32 %rd5, %r1, 2, %rd1; ld.param.u16 %r2, [%rd5+8];"
    assert list(run_struct(f"{indexed} {store}")[:4]) == [100, 101, 102, 103]
    generic = "cvta.param.u64 %rd4, %rd1; mad.wide.u32 %rd5, %r1, 4, %rd4; ld.u32 %r2, [%rd5+24];"
    assert list(run_struct(f"{generic} {store}")[:4]) == [1000, 1001, 1002, 1003]
    back = "cvta.param.u64 %rd4, s_param_1; cvta.to.param.u64 %rd5, %rd4; ld.param.u32 %r2, [%rd5+24];"
    assert run_struct(f"{back} {store}")[3] == 1000
    to_global = "cvta.to.global.u64 %rd2, %rd2; ld.param.u32 %r2, [%rd1+24];"
    assert run_struct(f"{to_global} {store}")[3] == 1000
    # Generic addresses reach global memory too.
    stored = "mad.wide.u32 %rd3, %r1, 4, %rd2; st.u32 [%rd3], %r1; ld.u32 %r2, [%rd3]; st.u32 [%rd3+16], %r2;"
    assert list(run_struct(stored)[:8]) == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("st.param.u32 [s_param_0], %r1;", MemoryFault),
        ("cvta.param.u64 %rd4, %rd1; mad.wide.u32 %rd4, %r1, 4, %rd4; st.u32 [%rd4], %r1;", MemoryFault),
        ("ld.param.u32 %r2, [s_param_1+52];", MemoryFault),  # beyond the block
        ("ld.param.u64 %rd4, [%rd1+48];", MemoryFault),
        ("ld.param.u32 %r2, [%rd1+-12];", MemoryFault),
        ("ld.param.u32 %r2, [%rd1+2];", Misaligned),
        ("ld.param.v4.u32 {%r2, %r3, %r4, %r5}, [%rd1];", Misaligned),  # the struct is aligned to 8 only
        ("ld.global.u32 %r2, [%rd1];", MemoryFault),  # an address of another space
        ("ld.u32 %r2, [%rd1];", MemoryFault),
        ("cvta.param.u64 %rd4, %rd1; ld.global.u32 %r2, [%rd4];", MemoryFault),
    ],
)
def test_ptx_error_parameter_access(body: str, kind: type[PtxError]) -> None:
    with pytest.raises(kind):
        run_struct(body)


def test_ptx_error_launch() -> None:
    text = PROLOGUE.replace(")\n{", ")\n.maxntid 64, 1, 1\n.minnctapersm 2\n{") + "ret;\n}\n"
    kernel = Module(text)
    assert [(p.offset, p.size, p.alignment) for p in kernel.kernels["k"].parameters] == [(0, 8, 8), (8, 4, 4)]
    for grid, block, params in (
        (1, 32, bytes(16)),
        (1, 32, bytes(8)),
        (1, 65, bytes(12)),
        (1, (64, 2), bytes(12)),
        (0, 32, bytes(12)),
        (1, (1, 1, 1, 1), bytes(12)),
    ):
        with pytest.raises(LaunchError):
            kernel.launch("k", grid, block, params, Memory())
    kernel.launch("k", 1, (32, 2), bytes(12), Memory())
    with pytest.raises(LaunchError, match="other"):
        kernel.launch("other", 1, 32, bytes(12), Memory())
    with pytest.raises(LaunchError, match="must have 96"):
        Module(text.replace("maxntid 64, 1, 1", "reqntid 96")).launch("k", 1, 32, bytes(12), Memory())
