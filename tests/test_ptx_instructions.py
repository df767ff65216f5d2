"""Every instruction of the PTX interpreter, on 10^5 random operands and the edges of its types, bit for bit beside C++
written from the text of the PTX ISA (ptx/isa.h)."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from conftest import assert_bitwise_equal
from ptx.reference import Case, build_c, c_source, operands_of, run_c, run_ptx

COUNT = 100_000
INTEGERS = [f"{kind}{bits}" for kind in "us" for bits in (16, 32, 64)]
ALL_INTEGERS = ["u8", "s8", *INTEGERS]
FLOATS = ["f32", "f64"]


def same(ptx: str, type_: str, count: int, expression: str, nonzero: str = "") -> Case:
    operands = ", ".join("{" + name + "}" for name in "dabce"[: count + 1])
    return Case(f"{ptx} {operands};", type_, (type_,) * count, expression, nonzero)


def unsigned(type_: str) -> str:
    return "u" + type_[1:]


def arithmetic() -> list[Case]:
    cases = []
    for t in FLOATS:
        suffix = "f" if t == "f32" else ""
        for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/")):
            cases.append(same(f"{name}.rn.{t}", t, 2, f"result(a {sign} b)"))
        cases.append(same(f"fma.rn.{t}", t, 3, f"result(fma{suffix}(a, b, c))"))
        cases.append(same(f"sqrt.rn.{t}", t, 1, f"result(sqrt{suffix}(a))"))
        cases.append(same(f"rcp.rn.{t}", t, 1, "result(1 / a)"))
        cases.append(same(f"min.{t}", t, 2, "result(ptx_min(a, b))"))
        cases.append(same(f"max.{t}", t, 2, "result(ptx_max(a, b))"))
        cases.append(same(f"neg.{t}", t, 1, "result(-a)"))
        cases.append(same(f"abs.{t}", t, 1, "result(std::fabs(a))"))
        cases.append(same(f"copysign.{t}", t, 2, "ptx_copysign(a, b)"))
    for t in INTEGERS:
        for name, sign in (("add", "+"), ("sub", "-")):
            cases.append(
                same(f"{name}.{t}", t, 2, f"static_cast<{unsigned(t)}>(a) {sign} static_cast<{unsigned(t)}>(b)")
            )
        wide = "u128" if t[0] == "u" else "s128"
        bits = t[1:]
        cases.append(same(f"mul.lo.{t}", t, 2, f"{wide}(a) * {wide}(b)"))
        cases.append(same(f"mul.hi.{t}", t, 2, f"({wide}(a) * {wide}(b)) >> {bits}"))
        cases.append(same(f"mad.lo.{t}", t, 3, f"{wide}(a) * {wide}(b) + {wide}(c)"))
        cases.append(same(f"mad.hi.{t}", t, 3, f"(({wide}(a) * {wide}(b)) >> {bits}) + {wide}(c)"))
        cases.append(same(f"div.{t}", t, 2, "ptx_div(a, b)", nonzero="b"))
        cases.append(same(f"rem.{t}", t, 2, "ptx_rem(a, b)", nonzero="b"))
        cases.append(same(f"min.{t}", t, 2, "a < b ? a : b"))
        cases.append(same(f"max.{t}", t, 2, "a > b ? a : b"))
        if bits != "64":
            d = f"{t[0]}{2 * int(bits)}"
            cases.append(Case(f"mul.wide.{t} {{d}}, {{a}}, {{b}};", d, (t, t), f"{wide}(a) * {wide}(b)"))
            text = f"mad.wide.{t} {{d}}, {{a}}, {{b}}, {{c}};"
            cases.append(Case(text, d, (t, t, d), f"{wide}(a) * {wide}(b) + {wide}(c)"))
        if t[0] == "s":
            cases.append(same(f"neg.{t}", t, 1, f"-static_cast<{unsigned(t)}>(a)"))
            cases.append(same(f"abs.{t}", t, 1, f"a < 0 ? -static_cast<{unsigned(t)}>(a) : a"))
    cases.append(same("add.sat.s32", "s32", 2, "clamp_to<s32>(s128(a) + b)"))
    cases.append(same("sub.sat.s32", "s32", 2, "clamp_to<s32>(s128(a) - b)"))
    return cases


def carries() -> list[Case]:
    """Sums of two words: the low half is discarded, so the high one shows the carry."""
    cases = []
    for t in ("u32", "s32", "u64", "s64"):
        u, bits = unsigned(t), int(t[1:])
        pair = f"((u128({{}}) << {bits}) | {u}({{}}))"
        first, second = pair.format(f"{u}(a)", "b"), pair.format(f"{u}(c)", "e")
        for name, sign in (("add", "+"), ("sub", "-")):
            high = f"({first} {sign} {second}) >> {bits}"
            text = f"{name}.cc.{t} {{d}}, {{b}}, {{e}}; {name}c.{t} {{d}}, {{a}}, {{c}};"
            cases.append(Case(text, u, (t,) * 4, high))
            # The carry out of the second word, as a number.
            text = f"{name}.cc.{t} {{d}}, {{b}}, {{e}}; {name}c.cc.{t} {{d}}, {{a}}, {{c}}; {name}c.{t} {{d}}, 0, 0;"
            if bits == 32:
                cases.append(Case(text, u, (t,) * 4, f"({first} {sign} {second}) >> 64"))
            else:
                low = f"u128({u}(b)) {sign} {u}(e)"
                whole = f"(u128({u}(a)) {sign} {u}(c) {sign} ((({low}) >> 64) & 1)) >> 64"
                cases.append(Case(text, u, (t,) * 4, whole))
        wide = "u128" if t[0] == "u" else "s128"
        text = f"mad.lo.cc.{t} {{d}}, {{a}}, {{b}}, {{c}}; madc.hi.{t} {{d}}, {{a}}, {{b}}, {{e}};"
        carry = f"((u128({u}({wide}(a) * b)) + {u}(c)) >> {bits})"
        cases.append(Case(text, u, (t,) * 4, f"u128(({wide}(a) * b) >> {bits}) + u128({u}(e)) + {carry}"))
    return cases


def comparisons() -> list[Case]:
    cases = []
    ordered = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    unsigned_names = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
    for t in (*FLOATS, *INTEGERS, "b16", "b32", "b64"):
        c_type = unsigned(t) if t[0] == "b" else t
        names = dict(ordered)
        if t[0] == "b":
            names = {name: ordered[name] for name in ("eq", "ne")}
        if t[0] == "u":
            names |= unsigned_names
        tests = {name: f"a {sign} b" for name, sign in names.items()}
        if t[0] == "f":
            tests = {name: f"(!unordered(a, b) && a {sign} b)" for name, sign in names.items()}
            tests |= {f"{name}u": f"(unordered(a, b) || a {sign} b)" for name, sign in names.items()}
            tests |= {"num": "!unordered(a, b)", "nan": "unordered(a, b)"}
        for name, expression in tests.items():
            cases.append(Case(f"setp.{name}.{t} {{d}}, {{a}}, {{b}};", "pred", (c_type, c_type), expression))
            if name in ("lt", "ltu", "ne"):
                for combine, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
                    text = f"setp.{name}.{combine}.{t} {{d}}, {{a}}, {{b}}, {{c}};"
                    cases.append(Case(text, "pred", (c_type, c_type, "pred"), f"bool({expression}) {sign} c"))
                    text = f"setp.{name}.{combine}.{t} {{d}}, {{a}}, {{b}}, !{{c}};"
                    cases.append(Case(text, "pred", (c_type, c_type, "pred"), f"bool({expression}) {sign} !c"))
                    text = f"setp.{name}.{combine}.{t} %q|{{d}}, {{a}}, {{b}}, {{c}};"
                    cases.append(Case(text, "pred", (c_type, c_type, "pred"), f"!({expression}) {sign} c"))
                text = f"setp.{name}.{t} %q|{{d}}, {{a}}, {{b}};"
                cases.append(Case(text, "pred", (c_type, c_type), f"!({expression})"))
                text = f"set.{name}.u32.{t} {{d}}, {{a}}, {{b}};"
                cases.append(Case(text, "u32", (c_type, c_type), f"({expression}) ? 0xffffffffu : 0u"))
                text = f"set.{name}.and.f32.{t} {{d}}, {{a}}, {{b}}, {{c}};"
                cases.append(Case(text, "f32", (c_type, c_type, "pred"), f"({expression}) && c ? 1.0f : 0.0f"))
        text = f"selp.{t} {{d}}, {{a}}, {{b}}, {{c}};"
        cases.append(Case(text, c_type, (c_type, c_type, "pred"), "c ? a : b"))
        text = f"slct.{t}.s32 {{d}}, {{a}}, {{b}}, {{c}};"
        cases.append(Case(text, c_type, (c_type, c_type, "s32"), "c >= 0 ? a : b"))
        text = f"slct.{t}.f32 {{d}}, {{a}}, {{b}}, {{c}};"
        cases.append(Case(text, c_type, (c_type, c_type, "f32"), "c >= 0 ? a : b"))
    for t in FLOATS:
        for name, expression in {
            "finite": "std::isfinite(a)",
            "infinite": "std::isinf(a)",
            "number": "a == a",
            "notanumber": "a != a",
            "normal": "std::isnormal(a)",
            "subnormal": "is_subnormal(a)",
        }.items():
            cases.append(Case(f"testp.{name}.{t} {{d}}, {{a}};", "pred", (t,), expression))
    return cases


def bits() -> list[Case]:
    cases = []
    for t in ("u16", "u32", "u64"):
        for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
            cases.append(same(f"{name}.b{t[1:]}", t, 2, f"a {sign} b"))
        cases.append(same(f"not.b{t[1:]}", t, 1, "~a"))
        cases.append(Case(f"shl.b{t[1:]} {{d}}, {{a}}, {{b}};", t, (t, "u32"), "ptx_shl(a, b)"))
        cases.append(Case(f"shr.b{t[1:]} {{d}}, {{a}}, {{b}};", t, (t, "u32"), "ptx_shr(a, b)"))
    for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
        cases.append(same(f"{name}.pred", "pred", 2, f"a {sign} b"))
    cases.append(same("not.pred", "pred", 1, "!a"))
    for t in INTEGERS:
        cases.append(Case(f"shr.{t} {{d}}, {{a}}, {{b}};", t, (t, "u32"), "ptx_shr(a, b)"))
    for way in "lr":
        for mode in ("wrap", "clamp"):
            expression = f"ptx_shf(a, b, c, {str(way == 'l').lower()}, {str(mode == 'wrap').lower()})"
            cases.append(same(f"shf.{way}.{mode}.b32", "u32", 3, expression))
    for t in ("u32", "s32", "u64", "s64"):
        text = f"bfe.{t} {{d}}, {{a}}, {{b}}, {{c}};"
        cases.append(Case(text, t, (t, "u32", "u32"), "ptx_bfe(a, b, c)"))
    for t in ("u32", "u64"):
        text = f"bfi.b{t[1:]} {{d}}, {{a}}, {{b}}, {{c}}, {{e}};"
        cases.append(Case(text, t, (t, t, "u32", "u32"), "ptx_bfi(a, b, c, e)"))
        cases.append(Case(f"popc.b{t[1:]} {{d}}, {{a}};", "u32", (t,), "ptx_popc(a)"))
        cases.append(Case(f"clz.b{t[1:]} {{d}}, {{a}};", "u32", (t,), "ptx_clz(a)"))
        cases.append(same(f"brev.b{t[1:]}", t, 1, "ptx_brev(a)"))
    cases.append(same("prmt.b32", "u32", 3, "ptx_prmt(a, b, c)"))
    for table in (0x00, 0x01, 0x1E, 0x3C, 0x78, 0x96, 0xAC, 0xB8, 0xE8, 0xFE, 0xFF, 0x6A):
        text = f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table:#x};"
        cases.append(Case(text, "u32", ("u32",) * 3, f"ptx_lop3(a, b, c, {table})"))
    cases.append(Case("mov.b64 {d}, {{{a}, {b}}};", "u64", ("u32", "u32"), "u64(b) << 32 | a"))
    cases.append(Case("mov.b32 {d}, {{{a}, {b}}};", "u32", ("u16", "u16"), "u32(b) << 16 | a"))
    cases.append(Case("mov.b64 {{{d}, _}}, {a};", "u32", ("u64",), "a"))
    cases.append(Case("mov.b64 {{_, {d}}}, {a};", "u32", ("u64",), "a >> 32"))
    cases.append(Case("mov.b64 {{_, _, {d}, _}}, {a};", "u16", ("u64",), "a >> 32"))
    cases.append(Case("mov.b32 {{_, {d}}}, {a};", "u16", ("u32",), "a >> 16"))
    text = "mov.b64 {d}, {{{a}, {b}, {c}, {e}}};"
    cases.append(Case(text, "u64", ("u16",) * 4, "u64(e) << 48 | u64(c) << 32 | u64(b) << 16 | a"))
    return cases


def conversions() -> list[Case]:
    cases = []
    for source in ALL_INTEGERS:
        for target in ALL_INTEGERS:
            cases.append(Case(f"cvt.{target}.{source} {{d}}, {{a}};", target, (source,), "a"))
            text = f"cvt.sat.{target}.{source} {{d}}, {{a}};"
            cases.append(Case(text, target, (source,), f"clamp_to<{target}>(a)"))
        for target in FLOATS:
            cases.append(Case(f"cvt.rn.{target}.{source} {{d}}, {{a}};", target, (source,), f"{target}(a)"))
    for source in FLOATS:
        roundings = {"rni": "nearbyint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
        for rounding, function in roundings.items():
            for target in ALL_INTEGERS:
                expression = f"to_integer<{target}>(a, {source}(std::{function}(a)))"
                text = f"cvt.{rounding}.{target}.{source} {{d}}, {{a}};"
                cases.append(Case(text, target, (source,), expression))
            expression = f"result(std::{function}(a))"
            cases.append(same(f"cvt.{rounding}.{source}.{source}", source, 1, expression))
    cases.append(Case("cvt.f64.f32 {d}, {a};", "f64", ("f32",), "result(f64(a))"))
    cases.append(Case("cvt.rn.f32.f64 {d}, {a};", "f32", ("f64",), "result(f32(a))"))
    for t, bits_, least in (("bf16", 7, -126), ("f16", 10, -14)):
        cases.append(Case(f"cvt.rn.{t}.f32 {{d}}, {{a}};", "u16", ("f32",), f"to_{t}(a)"))
        expression = f"u32(to_{t}(a)) << 16 | to_{t}(b)"
        cases.append(Case(f"cvt.rn.{t}x2.f32 {{d}}, {{a}}, {{b}};", "u32", ("f32", "f32"), expression))
        cases.append(Case(f"cvt.f32.{t} {{d}}, {{a}};", "f32", ("u16",), f"from_narrow(a, {bits_}, {least})"))
    # A conversion that writes a wider register extends by the sign of its type.
    cases.append(Case("cvt.s8.s32 %t, {a}; mov.b32 {d}, %t;", "u32", ("s32",), "s32(s8(a))"))
    cases.append(Case("cvt.u8.s32 %t, {a}; mov.b32 {d}, %t;", "u32", ("s32",), "u8(a)"))
    return cases


CASES = arithmetic() + carries() + comparisons() + bits() + conversions()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_c(c_source(CASES), tmp_path_factory.mktemp("ptx_cases"))


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.ptx for case in CASES])
def test_ptx_instruction_equals_c(number: int, library: ctypes.CDLL) -> None:
    case = CASES[number]
    operands = operands_of(case, COUNT, np.random.default_rng(number))
    want = run_c(library, number, case, operands)
    assert_bitwise_equal(run_ptx(case, operands), want, case.ptx)
