"""The parts below the fills: fma without the instruction, and the transforms on words chosen for their difficulty."""

from __future__ import annotations

import itertools
import math
import re
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TORCH_DTYPES, assert_bitwise_equal, patterns

from torch_shardinit import _native, native, reference

ROOT = Path(__file__).parent.parent

_CODES = {"uniform": 1, "normal": 2, "trunc_normal": 3}


def _exact_fma(a: float, b: float, c: float) -> float:
    """a*b + c rounded once: Python divides integers with correct rounding, subnormals included."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c  # the sign of an exact zero is IEEE's affair; a*b is exact here
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _same(x: float, y: float) -> bool:
    return np.float64(x).tobytes() == np.float64(y).tobytes()


def _hard_doubles(rng: np.random.Generator, count: int) -> np.ndarray:
    exponents = rng.choice([-1074, -1060, -1022, -600, -54, -53, -52, -1, 0, 1, 30, 52, 53, 500, 970], count)
    mantissas = rng.choice([0, 1, 2, 2**51, 2**52 - 1, 2**52 - 2, 2**26, 2**27 + 1], count)
    mantissas = np.where(rng.random(count) < 0.5, mantissas, rng.integers(0, 2**52, count))
    values = np.ldexp(1.0 + mantissas / 2.0**52, exponents)
    return np.where(rng.random(count) < 0.5, -values, values)


def test_soft_fma_fp64_is_exact() -> None:
    rng = np.random.default_rng(7)
    count = 60_000
    a, b, c = (_hard_doubles(rng, count) for _ in range(3))
    # Half of the addends lie near -a*b, where everything cancels.
    with np.errstate(all="ignore"):
        near = -a * b
        c[::2] = np.where(
            np.isfinite(near[::2]), np.nextafter(near[::2], rng.choice([-np.inf, np.inf], count // 2)), c[::2]
        )
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        assert _same(_native.soft_fma(x, y, z), _exact_fma(x, y, z)), (x.hex(), y.hex(), z.hex())
    # Ties of the addend that only the last bits of the product break: (2^52 + 2^26)(2^52 - 2^26 + 1) = 2^104 + 2^26.
    x, y = (2.0**52 + 2.0**26) * 2.0**-104, (2.0**52 - 2.0**26 + 1) * 2.0**-53
    for z, sign in itertools.product((1.0, 1.0 + 2.0**-52, 1.0 + 2.0**-51), (1, -1)):
        for w in (z, -z):
            assert _same(_native.soft_fma(sign * x, y, w), _exact_fma(sign * x, y, w)), (sign, w.hex())
            assert _native.soft_fma(sign * x, y, w) != w
    specials = [0.0, -0.0, 5e-324, -5e-324, 2.0**-1022, 1.0, -1.0, 1.7976931348623157e308, -1.7976931348623157e308]
    for x, y, z in itertools.product(specials, repeat=3):
        assert _same(_native.soft_fma(x, y, z), _exact_fma(x, y, z)), (x.hex(), y.hex(), z.hex())


def test_soft_fma_fp32_is_exact() -> None:
    rng = np.random.default_rng(8)
    count = 60_000

    def floats() -> np.ndarray:
        patterns = rng.integers(0, 2**32, count, dtype=np.uint32)
        values = patterns.view(np.float32)
        return np.where(np.isfinite(values), values, np.float32(1.5)).astype(np.float32)

    a, b, c = floats(), floats(), floats()
    with np.errstate(all="ignore"):
        near = (-a.astype(np.float64) * b).astype(np.float32)
        c[::2] = np.where(np.isfinite(near[::2]), near[::2], c[::2])
        # Ties in fp32 that only a far smaller product breaks.
        a[1::4] = np.float32(2.0**-60) * rng.choice([-1, 1], count // 4)
        b[1::4] = np.float32(1.0)
        c[1::4] = np.float32(1.0) + np.float32(2.0**-23) * rng.integers(0, 3, count // 4)
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        got = _native.soft_fmaf(x, y, z)
        want = _round_to_fp32(exact) if exact else x * y + z
        assert _same(got, want), (x.hex(), y.hex(), z.hex(), got, want)


def _round_to_fp32(exact: Fraction) -> float:
    size = abs(exact)
    exponent = max(math.floor(math.log2(size)) if size >= Fraction(1, 2**1000) else -1000, -126)
    while Fraction(2) ** exponent > size and exponent > -126:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    rounded = float(round(size / unit) * unit)  # Fraction rounds half to even
    return math.copysign(math.inf if rounded >= 2.0**128 else rounded, exact)


def _words(rng: np.random.Generator, bits: int) -> np.ndarray:
    """Both ends of the range, its middle, all powers of two and their neighbours, and random ones."""
    top, span = 2**bits, 4096
    powers = [min(max(2**k + d, 0), top - 1) for k in range(bits) for d in (-2, -1, 0, 1)]
    special = [*range(span), *range(top - span, top), *range(top // 2 - span, top // 2 + span), *powers]
    random = rng.integers(0, top, 40_000, dtype=np.uint64)
    return np.concatenate([np.array(special, np.uint64), random])


@pytest.mark.parametrize("bits", [32, 64])
def test_normal_of_hard_words_equals_the_reference(isa: str, bits: int) -> None:
    rng = np.random.default_rng(9)
    p = _words(rng, bits)
    q = rng.permutation(_words(rng, bits))
    if bits == 64:
        p, q = p[::8].copy(), q[::8].copy()
    got = _native.transform(bits == 64, _CODES["normal"], [1.0, 0.0], p, q)
    pairs = reference.normal_pairs32 if bits == 32 else reference.normal_pairs64
    unsigned = np.uint32 if bits == 32 else np.uint64
    want = pairs(p.astype(unsigned), q.astype(unsigned))
    for side, values, wanted in zip(("even", "odd"), got, want, strict=True):
        result = values.astype(wanted.dtype)
        assert np.isfinite(result).all()
        assert_bitwise_equal(result.view(unsigned), wanted.view(unsigned), f"{isa} {side}")


@pytest.mark.parametrize(
    "interval", [(-2.0, 2.0), (-1.0, 0.5), (5.0, 6.0), (12.0, math.inf), (-math.inf, 8.0), (5.0, 5.001)]
)
@pytest.mark.parametrize("bits", [32, 64])
def test_trunc_normal_of_hard_words_equals_the_reference(isa: str, bits: int, interval: tuple[float, float]) -> None:
    words = _words(np.random.default_rng(10), bits)
    if bits == 64:
        words = words[::16].copy()
    unsigned = np.uint32 if bits == 32 else np.uint64
    params = reference.trunc_params(1.0, 0.0, *interval, dtype=f"float{bits}")
    transform = reference.trunc_normal32 if bits == 32 else reference.trunc_normal64
    want = transform(words.astype(unsigned), params)
    low = float(np.float32(interval[0])) if bits == 32 else interval[0]
    high = float(np.float32(interval[1])) if bits == 32 else interval[1]
    got, again = _native.transform(bits == 64, _CODES["trunc_normal"], [1.0, 0.0, low, high], words, words[::-1].copy())
    assert_bitwise_equal(got.astype(want.dtype).view(unsigned), want.view(unsigned), isa)
    assert_bitwise_equal(again[::-1].astype(want.dtype).view(unsigned), want.view(unsigned), isa)
    assert np.isfinite(want).all()


_NANS = {
    "float64": 0x7FF8000000000000,
    "float32": 0x7FC00000,
    "bfloat16": 0x7FC0,
    "float16": 0x7E00,
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7E,
}


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_a_nan_is_one_pattern(isa: str, dtype: str) -> None:
    """A constant may be NaN and steps after a draw may make one; processors differ in which one they make."""
    cases = [
        (math.nan, ()),
        (-math.nan, ()),
        (math.inf, (("mul", (0.0,)),)),
        (math.inf, (("sub", (math.inf,)), ("neg", ()))),
        (0.0, (("div", (0.0,)), ("clamp", (-1.0, 1.0)))),
    ]
    for value, steps in cases:
        got = torch.empty(37, dtype=TORCH_DTYPES[dtype])
        unary = native.unary_codes(steps)
        native.fill([native.piece(got, "fill", (value,), seed=0, tensor_id=0, start=0, steps=(1,), unary=unary)])
        assert set(patterns(got).tolist()) == {_NANS[dtype]}, (value, steps)
        assert got.isnan().all()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_steps_are_one_ieee_operation_each(isa: str, dtype: str) -> None:
    """NumPy's operations, in the working precision: no division by a reciprocal, no fp32 operand in fp64."""
    real = np.dtype(dtype).type

    def draw(*steps: tuple[str, tuple[float, ...]]) -> np.ndarray:
        got = torch.empty(20_003, dtype=TORCH_DTYPES[dtype])
        rounded = [(op, tuple(float(real(arg)) for arg in args)) for op, args in steps]
        where = dict(seed=3, tensor_id=4, start=1, steps=(1,), unary=native.unary_codes(rounded))
        native.fill([native.piece(got, "normal", (1.0, 0.0), **where)])
        return got.numpy()

    x, s = draw(), real(0.1)
    wanted = {
        "add": x + s,
        "sub": x - s,
        "mul": x * s,
        "div": x / s,
        "clamp_min": np.maximum(x, s),
        "clamp_max": np.minimum(x, s),
    }
    for op, want in wanted.items():
        assert_bitwise_equal(draw((op, (0.1,))).view(f"u{real().nbytes}"), want.view(f"u{real().nbytes}"), op)
    chain = draw(("mul", (0.1,)), ("add", (0.3,)), ("div", (7.0,)), ("neg", ()), ("clamp", (-0.07, math.inf)))
    want = np.maximum(-((x * s + real(0.3)) / real(7.0)), real(-0.07))
    assert_bitwise_equal(chain.view(f"u{real().nbytes}"), want.view(f"u{real().nbytes}"), "chain")


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_a_constant_keeps_its_sign(isa: str, dtype: str) -> None:
    """Zero's too, and through steps: torch's own -0.0 and x * -1 do."""
    for value, steps in [(-0.0, ()), (0.0, (("neg", ()),)), (0.0, (("mul", (-1.0,)),)), (-0.0, (("sub", (0.0,)),))]:
        got = torch.empty(5, dtype=TORCH_DTYPES[dtype])
        unary = native.unary_codes(steps)
        native.fill([native.piece(got, "fill", (value,), seed=0, tensor_id=0, start=0, steps=(1,), unary=unary)])
        assert set(patterns(got).tolist()) == {1 << (8 * got.element_size() - 1)}, (value, steps)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_draw_that_steps_follow_is_rounded_once(isa: str, dtype: str) -> None:
    """A uniform's top is then fp32's: the least fraction of it below the narrow type's top counts."""
    results = []
    for kind in (torch.float32, TORCH_DTYPES[dtype]):
        got = torch.empty(50_001, dtype=kind)
        unary = native.unary_codes((("mul", (3.0,)), ("sub", (1.5,))))
        where = dict(seed=5, tensor_id=6, start=7, steps=(1,))
        native.fill([native.piece(got, "uniform", (0.0, 1.0), unary=unary, **where)])
        results.append(got)
    wide, narrow = results
    assert_bitwise_equal(patterns(narrow), patterns(wide.to(TORCH_DTYPES[dtype])), dtype)
    assert (wide.to(TORCH_DTYPES[dtype]) == 1.5).any()


