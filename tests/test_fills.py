"""The raw fills equal the independent reference to the last bit, on every instruction set and thread count."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import TORCH_DTYPES, assert_bitwise_equal, patterns

import torch_shardinit as shardinit
from torch_shardinit import _native, reference, reference_draws

INF = math.inf
SEED, TENSOR_ID = -(2**62) - 7, 0xFEDCBA9876543210

# (distribution, keyword arguments): ordinary ones, and those at the edges of each rule in docs/stream.md
CASES = [
    ("uniform", dict(a=0.0, b=1.0)),
    ("uniform", dict(a=-0.3, b=0.7)),
    ("uniform", dict(a=1.003, b=1.005)),  # bfloat16 has two values here, fp8 one
    ("uniform", dict(a=0.5, b=0.5)),
    ("uniform", dict(a=-3e-42, b=5e-42)),  # subnormal
    ("uniform", dict(a=-1e38, b=2e38)),  # beyond fp16 and fp8
    ("uniform", dict(a=-1.0, b=0.0)),
    ("uniform", dict(a=-5e-45, b=0.0)),  # rounds up to 0, which is not below b
    ("uniform", dict(a=-2e-323, b=0.0)),
    ("normal", dict(std=1.0, mean=0.0)),
    ("normal", dict(std=0.02, mean=0.25)),
    ("normal", dict(std=0.0, mean=-0.0)),
    ("normal", dict(std=1e-40, mean=0.0)),
    ("normal", dict(std=3e38, mean=0.0)),  # overflows to infinity
    ("trunc_normal", dict(std=1.0, mean=0.0, a=-2.0, b=2.0)),
    ("trunc_normal", dict(std=0.02, mean=0.1, a=-0.05, b=0.3)),
    ("trunc_normal", dict(std=1.0, mean=0.0, a=5.0, b=6.0)),
    ("trunc_normal", dict(std=1.0, mean=0.0, a=12.0, b=INF)),
    ("trunc_normal", dict(std=1.0, mean=0.0, a=-INF, b=-5.5)),
    ("trunc_normal", dict(std=1.0, mean=0.0, a=-INF, b=INF)),
    ("trunc_normal", dict(std=1.0, mean=0.0, a=5.0, b=5.001)),
    ("trunc_normal", dict(std=2.0, mean=3.0, a=3.0, b=3.1)),
    ("trunc_normal", dict(std=1.0, mean=0.0, a=1.88, b=2.12)),  # barely narrow: all terms of the series count
    ("trunc_normal", dict(std=1.0, mean=0.0, a=1.9, b=2.15)),  # barely wide
    ("trunc_normal", dict(std=1.0, mean=0.0, a=-0.125, b=0.125)),
    ("trunc_normal", dict(std=1.0, mean=0.0, a=1.5, b=1.5)),
    ("exponential", dict(lambd=0.7)),
    ("exponential", dict(lambd=1e30)),
    ("exponential", dict(lambd=1e-37)),  # overflows to infinity, past words near 2^32
    ("log_normal", dict(mean=0.5, std=2.0)),
    ("log_normal", dict(mean=-95.0, std=5.0)),  # subnormals of fp32
    ("log_normal", dict(mean=80.0, std=10.0)),
    ("cauchy", dict(median=0.1, sigma=3.0)),
    ("cauchy", dict(median=-0.0, sigma=1e30)),
    ("geometric", dict(p=0.3)),
    ("geometric", dict(p=1e-9)),
    ("geometric", dict(p=2.0**-60)),  # 1 - p is 1 in fp64
    ("bernoulli", dict(p=0.3)),
    ("bernoulli", dict(p=0.0)),
    ("bernoulli", dict(p=1.0)),
    ("random", dict(low=-5, high=100)),
    ("random", dict(low=0, high=2**24 + 3)),  # more integers than fp32 tells apart
    ("random", dict(low=-(2**63), high=2**63 - 2048)),
]
IDS = [f"{name}-{'-'.join(f'{v:g}' for v in kw.values())}" for name, kw in CASES]

EDGES = [(2**32 - 3, 11), (2**34 - 5, 13), (2**34, 4), (2**63 - 9, 9)]


def fill(name: str, tensor: torch.Tensor | np.ndarray, kwargs: dict[str, float], **where: object) -> object:
    return getattr(shardinit, f"{name}_")(tensor, **kwargs, **{"seed": SEED, "tensor_id": TENSOR_ID, **where})


def expected(name: str, index: np.ndarray, kwargs: dict[str, float], dtype: str) -> np.ndarray:
    return reference_draws.DRAWS[name](index, **kwargs, dtype=dtype, seed=SEED, tensor_id=TENSOR_ID)


def indices(start: int, count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint64) + np.uint64(start)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize(("name", "kwargs"), CASES, ids=IDS)
def test_bytes_equal_the_reference(isa: str, name: str, kwargs: dict[str, float], dtype: str) -> None:
    size = 300 if dtype == "float64" else 2500
    want = expected(name, indices(0, size), kwargs, dtype)
    for start in (0, 1, 2, 3, 4, 7, 126, 129):
        for count in (*range(10), 31, 127, 128, 129, size - start):
            if start + count > size:
                continue
            got = torch.empty(count, dtype=TORCH_DTYPES[dtype])
            fill(name, got, kwargs, offset=start)
            assert_bitwise_equal(patterns(got), want[start : start + count], f"{isa} start {start} count {count}")


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("name", list(dict.fromkeys(name for name, _ in CASES)))
def test_bytes_equal_the_reference_at_far_offsets(isa: str, name: str, dtype: str) -> None:
    kwargs = next(kw for case, kw in CASES if case == name)
    for start, count in EDGES:
        got = torch.empty(count, dtype=TORCH_DTYPES[dtype])
        fill(name, got, kwargs, offset=start)
        assert_bitwise_equal(patterns(got), expected(name, indices(start, count), kwargs, dtype), f"offset {start}")


INTEGERS = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("bernoulli", dict(p=0.3)), ("bernoulli", dict(p=1.0)), ("random", dict(low=0, high=2)), ("random", dict())],
)
def test_integers_equal_the_reference(isa: str, name: str, kwargs: dict[str, float], dtype: str) -> None:
    if name == "random" and not kwargs:
        kwargs = dict(low=0, high=2 if dtype == "bool" else np.iinfo(dtype).max + 1 >> (dtype == "uint64"))
    for start, count in [(0, 1000), (3, 141), *EDGES]:
        want = expected(name, indices(start, count), kwargs, dtype)
        array = np.empty(count, dtype)
        fill(name, array, kwargs, offset=start)
        assert_bitwise_equal(array.view(want.dtype), want, f"offset {start}")
        tensor = torch.empty((count, 2), dtype=getattr(torch, dtype))[:, 1]
        fill(name, tensor, kwargs, offset=start)
        assert_bitwise_equal(tensor.contiguous().numpy().view(want.dtype), want, f"tensor, offset {start}")


def test_random_without_bounds_is_torchs_range() -> None:
    for dtype in INTEGERS:
        if dtype == "uint64":  # 2^64 numbers are one too many
            with pytest.raises(ValueError, match="high - low must be in"):
                shardinit.random_(torch.empty(3, dtype=torch.uint64))
            continue
        got = shardinit.random_(torch.empty(100_000, dtype=getattr(torch, dtype)), tensor_id=dtype)
        top = 1 if dtype == "bool" else np.iinfo(dtype).max
        assert int(got.to(torch.int64).min()) >= 0 and int(got.to(torch.int64).max()) > top * 0.99
    for dtype, digits in (("float32", 24), ("bfloat16", 8), ("float64", 53)):
        got = shardinit.random_(torch.empty(100_000, dtype=getattr(torch, dtype)), tensor_id=dtype).double()
        assert 0 <= got.min() < 2**digits * 0.01 and 2**digits * 0.99 < got.max() <= 2**digits
        assert torch.equal(got, got.round())


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
def test_random_bits_equal_the_reference(isa: str, dtype: str) -> None:
    for start, count in [(0, 1000), (3, 141), *EDGES]:
        got = np.empty(count, dtype)
        fill("random_bits", got, {}, offset=start)
        want = reference.random_bits(indices(start, count), dtype=dtype, seed=SEED, tensor_id=TENSOR_ID)
        assert_bitwise_equal(got.view(want.dtype), want, f"offset {start}")
        tensor = torch.empty(count, dtype=getattr(torch, dtype))
        fill("random_bits", tensor, {}, offset=start)
        assert_bitwise_equal(tensor.numpy().view(want.dtype), want, f"tensor, offset {start}")


def test_philox_known_answers() -> None:
    """The three vectors published with Random123 (kat_vectors, philox4x32-10)."""
    ones = 0xFFFFFFFF
    assert _native.philox(0, 0, 0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert _native.philox(ones, ones, ones, ones, 2**64 - 1) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert _native.philox(*pi, 0x299F31D0A4093822) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("name", list(dict.fromkeys(name for name, _ in CASES)))
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_threads_and_instruction_sets_do_not_matter(name: str, dtype: str) -> None:
    """Sizes at which the work is really shared out; the least set without FMA hardware is the yardstick."""
    kwargs = next(kw for case, kw in CASES if case == name)
    size = 3 * 2**16 + 7
    results = []
    before = torch.get_num_threads()
    try:
        for isa in _native.available_isas():
            _native.force_isa(isa)
            for threads in (1, 2, 3, 8):
                torch.set_num_threads(threads)
                results.append(patterns(fill(name, torch.empty(size, dtype=TORCH_DTYPES[dtype]), kwargs, offset=5)))
    finally:
        torch.set_num_threads(before)
        _native.force_isa("")
    assert len(results) == 4 * len(_native.available_isas())
    for result in results[1:]:
        assert_bitwise_equal(result, results[0], dtype)


@pytest.mark.parametrize("dtype", [name for name in TORCH_DTYPES if name not in ("float64", "float32")])
@pytest.mark.parametrize("name", ["normal", "trunc_normal"])
def test_narrow_dtype_is_the_fp32_fill_rounded_once(name: str, dtype: str) -> None:
    """Where torch rounds by our rule it is a second witness: bf16 and fp16 always, fp8 where nothing overflows."""
    kwargs = dict(std=1.5, mean=0.1) if name == "normal" else dict(std=1.0, mean=0.0, a=-3.0, b=4.0)
    wide = fill(name, torch.empty(100_003), kwargs)
    narrow = fill(name, torch.empty(100_003, dtype=TORCH_DTYPES[dtype]), kwargs)
    assert_bitwise_equal(patterns(narrow), patterns(wide.to(TORCH_DTYPES[dtype])), dtype)


def test_fp64_refines_the_same_draws() -> None:
    """The low words move a normal most where p is at an end of its range: the bound is wider than an fp32 ulp."""
    for name, kwargs in [("normal", {}), ("uniform", {}), ("trunc_normal", {})]:
        wide = fill(name, torch.empty(100_000, dtype=torch.float64), kwargs)
        narrow = fill(name, torch.empty(100_000), kwargs)
        assert (wide - narrow).abs().max() < 1e-5, name
        assert (wide - narrow).abs().mean() < 1e-7, name


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_uniform_stays_below_b(isa: str, dtype: str) -> None:
    bounds = [
        (0.0, 1.0),
        (-1.0, 0.0),
        (1.0, 1.001),
        (0.9, 1.0),
        (-1.0, -0.999),
        (447.0, 449.0),
        (1e5, 2e5),
        (0.0, 1e-30),
    ]
    for a, b in bounds:
        values = shardinit.uniform_(torch.empty(50_000, dtype=TORCH_DTYPES[dtype]), a, b, tensor_id=3).double()
        limit = b if dtype == "float64" else float(np.float32(b))
        assert values.max() < limit, (a, b, values.max())
        assert not values.isnan().any()


def test_environment_variable_forces_the_instruction_set() -> None:
    code = "import torch, torch_shardinit as s; from torch_shardinit import _native; print(_native.active_isa())"
    for isa in _native.available_isas():
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "SHARDINIT_ISA": isa},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == isa
    code = "import torch, torch_shardinit as s; s.normal_(torch.empty(3))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "SHARDINIT_ISA": "mmx"}, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "SHARDINIT_ISA must be one that this processor runs (baseline" in done.stderr
    assert "got 'mmx'" in done.stderr


def _libm() -> ctypes.CDLL:
    return ctypes.CDLL("libm.so.6")


@pytest.mark.parametrize("rounding", [0x400, 0x800, 0xC00])  # FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO on x86-64
@pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.uname().machine != "x86_64", reason="x86-64 rounding modes"
)
def test_caller_rounding_mode_neither_matters_nor_changes(isa: str, rounding: int) -> None:
    libm = _libm()
    shapes = [
        ("normal", dict(std=0.02, mean=0.25)),
        ("uniform", dict(a=-0.3, b=0.7)),
        ("trunc_normal", dict(a=4.0, b=9.0)),
    ]
    want = [patterns(fill(name, torch.empty(3 * 2**16 + 1), kwargs)) for name, kwargs in shapes]
    threads = torch.get_num_threads()
    torch.set_num_threads(3)  # a new thread inherits the mode
    assert libm.fesetround(rounding) == 0
    try:
        got = [fill(name, torch.empty(3 * 2**16 + 1), kwargs) for name, kwargs in shapes]
        assert libm.fegetround() == rounding
    finally:
        libm.fesetround(0)
        torch.set_num_threads(threads)
    for result, wanted in zip(got, want, strict=True):
        assert_bitwise_equal(patterns(result), wanted, f"rounding mode {rounding:#x}")


def test_flush_to_zero_neither_matters_nor_changes(isa: str) -> None:
    shapes = [("normal", dict(std=1e-40, mean=0.0)), ("uniform", dict(a=-3e-42, b=5e-42))]
    size = 3 * 2**16 + 1
    want = [patterns(fill(name, torch.empty(size), kwargs)) for name, kwargs in shapes]
    assert all((w & 0x7FFFFFFF).any() for w in want)
    subnormal = torch.tensor([1e-40])
    threads = torch.get_num_threads()
    torch.set_num_threads(3)  # a new thread inherits the mode
    if not torch.set_flush_denormal(True):
        pytest.fail("this processor has no flush-to-zero mode to test")
    try:
        got = [fill(name, torch.empty(size), kwargs) for name, kwargs in shapes]
        assert (subnormal * 1.0).item() == 0.0, "the caller's mode must be back"
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    for result, wanted in zip(got, want, strict=True):
        assert_bitwise_equal(patterns(result), wanted, "flush to zero")


def test_no_torch_generator_is_read_or_moved() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = patterns(fill("normal", torch.empty(1000), {}))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert_bitwise_equal(patterns(fill("normal", torch.empty(1000), {})), first)


def test_seed_and_id_select_the_stream() -> None:
    def draw(**where: object) -> bytes:
        return patterns(fill("normal", torch.empty(64), {}, **where)).tobytes()

    base = draw()
    others = [
        draw(seed=SEED + 1),
        draw(tensor_id=TENSOR_ID ^ 1),
        draw(tensor_id=TENSOR_ID ^ 2**63),
        draw(seed=SEED ^ 2**62),
    ]
    assert len({base, *others}) == 5
    assert draw(seed=-1) == draw(seed=2**64 - 1)
    assert draw(tensor_id="w", draw=3) == draw(tensor_id=shardinit.tensor_id("w", 3))
    assert draw(tensor_id="w") != draw(tensor_id="w", draw=1)


def test_default_seed() -> None:
    code = (
        "import torch, torch_shardinit as s\n"
        "a = s.normal_(torch.empty(8), tensor_id=1)\n"
        "assert torch.equal(a, s.normal_(torch.empty(8), tensor_id=1, seed=0))\n"
        "s.manual_seed(5)\n"
        "assert torch.equal(s.normal_(torch.empty(8), tensor_id=1), s.normal_(torch.empty(8), tensor_id=1, seed=5))\n"
        "s.manual_seed(-1)\n"
        "a = s.normal_(torch.empty(8), tensor_id=1)\n"
        "assert torch.equal(a, s.normal_(torch.empty(8), tensor_id=1, seed=2**64 - 1))\n"
        "print('ok')\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "ok", done.stderr


def test_version_counter_is_bumped_and_leaf_parameters_are_filled() -> None:
    parameter = torch.nn.Parameter(torch.zeros(5))
    version = parameter._version
    assert shardinit.normal_(parameter, tensor_id="p") is parameter
    assert parameter._version > version
    assert parameter.requires_grad and parameter.is_leaf and parameter.detach().abs().min() > 0
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    z = y.pow(2).sum()
    shardinit.normal_(y.detach(), tensor_id="y")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()
    with torch.inference_mode():
        inference = shardinit.normal_(torch.empty(4), tensor_id=1)
    assert torch.equal(inference, shardinit.normal_(torch.empty(4), tensor_id=1))
    shardinit.normal_(inference, tensor_id=1)


def test_flat_param_shard_as_the_readme_says() -> None:
    whole = shardinit.normal_(torch.empty(6, 10), 0.02, seed=1, tensor_id="w")
    shard = torch.empty(17)
    shardinit.normal_(shard, 0.02, seed=1, tensor_id="w", offset=23)
    assert torch.equal(shard, whole.flatten()[23:40])


def test_second_fill_without_an_id_warns_once() -> None:
    code = (
        "import torch, warnings, torch_shardinit as s\n"
        "a, b, c = torch.empty(8), torch.empty(8), torch.empty(8)\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    s.normal_(a); s.normal_(a); s.normal_(b, seed=1)\n"
        "    s.normal_(b, offset=8); s.normal_(c, tensor_id=0, seed=9)\n"
        "    assert not caught, [str(w.message) for w in caught]\n"
        "    s.normal_(c)\n"
        "    assert len(caught) == 1 and 'left tensor_id out' in str(caught[0].message), caught\n"
        "    s.normal_(torch.empty(8))\n"
        "    assert len(caught) == 1\n"
        "print('ok')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "ok", done.stderr
