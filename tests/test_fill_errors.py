"""Bad input: each a TypeError or ValueError that says what must hold and what came, and the tensor is unchanged."""

# ruff: noqa: E501  (the table below keeps a case on a line)

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import torch_shardinit as shardinit
from torch_shardinit import _native
from torch_shardinit.draws import DISTRIBUTION_CODES, DTYPE_CODES

NAN, INF = math.nan, math.inf


def _marked(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, 7.0).to(dtype)


T = TypeError
V = ValueError
normal, uniform, trunc, bits = shardinit.normal_, shardinit.uniform_, shardinit.trunc_normal_, shardinit.random_bits_

# (call on a tensor of shape (4, 6), error, what the message says)
CALLS: list[tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = [
    (lambda t: normal(t, -1.0), V, "normal_: std must be finite and >= 0, got -1.0"),
    (lambda t: normal(t, NAN), V, "normal_: std must not be NaN"),
    (lambda t: normal(t, INF), V, "normal_: std must be finite and >= 0, got inf"),
    (lambda t: normal(t, 1e39), V, "normal_: std must fit in fp32, got 1e+39"),
    (lambda t: normal(t, True), T, "normal_: std must be a real number, got True (bool)"),
    (lambda t: normal(t, "1"), T, "normal_: std must be a real number, got '1' (str)"),
    (lambda t: normal(t, None), T, "normal_: std must be a real number, got None (NoneType)"),
    (lambda t: normal(t, torch.ones(())), T, "normal_: std must be a real number, got tensor(1.) (Tensor)"),
    (lambda t: normal(t, 1j), T, "normal_: std must be a real number, got 1j (complex)"),
    (lambda t: normal(t, 10**400), V, "normal_: std must fit in a float, got an int beyond its range"),
    (lambda t: normal(t, np.bool_(True)), T, "normal_: std must be a real number"),
    (lambda t: normal(t, np.timedelta64(1, "s")), T, "normal_: std must be a real number, got np.timedelta64(1,'s')"),
    (lambda t: normal(t, np.array(1.0)), T, "normal_: std must be a real number, got array(1.) (ndarray)"),
    (lambda t: normal(t, mean=NAN), V, "normal_: mean must not be NaN"),
    (lambda t: normal(t, mean=-INF), V, "normal_: mean must be finite, got -inf"),
    (lambda t: uniform(t, 1.0, 0.0), V, "uniform_: a must be <= b, got a=1.0, b=0.0"),
    (lambda t: uniform(t, -INF, 0.0), V, "uniform_: a must be finite, got -inf"),
    (lambda t: uniform(t, 0.0, NAN), V, "uniform_: b must not be NaN"),
    (lambda t: uniform(t, -3e38, 3e38), V, "uniform_: b - a must be finite in fp32, got a="),
    (lambda t: uniform(t.double(), -1e308, 1e308), V, "uniform_: b - a must be finite in fp64"),
    (lambda t: uniform(t.to(torch.float8_e4m3fn), -1000, -448), V, "uniform_: float8_e4m3fn must have a value below b"),
    (lambda t: trunc(t, 0.0), V, "trunc_normal_: std must be finite and > 0, got 0.0"),
    (lambda t: trunc(t, 1e-50), V, "trunc_normal_: std must be finite and > 0, got 1e-50"),
    (lambda t: trunc(t, a=2.0, b=-2.0), V, "trunc_normal_: a must be <= b, got a=2.0, b=-2.0"),
    (lambda t: trunc(t, a=NAN), V, "trunc_normal_: a must not be NaN"),
    (
        lambda t: trunc(t, a=13.0, b=14.0),
        V,
        "trunc_normal_: [a, b] must come within 12 std of the mean, got [13.0, 14.0]",
    ),
    (lambda t: trunc(t, a=-INF, b=-13.0), V, "trunc_normal_: [a, b] must come within 12 std"),
    (lambda t: trunc(t, a=INF, b=INF), V, "trunc_normal_: [a, b] must come within 12 std"),
    (lambda t: normal(t, seed=2**64), V, f"seed must be in [-2^63, 2^64), got {2**64}"),
    (lambda t: normal(t, seed=-(2**63) - 1), V, "seed must be in [-2^63, 2^64), got -9223372036854775809"),
    (lambda t: normal(t, seed=True), T, "seed must be an int, got True (bool)"),
    (lambda t: normal(t, seed=1.0), T, "seed must be an int, got 1.0 (float)"),
    (lambda t: normal(t, seed="1"), T, "seed must be an int, got '1' (str)"),
    (lambda t: normal(t, seed=np.array(3.7)), T, "seed must be an int, got array(3.7) (ndarray)"),
    (lambda t: normal(t, seed=np.array([3])), T, "seed must be an int, got array([3]) (ndarray)"),
    (lambda t: normal(t, seed=np.bool_(True)), T, "seed must be an int, got np.True_ (bool)"),
    (lambda t: normal(t, seed=np.timedelta64(3, "s")), T, "seed must be an int, got np.timedelta64(3,'s')"),
    (lambda t: normal(t, seed=torch.tensor(3)), T, "seed must be an int, got tensor(3) (Tensor)"),
    (lambda t: normal(t, tensor_id=-1), V, "normal_: tensor_id must be in [0, 2^64), got -1"),
    (lambda t: normal(t, tensor_id=2**64), V, f"normal_: tensor_id must be in [0, 2^64), got {2**64}"),
    (lambda t: normal(t, tensor_id=1.5), T, "normal_: tensor_id must be an int, got 1.5 (float)"),
    (lambda t: normal(t, tensor_id=b"w"), T, "normal_: tensor_id must be an int, got b'w' (bytes)"),
    (lambda t: normal(t, tensor_id="\ud800"), V, "tensor_id: name must have a UTF-8 form"),
    (lambda t: normal(t, tensor_id=3, draw=1), V, "normal_: draw goes with a tensor_id that is a name, got draw=1"),
    (lambda t: normal(t, tensor_id="w", draw=-1), V, "tensor_id: draw must be in [0, 2^64), got -1"),
    (lambda t: normal(t, draw=False), T, "normal_: draw must be an int, got False (bool)"),
    (lambda t: normal(t, offset=-1), V, "normal_: offset must be >= 0, got -1"),
    (
        lambda t: normal(t, offset=2**63 - 23),
        V,
        f"normal_: offset + elements must be at most 2^63, got {2**63 - 23} + 24",
    ),
    (lambda t: normal(t, offset=1.0), T, "normal_: offset must be an int, got 1.0 (float)"),
    (lambda t: normal(t, offset=True), T, "normal_: offset must be an int, got True (bool)"),
    (lambda t: normal(t, offset=(0, 0)), V, "normal_: an offset of coordinates needs global_shape, got offset=(0, 0)"),
    (
        lambda t: normal(t, offset=(0, 1), global_shape=(4, 6)),
        V,
        "normal_: the box must lie inside global_shape [4, 6], got offset 1",
    ),
    (
        lambda t: normal(t, offset=(0,), global_shape=(4, 6)),
        V,
        "normal_: offset, global_shape and tensor must have as many dimensions",
    ),
    (lambda t: normal(t, offset=(0, -1), global_shape=(4, 6)), V, "normal_: offset[1] must be >= 0, got -1"),
    (
        lambda t: normal(t, offset=(0, 0.0), global_shape=(4, 6)),
        T,
        "normal_: offset[1] must be an int, got 0.0 (float)",
    ),
    (
        lambda t: normal(t, offset=3, global_shape=(4, 6)),
        V,
        "normal_: offset + elements must be at most the 24 of global_shape [4, 6], got 3 + 24",
    ),
    (
        lambda t: normal(t, global_shape=(8, 6)),
        V,
        "normal_: a shard needs offset= beside global_shape, got shape [4, 6] of [8, 6]",
    ),
    (
        lambda t: normal(t, offset=6, global_shape=(4, 12)),
        V,
        "normal_: offset must be a tuple of coordinates where the shard is a box, got 6 for shape [4, 6] of global_shape [4, 12]",
    ),
    (
        lambda t: normal(t, offset=np.array([0, 0]), global_shape=(4, 6)),
        T,
        "normal_: offset must be an int, got array([0, 0]) (ndarray)",
    ),
    (
        lambda t: normal(t, offset=(0, 0), global_shape=(2**40, 2**40)),
        V,
        "normal_: global_shape must hold at most 2^63 elements",
    ),
    (
        lambda t: normal(t, offset=0, global_shape=24),
        T,
        "normal_: global_shape must be a sequence of ints, got 24 (int)",
    ),
    (
        lambda t: normal(t.int()),
        T,
        "normal_: dtype must be one of float64, float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, got torch.int32",
    ),
    (lambda t: normal(t.bool()), T, "got torch.bool"),
    (lambda t: normal(t.to(torch.complex64)), T, "got torch.complex64"),
    (lambda t: bits(t), T, "random_bits_: dtype must be one of int32, uint32, int64, uint64, got torch.float32"),
    (lambda t: normal(t.to_sparse()), V, "normal_: tensor must be strided, got layout torch.sparse_coo"),
    (
        lambda t: normal(t[0].expand(3, 6)),
        V,
        "normal_: elements must not share memory (an expanded or overlapping view?), got shape [3, 6], strides [0, 1]",
    ),
    (lambda t: normal(t.as_strided((3, 6), (3, 1))), V, "normal_: elements must not share memory"),
    (lambda t: normal(t.to("meta")), V, "normal_: tensor must hold memory, got one on meta"),
    (lambda t: normal(t.tolist()), T, "normal_: tensor must be a torch.Tensor or numpy.ndarray, got list"),
    (
        lambda t: normal(t.as_subclass(_Subclass)),
        T,
        "normal_: tensor must be a plain torch.Tensor, Parameter or DTensor, got _Subclass",
    ),
]


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(("call", "kind", "message"), CALLS, ids=[f"{i}-{m[:40]}" for i, (_, _, m) in enumerate(CALLS)])
def test_error(call: Callable[[torch.Tensor], Any], kind: type[Exception], message: str) -> None:
    tensor = _marked(4, 6)
    with pytest.raises(kind, match=re.escape(message)):
        call(tensor)
    assert (tensor == 7.0).all()


def test_error_arrays() -> None:
    readonly = np.full(4, 7.0, np.float32)
    readonly.flags.writeable = False
    with pytest.raises(ValueError, match="array must be writable, got a read-only one"):
        normal(readonly)
    with pytest.raises(TypeError, match="array must be in native byte order, got dtype >f4"):
        normal(np.full(4, 7.0, ">f4"))
    with pytest.raises(TypeError, match=r"dtype must be one of .*, got complex64"):
        normal(np.zeros(4, np.complex64))
    with pytest.raises(TypeError, match=r"dtype must be one of .*, got object"):
        normal(np.zeros(4, object))
    record = np.zeros(4, [("a", "f4"), ("b", "i2")])
    with pytest.raises(ValueError, match="strides must be whole elements of 4 bytes"):
        normal(record["a"])
    raw = np.zeros(17, np.uint8)
    with pytest.raises(ValueError, match="array must be aligned to its 4-byte elements"):
        normal(raw[1:].view(np.float32))
    with pytest.raises(ValueError, match="elements must not share memory"):
        normal(np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (4, 4), (4, 4)))