def test_an_instruction_set_shares_no_function_with_others(tmp_path: Path) -> None:
    """Not even without optimisation. The linker keeps one copy of a function that several objects define (weak, W or V;
    unique, u), and that copy may need AVX-512, or take vectors of another width: wrong bits, which no test of an
    optimised build sees."""
    compiler, nm = shutil.which("c++"), shutil.which("nm")
    if not compiler or not nm:
        pytest.skip("needs a C++ compiler, as the build does")
    sets = {"baseline": []}
    if "avx2" in _native.available_isas():
        flags = re.findall(r"SHARDINIT_FLAGS_(\w+) (.*)\)", (ROOT / "CMakeLists.txt").read_text())
        sets |= {name: options.split() for name, options in flags}
        assert list(sets) == ["baseline", "avx2", "avx512"]
    for (name, options), file in itertools.product(sets.items(), ("kernels", "digest_kernels")):
        made = tmp_path / f"{name}.o"
        source = ["-c", str(ROOT / "csrc" / f"{file}.cpp"), "-o", str(made)]
        subprocess.run([compiler, "-std=c++17", "-O0", "-w", *options, f"-DSHARDINIT_ISA={name}", *source], check=True)
        symbols = subprocess.run([nm, "-C", str(made)], capture_output=True, text=True, check=True).stdout
        shared = [line for line in symbols.splitlines() if re.match(r"[0-9a-f ]+ [WwVvu] ", line)]
        assert not [line for line in shared if "DW.ref." not in line], name
        assert f"T shardinit::{'digest_run' if 'digest' in file else 'kernels'}_{name}(" in symbols
