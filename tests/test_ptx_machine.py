"""The PTX interpreter's machine: threads that part and meet, and errors of one thread."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from ptx import (
    BudgetExceeded,
    DivisionByZero,
    LaunchError,
    Memory,
    Module,
    Trap,
    UndefinedRegister,
    extract_kernel,
    machine,
)
from ptx.harness import BASE, FIRST_LINE, PROLOGUE, module, run, words
from ptx.liveness import read_and_written


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
    with pytest.raises(UndefinedRegister, match="bra THERE: register %p3") as undefined:
        run("\n@!%p3 bra THERE; THERE: mov.u32 %r7, 1;", 128)
    assert undefined.value.line == FIRST_LINE + 1
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


def test_ptx_error_processor_modes() -> None:
    torch.set_flush_denormal(True)
    try:
        with pytest.raises(RuntimeError, match="subnormals"):
            words("st.global.u32 [%rd2], %r1;")
    finally:
        torch.set_flush_denormal(False)


def test_ptx_a_guard_that_stops_a_whole_branch_writes_nothing() -> None:
    """%r9 has no value in any thread, and none is needed."""
    body = """
    setp.lt.u32 %p1, %r1, 8; setp.gt.u32 %p2, %r1, 1000; @%p1 bra PART;
    bra JOIN;
    PART: @%p2 mov.u32 %r9, 1;
    JOIN: st.global.u32 [%rd2], %r1;"""
    assert list(words(body)) == list(range(32))


def test_ptx_a_part_of_a_grid() -> None:
    def part(blocks: range | None) -> np.ndarray:
        buffer = np.zeros(4 * 8 * 16, np.uint8)
        memory = Memory()
        memory.map(buffer, BASE)
        body = "mov.u32 %r7, %nctaid.x; mad.lo.u32 %r7, %r7, 1000, %r1; st.global.u32 [%rd2], %r7;"
        module(body).launch("k", 8, 16, struct.pack("<QI", BASE, 0), memory, blocks=blocks)
        return buffer.view(np.uint32)

    whole = part(None)
    assert (whole == 8000 + np.arange(128)).all()
    some = part(range(3, 5))
    assert (some[48:80] == whole[48:80]).all() and not some[:48].any() and not some[80:].any()
    for blocks in (range(0, 9), range(-1, 3), range(0, 8, 2), range(5, 3)):
        with pytest.raises(LaunchError, match="within 8"):
            part(blocks)


LIVENESS = """
mov.u32 %r6, 0; mov.u32 %r7, 5; mov.u32 %r8, 9; mov.u32 %r9, 1; mov.u32 %r10, 2; mov.u32 %r11, 3;
LOOP: setp.ge.u32 %p1, %r6, %r2; @%p1 bra DONE;
add.u32 %r7, %r7, %r6; and.b32 %r12, %r6, 1; setp.eq.u32 %p2, %r12, %r9;
@%p2 mov.u32 %r8, 4; @!%p2 bra SKIP; mov.u32 %r10, 7; mov.b64 {%r13, %r14}, %rd2; add.u32 %r7, %r7, %r13;
SKIP: add.u32 %r6, %r6, 1; bra LOOP;
DONE: add.u32 %r11, %r8, %r10; st.global.v2.u32 [%rd2+8], {%r7, %r11};
setp.lt.u32 %p3|%p4, %r1, 4; selp.u32 %r15, %r7, %r8, %p4; @%p3 ret; st.global.u32 [%rd2], %r15;"""


def test_ptx_live_registers_equal_a_search_of_all_paths() -> None:
    kernel = module(LIVENESS).kernels["k"]
    effects = [read_and_written(instruction) for instruction in kernel.instructions]

    def may_read(place: int, register: int) -> bool:
        """Whether some way from a place reads the register before it is written for certain."""
        seen, todo = set(), [place]
        while todo:
            at = todo.pop()
            if at in seen or at >= len(kernel.instructions):
                continue
            seen.add(at)
            instruction, (reads, writes) = kernel.instructions[at], effects[at]
            if reads >> register & 1:
                return True
            if writes >> register & 1:
                continue
            if instruction.opcode == "bra":
                todo.append(kernel.labels[instruction.operands[0].name])  # type: ignore[union-attr]
            if instruction.opcode not in ("bra", "ret") or instruction.guard is not None:
                todo.append(at + 1)
        return False

    every = set(kernel.registers)
    assert len(kernel.blocks) == 7
    for place in kernel.blocks:
        kept = {register.name for register in kernel.must_keep(every, place)}
        assert kept == {register.name for register in every if may_read(place, register.index)}
    assert {r.name for r in kernel.must_keep(every, kernel.labels["DONE"])} == {"%r1", "%r7", "%r8", "%r10", "%rd2"}
    assert not kernel.must_keep(every, len(kernel.instructions) + 1)


def test_ptx_reads_and_writes_of_an_instruction() -> None:
    def names(text: str) -> tuple[set[str], set[str]]:
        kernel = module(text).kernels["k"]
        masks = read_and_written(kernel.instructions[-2])
        return tuple({r.name for r in kernel.registers if mask >> r.index & 1} for mask in masks)  # type: ignore

    assert names("fma.rn.f32 %f1, %f2, %f3, %f1;") == ({"%f1", "%f2", "%f3"}, {"%f1"})
    assert names("@%p1 add.u32 %r6, %r7, 1;") == ({"%p1", "%r7"}, set())
    assert names("setp.lt.and.u32 %p1|%p2, %r6, %r7, !%p3;") == ({"%r6", "%r7", "%p3"}, {"%p1", "%p2"})
    assert names("ld.global.v2.u32 {%r6, %r7}, [%rd3+8];") == ({"%rd3"}, {"%r6", "%r7"})
    assert names("st.global.v2.u32 [%rd3+8], {%r6, %r7};") == ({"%rd3", "%r6", "%r7"}, set())
    assert names("mov.b64 {%r6, _}, %rd3;") == ({"%rd3"}, {"%r6"})
    assert names("mov.b64 %rd3, {%r6, %r7};") == ({"%r6", "%r7"}, {"%rd3"})
    assert names("@!%p1 trap;") == ({"%p1"}, set())
    assert names("@!%p1 ret;") == ({"%p1"}, set())
    assert names("HERE: @%p1 bra HERE;") == ({"%p1"}, set())
    assert names("add.cc.u32 %r6, %r7, %r8;") == ({"%r7", "%r8"}, {"%r6"})


def test_ptx_carries_survive_a_branch() -> None:
    """The condition code that one branch sets and the other does not is each thread's own."""
    body = """
    mov.u32 %r6, -1; sub.cc.u32 %r7, 5, 3;
    setp.lt.u32 %p1, %r1, 10; @%p1 bra JOIN;
    add.cc.u32 %r7, %r6, 1;
    JOIN: addc.u32 %r8, 100, 0; st.global.u32 [%rd2], %r8;"""
    assert list(words(body)) == [100] * 10 + [101] * 22


