"""What the PTX interpreter refuses: whatever it does not know is an error, never ignored."""

from __future__ import annotations

import pytest
from ptx import (
    Module,
    ParseError,
    UnsupportedInstruction,
)
from ptx.harness import FIRST_LINE, PROLOGUE, module, words


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
        "cvt.rzi.s32.f32 %r1, %fd1;",
        "cvt.rn.f32.s32 %fd1, %r1;",
        "add.u32 %r1, %r2, -2147483649;",
        "add.rn.f32 %f1, %f2, 3;",
        "add.rn.f32 %f1, %f2, 0d3FF0000000000000;",
        "add.u32 %r1, %r2, %clock;",
        "mov.u32 %r1, %warpid;",
        "mov.u64 %rd1, %tid.x;",
        "mov.b8 %rs1, %rs2;",
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
        "L: @%p1 bra.uni L;",
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
        ".reg .b8 %q1;",
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
    {.reg .b32 tmp; .reg .pred p; mov.b64 {tmp, %r7}, %rd2; setp.ne.u32 p, tmp, 0;
      { .reg .b32 tmp; mov.u32 tmp, 0x10; add.u32 %r8, tmp, 010; }{mov.u32 %r7, 0b101;}
      selp.u32 %r8, %r8, tmp, p; }
    .pragma "used_bytes_mask 15";
    add.u32 %r8, %r8, %r7; st.global.u32 [%rd2], %r8;"""
    assert (words(body) == 29).all()
