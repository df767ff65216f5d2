"""The audit of PTX sees each kind of violation, and nothing in clean PTX."""

from __future__ import annotations

import pytest
from ptx import audit, inspect

CLEAN = """
.version 9.0
.target sm_90
.address_size 64
.visible .entry clean(
\t.param .align 8 .b8 clean_param_0[64]
)
.maxntid 256, 1, 1
{
\t.reg .pred %p<2>;
\t.reg .f32 %f<9>;
\t.reg .b32 %r<9>;
\t.reg .b64 %rd<9>;
\tmov.u32 %r1, %tid.x;
\tld.param.u64 %rd1, [clean_param_0];
\tcvta.to.global.u64 %rd2, %rd1; // a remark; with mad.f32 in it
\tmul.wide.u32 %rd3, %r1, 16;
\tadd.s64 %rd2, %rd2, %rd3;
\tcvt.rn.f32.s32 %f1, %r1;
\trsqrt.approx.ftz.f32 %f2, %f1;
$L__BB0_1:
\tfma.rn.f32 %f2, %f2, %f1, 0f3F800000;
\tsetp.lt.f32 %p1, %f2, %f1;
\t@%p1 bra $L__BB0_1;
\tst.global.v4.f32 [%rd2], {%f2, %f2, %f2, %f2};
\tret;
}
"""


def test_ptx_audit_passes_clean_text() -> None:
    assert audit(CLEAN) == []


def with_line(line: str) -> str:
    return CLEAN.replace("\tcvt.rn.f32.s32 %f1, %r1;\n", f"\tcvt.rn.f32.s32 %f1, %r1;\n\t{line}\n")


BAD = [
    "mul.f32 %f3, %f1, %f1;",  # without .rn ptxas may fuse it
    "add.f32 %f3, %f1, %f1;",
    "sub.f64 %fd3, %fd1, %fd1;",
    "mad.f32 %f3, %f1, %f1, %f1;",
    "mad.rn.f32 %f3, %f1, %f1, %f1;",
    "mul.ftz.f32 %f3, %f1, %f1;",
    "mul.rn.ftz.f32 %f3, %f1, %f1;",
    "fma.rn.ftz.f32 %f3, %f1, %f1, %f1;",
    "fma.rn.sat.f32 %f3, %f1, %f1, %f1;",
    "fma.rz.f32 %f3, %f1, %f1, %f1;",
    "fma.rn.relu.bf16x2 %r1, %r1, %r1, %r1;",
    "add.rn.f32x2 %rd1, %rd1, %rd1;",
    "div.approx.f32 %f3, %f1, %f1;",
    "div.full.f32 %f3, %f1, %f1;",
    "sqrt.approx.f32 %f3, %f1;",
    "sqrt.rz.f32 %f3, %f1;",
    "rcp.approx.ftz.f32 %f3, %f1;",
    "rsqrt.approx.f64 %fd3, %fd1;",
    "rsqrt.approx.ftz.f64 %fd3, %fd1;",
    "sin.approx.f32 %f3, %f1;",
    "cos.approx.f32 %f3, %f1;",
    "lg2.approx.f32 %f3, %f1;",
    "ex2.approx.ftz.f32 %f3, %f1;",
    "tanh.approx.f32 %f3, %f1;",
    "min.ftz.f32 %f3, %f1, %f1;",
    "min.NaN.f32 %f3, %f1, %f1;",
    "abs.ftz.f32 %f3, %f1;",
    "setp.lt.ftz.f32 %p1, %f1, %f1;",
    "cvt.rz.f32.s32 %f3, %r1;",
    "cvt.rn.ftz.f32.f64 %f3, %fd1;",
    "cvt.rni.ftz.f32.f32 %f3, %f1;",
    "cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f1;",
    "cvt.rn.relu.bf16x2.f32 %r1, %f1, %f1;",
    "cvt.sat.f32.f32 %f3, %f1;",
    "call.uni (%f3), __nv_sinf, (%f1);",
    "ld.local.f32 %f3, [%rd1];",
    "st.local.f32 [%rd1], %f3;",
    "ld.shared.f32 %f3, [%rd1];",
    "st.shared.f32 [%rd1], %f3;",
    "st.param.f32 [clean_param_0], %f3;",
    "atom.global.add.f32 %f3, [%rd1], %f1;",
    "red.global.add.f32 [%rd1], %f1;",
    "bar.sync 0;",
    "shfl.sync.down.b32 %r1|%p1, %r1, 1, 31, -1;",
    ".local .align 4 .b8 __local_depot0[16];",
    ".shared .align 4 .b8 tile[16];",
    ".param .b32 param0;",
    "frobnicate.rn.f32 %f3, %f1;",
    "@%p1 mul.f32 %f3, %f1, %f1;",
    "@!%p1 add.f32 %f3, %f1, %f1;",
    "{ mul.f32 %f3, %f1, %f1; }",
]


@pytest.mark.parametrize("line", BAD)
def test_ptx_audit_error(line: str) -> None:
    found = audit(with_line(line))
    assert len(found) == 1, found
    opcode = line.strip("{ ").split(" ")[0 if line[0] != "@" else 1]
    assert "line 20: clean: " in found[0] and opcode in found[0]


@pytest.mark.parametrize(
    "line",
    [
        ".func (.param .b32 out) helper(.param .b32 in)\n{\n\tret;\n}",
        ".extern .func (.param .b32 out) __nv_sinf(.param .b32 in);",
        ".visible .func helper()\n{\n\tret;\n}",
        ".global .align 4 .b8 table[8] = {1, 2, 3, 4, 5, 6, 7, 8};",
        ".const .align 4 .b8 table[8];",
        ".shared .align 4 .b8 tile[16];",
        ".extern .shared .align 16 .b8 dynamic[];",
    ],
)
def test_ptx_audit_error_outside_kernels(line: str) -> None:
    found = audit(CLEAN + line + "\n")
    assert len(found) == 1 and line.split("\n")[0].rstrip(";")[:30] in found[0], found


def test_ptx_audit_reports_stores_of_128_bits() -> None:
    assert inspect(CLEAN).stores_128_bits("clean")
    assert inspect(CLEAN).opcodes["clean"]["fma.rn.f32"] == 1
    scalar = CLEAN.replace("st.global.v4.f32 [%rd2], {%f2, %f2, %f2, %f2};", "st.global.f32 [%rd2], %f2;")
    assert audit(scalar) == [] and not inspect(scalar).stores_128_bits("clean")
    for same in ("st.global.v4.b32", "st.global.v4.u32", "st.global.cs.v4.f32"):
        assert inspect(CLEAN.replace("st.global.v4.f32", same)).stores_128_bits("clean")
    for other in ("st.global.v2.f32", "st.global.v4.b16", "st.global.v4.u8"):
        assert not inspect(CLEAN.replace("st.global.v4.f32", other)).stores_128_bits("clean")