def test_ptx_one_kernel_alone() -> None:
    """It stands on the lines where it stood, so that errors name the same ones."""
    second = PROLOGUE.partition(".visible")[2].replace(" k(", " second(").replace("k_param", "second_param")
    text = "// k\n" + PROLOGUE + COLLATZ + "\nret;\n}\n/* .entry third( */\n.visible" + second + "trap;\n}\n"
    assert list(Module(text).kernels) == ["k", "second"]
    for name in ("k", "second"):
        alone = Module(extract_kernel(text, name))
        assert list(alone.kernels) == [name] and alone.target == "sm_90"
        assert alone.kernels[name].instructions == Module(text).kernels[name].instructions
    with pytest.raises(KeyError, match="third"):
        extract_kernel(text, "third")
    with pytest.raises(KeyError):
        extract_kernel(text, "secon")


def test_ptx_immediates() -> None:
    body = """
    mov.pred %p1, 1; mov.pred %p2, 0; mov.pred %p3, -1; xor.pred %p1, %p1, %p3; or.pred %p1, %p1, %p2;
    selp.u32 %r7, 5, 7, %p1; selp.u32 %r8, 50, 70, %p3; selp.u32 %r9, 500, 700, %p2; add.u32 %r7, %r7, %r8;
    add.u32 %r7, %r7, %r9; add.u32 %r7, %r7, -2147483648; add.u32 %r7, %r7, 4294967295; add.s32 %r7, %r7, 0xFFFFFFFF;
    st.global.u32 [%rd2], %r7;"""
    assert (words(body) == (757 + 2**31 - 2)).all()


def test_ptx_errors_name_the_thread_in_three_dimensions() -> None:
    body = """
    mov.u32 %r6, %tid.y; mov.u32 %r7, %tid.z; mov.u32 %r8, %ctaid.y; mov.u32 %r9, %ctaid.z;
    setp.eq.u32 %p1, %r5, 2; setp.eq.and.u32 %p1, %r6, 1, %p1; setp.eq.and.u32 %p1, %r7, 3, %p1;
    setp.eq.and.u32 %p1, %r3, 1, %p1; setp.eq.and.u32 %p1, %r8, 2, %p1; setp.eq.and.u32 %p1, %r9, 1, %p1;
    @%p1 trap;"""
    with pytest.raises(Trap) as caught:
        module(body).launch("k", (2, 3, 2), (3, 2, 5), struct.pack("<QI", BASE, 0), Memory())
    assert caught.value.thread == ((1, 2, 1), (2, 1, 3))


def test_ptx_any_value_will_do_in_one_kernel_only() -> None:
    """The compiler's remark stands for the kernel in which it stands."""
    body = "st.global.u32 [%rd2], %r7;\nret;\n}\n"
    first = PROLOGUE + "// implicit-def: %r7\n" + body
    second = ".visible" + PROLOGUE.partition(".visible")[2].replace(" k(", " second(") + body
    both = Module(first + second)
    memory = Memory()
    memory.map(np.zeros(128, np.uint8), BASE)
    both.launch("k", 1, 32, struct.pack("<QI", BASE, 0), memory)
    with pytest.raises(UndefinedRegister):
        both.launch("second", 1, 32, struct.pack("<QI", BASE, 0), memory)
