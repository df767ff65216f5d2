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


GOOD = """
add.rn.f32 sub.rn.f64 mul.rn.f32 div.rn.f64 fma.rn.f64 sqrt.rn.f32 sqrt.rn.f64 rcp.rn.f32
cvt.rn.f32.s32 cvt.rn.f32.u64 cvt.rn.f64.s64 cvt.rn.f64.u32 cvt.rn.f32.u16 cvt.rn.f32.u8 cvt.rn.f32.f64 cvt.f64.f32
cvt.rn.bf16.f32 cvt.rn.bf16x2.f32 cvt.rn.f16.f32 cvt.rn.f16x2.f32 cvt.f32.bf16 cvt.f32.f16
rsqrt.approx.f32 rsqrt.approx.ftz.f32
min.f32 max.f64 neg.f32 abs.f64 copysign.f32 testp.finite.f32
setp.lt.f32 setp.geu.f64 setp.nan.f32 setp.ltu.and.f32 set.lt.u32.f32 set.gtu.or.s32.f64 set.lt.xor.u32.f32
cvt.rni.f32.f32 cvt.rzi.f64.f64 cvt.rmi.s32.f32 cvt.rpi.u64.f64
mov.u32 mov.b64 mov.f32 mov.f64 mov.pred selp.f32 selp.b32 selp.s64 slct.f32.s32
cvt.u32.u64 cvt.u16.u32 cvt.s64.s8 cvt.sat.u8.s32 cvta.to.global.u64 cvta.global.u64 cvta.param.u64
ld.param.u64 ld.param.v2.u32 ld.param.v4.f32 ld.global.f32 ld.global.nc.v4.f32 ld.u32 ld.global.v8.b32
st.global.u8 st.global.u16 st.global.v2.f64 st.global.v4.b32 st.global.cs.v4.f32
add.s32 add.cc.s64 addc.u32 addc.cc.u64 sub.u16 sub.cc.u32 subc.cc.s32
mul.lo.s64 mul.hi.u32 mul.wide.u32 mad.lo.s32 mad.wide.u16 mad.lo.cc.u32 madc.hi.u64 madc.lo.cc.u32
div.u32 div.s64 rem.u64 min.u32 max.s64 neg.s32 abs.s16
setp.lo.u32 setp.ge.s64 setp.eq.b32 setp.ne.or.s16 set.eq.u32.b32
and.b32 or.b64 xor.pred not.b16 not.pred shl.b32 shl.b64 shr.u32 shr.s64 shr.b16
shf.l.wrap.b32 shf.r.clamp.b32 bfe.u32 bfe.s64 bfi.b64 brev.b32 popc.b64 clz.b32 prmt.b32 lop3.b32
bra bra.uni ret exit trap
""".split()


@pytest.mark.parametrize("opcode", GOOD)
def test_ptx_audit_allows(opcode: str) -> None:
    assert audit(with_line(f"{opcode} %x;")) == []
    assert audit(with_line(f"@%p1 {opcode} %x;")) == []
    for spoiled in (f"{opcode}.wrong", opcode.replace(".", ".ftz.", 1) if "." in opcode else opcode + ".ftz"):
        assert len(audit(with_line(f"{spoiled} %x;"))) == 1