def test_error_masked_array() -> None:
    masked = np.ma.masked_array(np.full(3, 7.0, np.float32), [True, False, True])
    with pytest.raises(TypeError, match="array must not be masked"):
        normal(masked)
    assert (masked.data == 7.0).all()


def test_error_memory_that_is_not_there() -> None:
    """FSDP frees the storage of an unsharded parameter and keeps its shape: writing there would be a crash."""
    freed = _marked(4, 6)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"normal_: tensor must lie in its storage, got one that needs 96 bytes of 0"):
        normal(freed)
    short = _marked(4, 6)[1:]
    short.untyped_storage().resize_(95)
    with pytest.raises(ValueError, match="needs 96 bytes of 95"):
        normal(short)
    short.untyped_storage().resize_(96)
    normal(short, tensor_id=1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        odd = torch.frombuffer(bytearray(33), dtype=dtype, offset=1)
        with pytest.raises(ValueError, match="normal_: tensor must be aligned to its"):
            normal(odd)
        assert (odd == 0).all()
    for address, message in ((0, "holds no memory"), (4097, "must be aligned")):  # where a Plan's pieces enter
        piece = (address, DTYPE_CODES["float32"], (4,), (1,), 0, (1,), DISTRIBUTION_CODES["fill"], (1.0,), 0, 0, ())
        with pytest.raises(ValueError, match=message):
            _native.fill([piece], 1)


@pytest.mark.filterwarnings("ignore")
def test_error_tensors_that_are_no_memory() -> None:
    with pytest.raises(ValueError, match="normal_: tensor must not be nested"):
        normal(torch.nested.nested_tensor([_marked(2), _marked(3)]))
    with pytest.raises(TypeError, match="Parameter or DTensor, got UninitializedParameter"):
        normal(torch.nn.LazyLinear(3).weight)
    inside = "normal_: tensor must not be inside a torch.func transform"
    batch = _marked(3, 4)
    with pytest.raises(ValueError, match=inside):
        torch.func.vmap(lambda row: normal(row, tensor_id=1))(batch)
    with pytest.raises(ValueError, match=inside):
        torch.func.grad(lambda x: normal(x * 1, tensor_id=1).sum())(batch)
    assert (batch == 7.0).all()


def test_error_flat_parameter_without_an_offset() -> None:
    from torch.distributed.fsdp._flat_param import FlatParameter

    flat = FlatParameter(torch.full((8,), 7.0))
    with pytest.raises(ValueError, match="a FlatParameter needs offset="):
        normal(flat)
    assert (flat == 7.0).all()
    normal(flat, offset=3, tensor_id="w")
    assert torch.equal(flat.detach(), normal(torch.empty(11), tensor_id="w")[3:])


def test_error_manual_seed_and_tensor_id() -> None:
    with pytest.raises(TypeError, match="seed must be an int, got True"):
        shardinit.manual_seed(True)
    with pytest.raises(ValueError, match="seed must be in"):
        shardinit.manual_seed(2**64)
    with pytest.raises(TypeError, match="tensor_id: name must be a str, got 3"):
        shardinit.tensor_id(3)  # type: ignore[arg-type]


def test_numbers_that_are_fine() -> None:
    tensor = _marked(4, 6)
    normal(tensor, np.float64(1.0), mean=np.int32(0), seed=np.int64(3), tensor_id=np.uint64(5), offset=np.int64(2))
    assert torch.equal(tensor, normal(torch.empty(4, 6), 1, seed=3, tensor_id=5, offset=2))
