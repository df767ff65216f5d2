"""The PTX interpreter's machine: memory that faults, parameters, threads that part and meet, and what it refuses."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
from ptx import (
    BudgetExceeded,
    DivisionByZero,
    LaunchError,
    Memory,
    MemoryFault,
    Misaligned,
    Module,
    ParseError,
    PtxError,
    Race,
    Statistics,
    Trap,
    UndefinedRegister,
    UnsupportedInstruction,
    machine,
)

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
    body: str, size: int, grid: int = 1, block: int = 32, number: int = 0, base: int = BASE, **launch: int
) -> tuple[np.ndarray, Memory, Statistics]:
    """The buffer of `size` bytes after the kernel, where 0xCC stands before it."""
    buffer = np.full(size, 0xCC, np.uint8)
    memory = Memory(count_writes=True)
    memory.map(buffer, base)
    statistics = module(body).launch("k", grid, block, struct.pack("<QI", base, number), memory, **launch)
    return buffer, memory, statistics


def words(body: str, threads: int = 32, number: int = 0, block: int = 32, **launch: int) -> np.ndarray:
    """One word of each thread."""
    buffer, memory, _ = run(body, 4 * threads, -(-threads // block), block, number, **launch)
    assert (memory.write_counts(BASE) == 1).all()
    return buffer.view(np.uint32)


# ---- memory -------------------------------------------------------------------------------------------------------


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


# ---- threads ------------------------------------------------------------------------------------------------------


def test_ptx_special_registers_in_three_dimensions() -> None:
    grid, block = (3, 2, 4), (5, 2, 3)
    names = [f"%{name}.{axis}" for name in ("tid", "ctaid", "ntid", "nctaid") for axis in "xyz"] + ["%laneid"]
    values = "".join(
        f"mov.u32 %r10, {name}; st.global.u32 [%rd3+{4 * number}], %r10;\n" for number, name in enumerate(names)
    )
    body = f"""
    mov.u32 %r6, %tid.z; mov.u32 %r7, %ntid.y; mov.u32 %r8, %tid.y; mad.lo.u32 %r6, %r6, %r7, %r8;
    mad.lo.u32 %r6, %r6, %r4, %r5;
    mov.u32 %r7, %ctaid.z; mov.u32 %r8, %nctaid.y; mov.u32 %r9, %ctaid.y; mad.lo.u32 %r7, %r7, %r8, %r9;
    mov.u32 %r8, %nctaid.x; mad.lo.u32 %r7, %r7, %r8, %r3; mad.lo.u32 %r6, %r7, 30, %r6;
    mad.wide.u32 %rd3, %r6, 52, %rd1;
    {values}"""
    buffer = np.zeros(24 * 30 * 52, np.uint8)
    memory = Memory(count_writes=True)
    memory.map(buffer, BASE)
    module(body).launch("k", grid, block, struct.pack("<QI", BASE, 0), memory)
    assert (memory.write_counts(BASE) == 1).all()
    got = buffer.view(np.uint32).reshape(24, 30, 13)
    for b in range(24):
        for t in range(30):
            tid, ctaid = (t % 5, t // 5 % 2, t // 10), (b % 3, b // 3 % 2, b // 6)
            assert tuple(got[b, t]) == (*tid, *ctaid, *block, *grid, t % 32)


COLLATZ = """
add.u32 %r6, %r1, 1; mov.u32 %r7, 0;
LOOP: setp.eq.u32 %p1, %r6, 1; @%p1 bra DONE;
and.b32 %r8, %r6, 1; setp.eq.u32 %p2, %r8, 0; @%p2 bra EVEN;
mad.lo.u32 %r6, %r6, 3, 1; bra.uni NEXT;
EVEN: shr.u32 %r6, %r6, 1;
NEXT: add.u32 %r7, %r7, 1; bra LOOP;
DONE: st.global.u32 [%rd2], %r7;"""


@pytest.mark.parametrize("chunk", [16384, 100, 1])
def test_ptx_loops_of_different_lengths(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collatz: each thread loops another number of times, with a branch inside."""
    monkeypatch.setattr(machine, "CHUNK_THREADS", chunk)

    def steps(n: int) -> int:
        count = 0
        while n != 1:
            n, count = (n // 2 if n % 2 == 0 else 3 * n + 1), count + 1
        return count

    threads = 4096 if chunk > 1 else 40
    assert list(words(COLLATZ, threads, block=8)) == [steps(n + 1) for n in range(threads)]


def test_ptx_nested_branches_and_early_exits() -> None:
    """A tree of tests, two of whose leaves leave the kernel early, with registers that differ between the branches."""
    body = """
    mov.u32 %r7, 1;
    setp.lt.u32 %p1, %r1, 100; @!%p1 bra HIGH;
    and.b32 %r8, %r1, 3; setp.eq.u32 %p2, %r8, 0; @%p2 bra FOURTH;
    add.u32 %r7, %r7, 10; setp.eq.u32 %p3, %r8, 1; @%p3 bra JOIN;
    add.u32 %r7, %r7, 100; bra JOIN;
    FOURTH: mov.u32 %r7, 5; st.global.u32 [%rd2], %r7; exit;
    HIGH: setp.gt.u32 %p4, %r1, 199; @%p4 bra TOP; add.u32 %r7, %r7, 1000; bra JOIN;
    TOP: st.global.u32 [%rd2], %r1; ret;
    JOIN: mul.lo.u32 %r7, %r7, 2; st.global.u32 [%rd2], %r7;"""

    def expected(i: int) -> int:
        if i >= 100:
            return i if i > 199 else 2002
        return 5 if i % 4 == 0 else 22 if i % 4 == 1 else 222

    assert list(words(body, 320)) == [expected(i) for i in range(320)]


def test_ptx_predicated_instructions() -> None:
    body = """
    mov.u32 %r7, 3; setp.gt.u32 %p1, %r1, 9; setp.gt.u32 %p2, %r1, 1000;
    @%p1 add.u32 %r7, %r7, %r1;
    @!%p1 mov.u32 %r7, 50;
    @%p2 mov.u32 %r7, 99;
    @%p2 trap;
    @%p2 div.u32 %r7, %r7, 0;
    @%p1 st.global.u32 [%rd2], %r7;"""
    buffer, memory, _ = run(body, 128)
    got = buffer.view(np.uint32)
    assert (got[10:] == 3 + np.arange(10, 32)).all() and (got[:10] == 0xCCCCCCCC).all()
    counts = memory.write_counts(BASE).reshape(32, 4)
    assert (counts[10:] == 1).all() and (counts[:10] == 0).all()
    both = "setp.lt.u32 %p1, %r1, 7; @%p1 st.global.u32 [%rd2], 1; @!%p1 st.global.u32 [%rd2], 2;"
    assert list(words(both)) == [1] * 7 + [2] * 25


def test_ptx_error_endless_loop() -> None:
    with pytest.raises(BudgetExceeded, match="endless"):
        run("FOREVER: add.u32 %r7, %r2, 1; bra FOREVER;", 128, max_instructions=10_000)
    # One thread in a hundred is enough.
    body = "setp.ne.u32 %p1, %r1, 40; @%p1 bra OUT; FOREVER: bra FOREVER; OUT: st.global.u32 [%rd2], %r1;"
    with pytest.raises(BudgetExceeded):
        run(body, 400, block=100, max_instructions=10_000)
    run(COLLATZ, 400, block=100, max_instructions=10_000)


def test_ptx_statistics_count_instructions_of_threads() -> None:
    _, _, statistics = run("setp.lt.u32 %p1, %r1, 8; @%p1 ret; st.global.u32 [%rd2], %r1;", 4 * 64, 2)
    before = 7 + 2  # the prologue, the comparison and the exit
    assert (statistics.threads, statistics.thread_instructions) == (64, 64 * before + 56 * 2)


def test_ptx_error_execution() -> None:
    with pytest.raises(UndefinedRegister, match="%r9 was never written"):
        run("add.u32 %r7, %r9, 1;", 128)
    with pytest.raises(Trap):
        run("setp.eq.u32 %p1, %r1, 3; @%p1 trap;", 128)
    with pytest.raises(DivisionByZero) as caught:
        run("div.u32 %r7, 5, %r1;", 128, block=4)
    assert caught.value.thread[1] == (0, 0, 0)
    with pytest.raises(DivisionByZero) as caught:
        run("sub.s32 %r6, %r1, 3; setp.ne.u32 %p1, %r1, 1; @%p1 rem.s32 %r7, 5, %r6;", 128, block=4)
    assert caught.value.thread[1] == (3, 0, 0)


def test_ptx_registers_that_some_threads_never_wrote_hold_rubbish() -> None:
    got = words("setp.lt.u32 %p1, %r1, 8; @%p1 mov.u32 %r7, 1; st.global.u32 [%rd2], %r7;")
    assert (got[:8] == 1).all() and (got[8:] > 0xFFFF).all()
    # The compiler's remark allows what would be an error otherwise.
    assert (words("// implicit-def: %r7\nst.global.u32 [%rd2], %r7;") > 0xFFFF).all()


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "frobnicate.u32 %r7, %r1;",
        "add.rn.ftz.f32 %f1, %f2, %f3;",
        "add.f32 %f1, %f2, %f3;",
        "mul.f32 %f1, %f2, %f3;",
        "mul.rn.sat.f32 %f1, %f2, %f3;",
        "fma.rz.f32 %f1, %f2, %f3, %f4;",
        "fma.rn.ftz.f32 %f1, %f2, %f3, %f4;",
        "fma.rn.f16 %rs1, %rs2, %rs3, %rs4;",
        "mad.rn.f32 %f1, %f2, %f3, %f4;",
        "div.full.f32 %f1, %f2, %f3;",
        "div.approx.f32 %f1, %f2, %f3;",
        "sqrt.approx.f32 %f1, %f2;",
        "rcp.approx.ftz.f32 %f1, %f2;",
        "rsqrt.approx.f64 %fd1, %fd2;",
        "rsqrt.approx.sat.f32 %f1, %f2;",
        "min.ftz.f32 %f1, %f2, %f3;",
        "min.NaN.f32 %f1, %f2, %f3;",
        "abs.ftz.f32 %f1, %f2;",
        "ex2.approx.f32 %f1, %f2;",
        "tanh.approx.f32 %f1, %f2;",
        "setp.lt.ftz.f32 %p1, %f1, %f2;",
        "setp.lt.b32 %p1, %r1, %r2;",
        "setp.lo.s32 %p1, %r1, %r2;",
        "setp.equ.u32 %p1, %r1, %r2;",
        "setp.lt.nand.u32 %p1, %r1, %r2, %p2;",
        "cvt.rz.f32.s32 %f1, %r1;",
        "cvt.f32.s32 %f1, %r1;",
        "cvt.s32.f32 %r1, %f1;",
        "cvt.rzi.ftz.s32.f32 %r1, %f1;",
        "cvt.rn.f32.f32 %f1, %f1;",
        "cvt.sat.f32.f32 %f1, %f1;",
        "cvt.rn.f64.f32 %fd1, %f1;",
        "cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;",
        "cvt.rn.relu.bf16x2.f32 %r1, %f1, %f2;",
        "cvt.rz.bf16x2.f32 %r1, %f1, %f2;",
        "prmt.b32.f4e %r1, %r2, %r3, %r4;",
        "lop3.or.b32 %r1|%p1, %r2, %r3, %r4, 0x80, %p2;",
        "lop3.b32 %r1, %r2, %r3, %r4, %r5;",
        "shf.l.b32 %r1, %r2, %r3, %r4;",
        "shl.u32 %r1, %r2, 3;",
        "mul.u32 %r1, %r2, %r3;",
        "mul.wide.u64 %rd1, %rd2, %rd3;",
        "add.u8 %rs1, %rs2, %rs3;",
        "add.u32 %r1, %r2;",
        "add.u32 %r1, %r2, %r3, %r4;",
        "add.u32 %r1, %rd2, %r3;",
        "add.u32 %rd1, %r2, %r3;",
        "add.u32 %p1, %r2, %r3;",
        "add.u32 5, %r2, %r3;",
        "add.u32 %r1, %r2, 4294967296;",
        "add.u32 %r1, %r2, -2147483649;",
        "add.rn.f32 %f1, %f2, 3;",
        "add.rn.f32 %f1, %f2, 0d3FF0000000000000;",
        "add.u32 %r1, %r2, %clock;",
        "mov.u32 %r1, %warpid;",
        "mov.u64 %rd1, %tid.x;",
        "mov.u64 %rd1, table;",
        "mov.u32 %r1, k_param_0;",
        "mov.b64 {%r1, %r2, %r3}, %rd1;",
        "mov.u64 {%r1, %r2}, %rd1;",
        "ld.local.u32 %r1, [%rd1];",
        "ld.shared.u32 %r1, [%rd1];",
        "ld.const.u32 %r1, [%rd1];",
        "ld.volatile.global.u32 %r1, [%rd1];",
        "ld.global.v3.u32 {%r1, %r2, %r3}, [%rd1];",
        "ld.global.v2.u32 %r1, [%rd1];",
        "ld.global.u32 {%r1, %r2}, [%rd1];",
        "ld.global.v8.u64 {%rd1, %rd1, %rd1, %rd1, %rd1, %rd1, %rd1, %rd1}, [%rd1];",
        "ld.global.u32 %r1, [%r2];",
        "ld.global.u32 %r1, [k_param_0];",
        "ld.global.u32 %r1, [table];",
        "ld.global.f32 %fd1, [%rd1];",
        "ld.global.u64 %r1, [%rd1];",
        "ld.global.u32 %r1, %rd1;",
        "st.global.u64 [%rd1], %r1;",
        "st.global.f32 [%rd1], %fd1;",
        "st.local.u32 [%rd1], %r1;",
        "st.shared.u32 [%rd1], %r1;",
        "atom.global.add.u32 %r1, [%rd1], 1;",
        "red.global.add.u32 [%rd1], 1;",
        "bar.sync 0;",
        "membar.gl;",
        "call.uni helper;",
        "brx.idx %r1, table;",
        "bra NOWHERE;",
        "bra.uni %r1;",
        "ret.sometimes;",
        "cvta.shared.u64 %rd1, %rd2;",
        "cvta.to.local.u64 %rd1, %rd2;",
        "testp.odd.f32 %p1, %f1;",
        "popc.b16 %r1, %rs1;",
        "vote.sync.any.pred %p1, %p2, -1;",
        "@%p1 frobnicate;",
    ],
)
def test_ptx_error_unsupported_instruction(line: str) -> None:
    with pytest.raises(UnsupportedInstruction) as caught:
        module("mov.u32 %r7, %r1;\n" + line)
    assert f"k, line {FIRST_LINE + 1}" in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "add.u32 %r7, %r1, %r99;",
        "add.u32 %x, %r1, %r1; ld.global.u32 %r1, [%nowhere];",
        "@%r1 add.u32 %r7, %r1, 1;",
        "@%p77 add.u32 %r7, %r1, 1;",
        "add.u32 %r7, %r1, 1.5.2;",
        "ld.global.u32 %r1, [%rd1+%r2];",
        "call (%r1), helper, (%r2);",
        "L: mov.u32 %r7, 1; L: mov.u32 %r7, 2;",
        ".reg .b32 %r1;",
        ".reg .b128 %q1;",
        ".local .align 4 .b8 __local_depot0[16];",
        ".shared .align 4 .b8 tile[16];",
        ".param .b32 param0;",
        '.pragma "frequency 3";',
        ".branchtargets A, B;",
        "mov.u32 %r7, 1",
    ],
)
def test_ptx_error_parse(line: str) -> None:
    with pytest.raises((ParseError, UnsupportedInstruction)) as caught:
        module(line)
    if "r99" not in line and "%x" not in line:
        assert isinstance(caught.value, ParseError)
    assert "line" in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        ".func helper() { ret; }",
        ".extern .func helper();",
        ".global .b8 table[4] = {1, 2, 3, 4};",
        ".const .b32 c;",
        ".shared .b32 c;",
        ".visible .entry k() { ret; }",
        ".visible .entry other(.reg .b32 x) { ret; }",
        ".visible .entry other() .maxclusterrank 4 { ret; }",
        ".visible .entry other() { ret;",
        ".section .debug_str { }",
        "mov.u32 %r1, 2;",
        ".address_size 32",
    ],
)
def test_ptx_error_outside_kernels(line: str) -> None:
    with pytest.raises(ParseError):
        Module(PROLOGUE + "ret;\n}\n" + line + "\n")


def test_ptx_a_kernel_must_not_run_off_its_end() -> None:
    for body in ("", "setp.eq.u32 %p1, %r1, 1; @%p1 ret;", "mov.u32 %r7, 1;"):
        with pytest.raises(UnsupportedInstruction, match="last instruction"):
            Module(PROLOGUE + body + "\n}\n")


def test_ptx_comments_scopes_and_harmless_directives() -> None:
    body = """
    .loc 1 25 5
    .pragma "nounroll";  /* ret; over
    lines */ // st.global.u32 [%rd2], 1; // implicit-def: %f7
    { .reg .b32 tmp; .reg .pred p; mov.b64 {tmp, %r7}, %rd2; setp.ne.u32 p, tmp, 0;
      { .reg .b32 tmp; mov.u32 tmp, 0x10; add.u32 %r8, tmp, 010; }
      selp.u32 %r8, %r8, tmp, p; }
    .pragma "used_bytes_mask 15";
    st.global.u32 [%rd2], %r8;"""
    assert (words(body) == 24).all()
