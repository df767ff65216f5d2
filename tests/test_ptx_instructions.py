"""Every instruction of the PTX interpreter, on 10^5 random operands and the edges of its types, bit for bit beside C++
written from the text of the PTX ISA (ptx/isa.h)."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from conftest import assert_bitwise_equal
from ptx import floats
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


# ---- fused multiply and add, where rounding twice would show -------------------------------------------------------

FMA = {type_: same(f"fma.rn.{type_}", type_, 3, "") for type_ in FLOATS}


def _hard_sums(kind: type, rng: np.random.Generator) -> list[np.ndarray]:
    """c within a few units of -a b; then a b + c just beside the middle of two neighbours."""
    unsigned_ = np.uint32 if kind is np.float32 else np.uint64
    eps = float(np.finfo(kind).eps)
    a, b = ((rng.standard_normal(COUNT) * 2.0 ** rng.integers(-20, 20, COUNT)).astype(kind) for _ in range(2))
    cancels = (-(a * b)).view(unsigned_) + rng.integers(-3, 4, COUNT).astype(unsigned_)
    # Half a unit of c times (1 + k eps)(1 - k eps) = 1 - (k eps)^2, or the product of two factors above 1.
    c = (1.0 + rng.integers(0, 1 << 22, COUNT) * eps).astype(kind)
    c *= rng.choice(np.array([-1, 1], kind), COUNT)
    k = rng.integers(1, 4, COUNT)
    half = (eps / 2 * (1.0 + k * eps) * rng.choice([-1.0, 1.0], COUNT)).astype(kind)
    almost_one = (1.0 + rng.choice([-1, 1], COUNT) * k * eps).astype(kind)
    return [
        np.concatenate([a, half]).view(unsigned_),
        np.concatenate([b, almost_one]).view(unsigned_),
        np.concatenate([cancels, c.view(unsigned_)]),
    ]


@pytest.mark.parametrize("type_", FLOATS)
def test_ptx_fma_rounds_once(type_: str, library: ctypes.CDLL) -> None:
    kind = np.float32 if type_ == "f32" else np.float64
    operands = _hard_sums(kind, np.random.default_rng(3))
    number = next(i for i, case in enumerate(CASES) if case.ptx == FMA[type_].ptx)
    want = run_c(library, number, CASES[number], operands)
    got = run_ptx(FMA[type_], operands)
    assert_bitwise_equal(got, want, type_)
    # The operands are hard ones: rounding twice differs on many of them.
    with np.errstate(all="ignore"):
        a, b, c = (x.view(kind) for x in operands)
        twice = (a * b + c) if type_ == "f64" else (a.astype(np.float64) * b + c).astype(np.float32)
    assert (twice.view(got.dtype) != got).sum() > 10_000


# ---- rsqrt.approx --------------------------------------------------------------------------------------------------

RSQRT = {mode: same(f"rsqrt.approx{mode}.f32", "f32", 1, "") for mode in ("", ".ftz")}


def test_ptx_rsqrt_is_rounded_correctly_before_it_is_shifted() -> None:
    """For all 2^24 mantissas of both exponent parities, in integers: y = Y 2^-24 is the nearest float32 to x^-1/2 if
    (2Y - 1)^2 x < 2^50 < (2Y + 1)^2 x."""
    for parity in (0, 1):
        for start in range(1 << 23, 1 << 24, 1 << 21):
            mantissa = np.arange(start, start + (1 << 21), dtype=np.uint64)
            x = (mantissa.astype(np.float64) * 2.0 ** (parity - 23)).astype(np.float32)
            y = (floats.rsqrt32(x).astype(np.float64) * 2**24).astype(np.uint64)

            def below_one(m: np.ndarray, mantissa: np.ndarray = mantissa, parity: int = parity) -> np.ndarray:
                # (m 2^-25)^2 x < 1, that is m^2 mantissa < 2^(73 - parity), in two limbs of 25 bits
                square = m * m
                high = (square >> np.uint64(25)) * mantissa
                low = (square & np.uint64((1 << 25) - 1)) * mantissa
                return high + (low >> np.uint64(25)) < np.uint64(1 << (48 - parity))

            assert below_one(2 * y - np.uint64(1)).all()
            assert not below_one(2 * y + np.uint64(1)).any()


@pytest.mark.parametrize("mode", ["", ".ftz"])
def test_ptx_rsqrt_is_off_by_as_many_units_as_told(mode: str) -> None:
    rng = np.random.default_rng(5)
    (operands,) = operands_of(RSQRT[mode], COUNT, rng)
    x = operands.view(np.float32)
    exact = run_ptx(RSQRT[mode], [operands], 0)
    tiny = np.abs(x) < np.float32(2.0**-126)
    ordinary = (x > 0) & np.isfinite(x) & ~(tiny & (mode == ".ftz"))
    with np.errstate(all="ignore"):
        want = (1 / np.sqrt(x.astype(np.float64))).astype(np.float32)
    assert (exact[ordinary] == want.view(np.uint32)[ordinary]).all()
    assert (exact[np.isnan(x) | (x < 0) & ~tiny] == 0x7FFFFFFF).all()
    assert (exact[operands == 0x00000000] == 0x7F800000).all() and (exact[operands == 0x80000000] == 0xFF800000).all()
    assert (exact[operands == 0x7F800000] == 0).all() and (operands == 0x7F800000).any()
    subnormal = tiny & (x != 0)
    if mode == ".ftz":
        assert (exact[subnormal & (x > 0)] == 0x7F800000).all() and (exact[subnormal & (x < 0)] == 0xFF800000).all()
    else:
        assert (exact[subnormal & (x < 0)] == 0x7FFFFFFF).all()
    assert subnormal.sum() > 100

    assert (run_ptx(RSQRT[mode], [operands], 8) - exact == np.where(ordinary, 8, 0)).all()
    drawn = (run_ptx(RSQRT[mode], [operands], np.random.default_rng(1)) - exact).astype(np.int32)
    assert (drawn[~ordinary] == 0).all()
    assert set(drawn[ordinary]) == set(range(-8, 9))
    called = run_ptx(RSQRT[mode], [operands], lambda x: np.where(x > 1, -2, 3))
    assert (called - exact == np.where(ordinary, np.where(x > 1, -2, 3), 0).astype(np.uint32)).all()
