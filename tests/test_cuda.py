"""On a GPU: the CPU's bytes, the current stream and device, graphs, batches, and errors that say what was launched."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import TORCH_DTYPES, assert_bitwise_equal, patterns
from torch import nn

import torch_shardinit as shardinit
from torch_shardinit import _native, native

pytestmark = pytest.mark.cuda

CASES = [
    ("uniform", dict(a=-0.3, b=0.7)),
    ("uniform", dict(a=-3e-42, b=5e-42)),
    ("normal", dict(std=0.02, mean=0.25)),
    ("normal", dict(std=3e38)),
    ("trunc_normal", dict(a=-2.0, b=2.0)),
    ("trunc_normal", dict(a=5.0, b=7.0)),
    ("trunc_normal", dict(std=2.0, mean=3.0, a=3.0, b=3.1)),
    ("trunc_normal", dict(a=-math.inf, b=math.inf)),
    ("trunc_normal", dict(a=-1.0, b=8.0)),
    # zeros of both signs and subnormals, where flushing would show
    ("uniform", dict(a=-2e-44, b=1.4e-45)),
    ("uniform", dict(a=-(2.0**-120), b=2.0**-120)),
    ("normal", dict(std=1e-39, mean=1e-41)),
    ("trunc_normal", dict(std=1e-39, a=-2e-39, b=2e-39)),
    ("exponential", dict(lambd=0.7)),
    ("log_normal", dict(mean=-95.0, std=5.0)),
    ("log_normal", dict(mean=80.0, std=10.0)),
    ("cauchy", dict(median=0.1, sigma=3.0)),
    ("geometric", dict(p=1e-3)),
    ("bernoulli", dict(p=0.3)),
    ("random", dict(low=-5, high=2**40)),
]
EDGES = (0, 1, 3, 2**32 - 301, 2**34 - 302, 2**63 - 100_003)


def fill(name: str, tensor: torch.Tensor, kwargs: dict[str, float], **where: object) -> torch.Tensor:
    return getattr(shardinit, f"{name}_")(tensor, **kwargs, **{"seed": 7, "tensor_id": 11, **where})


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize(("name", "kwargs"), CASES)
def test_the_cpu_s_bytes(name: str, kwargs: dict[str, float], dtype: str) -> None:
    for first in EDGES:
        for skip in range(4):
            memory = torch.zeros(100_003 + skip + 8, dtype=TORCH_DTYPES[dtype], device="cuda")
            fill(name, memory[skip : skip + 100_003], kwargs, offset=first)
            want = fill(name, torch.empty(100_003, dtype=TORCH_DTYPES[dtype]), kwargs, offset=first)
            got = patterns(memory.cpu())
            assert_bitwise_equal(got[skip : skip + 100_003], patterns(want), f"{dtype} {first} {skip}")
            assert not got[:skip].any() and not got[skip + 100_003 :].any(), "memory beside the tensor was written"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_raw_words(dtype: torch.dtype) -> None:
    for first in EDGES:
        got = fill("random_bits", torch.empty(100_003, dtype=dtype, device="cuda"), {}, offset=first)
        want = fill("random_bits", torch.empty(100_003, dtype=dtype), {}, offset=first)
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers(dtype: torch.dtype) -> None:
    for first in EDGES:
        for name, kwargs in (("bernoulli", dict(p=0.3)), ("random", dict(low=0, high=2)), ("random", {})):
            got = fill(name, torch.empty(100_003, 2, dtype=dtype, device="cuda")[:, 1], kwargs, offset=first)
            want = fill(name, torch.empty(100_003, dtype=dtype), kwargs, offset=first)
            assert torch.equal(got.cpu(), want), (name, first)


@pytest.mark.parametrize("name", ["exp", "log", "sqrt", "erfinv"])
def test_functions(name: str) -> None:
    """Over numbers of both signs, large and small, NaN made on the way."""
    unary = native.unary_codes([("mul", (3.0,)), (name, ()), ("mul", (0.5,))])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for distribution, params in (("uniform", (-0.34, 0.34)), ("normal", (30.0, 0.0)), ("normal", (1e-40, 0.0))):
            tensors = [torch.empty(100_003, dtype=dtype, device=device) for device in ("cuda", "cpu")]
            for tensor in tensors:
                where = dict(seed=1, tensor_id=2, start=3, steps=(1,), unary=unary)
                native.fill([native.piece(tensor, distribution, params, **where)], tensor.device)
            assert_bitwise_equal(patterns(tensors[0].cpu()), patterns(tensors[1]), f"{name} {dtype} {params}")


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_boxes(dtype: str) -> None:
    """Columns of a matrix, a transposed one, rows with gaps, one element of many."""
    shape, offset = (300, 1000, 5), (17, 23, 1)
    for make in (
        lambda device: torch.zeros(64, 211, 3, dtype=TORCH_DTYPES[dtype], device=device),
        lambda device: torch.zeros(3, 211, 64, dtype=TORCH_DTYPES[dtype], device=device).permute(2, 1, 0),
        lambda device: torch.zeros(64, 211, 7, dtype=TORCH_DTYPES[dtype], device=device)[:, :, 2:5],
        lambda device: torch.zeros(1, 1, 1, dtype=TORCH_DTYPES[dtype], device=device),
        lambda device: torch.zeros(64, 1, 1, dtype=TORCH_DTYPES[dtype], device=device),
    ):
        where = dict(offset=offset, global_shape=shape)
        got, want = fill("normal", make("cuda"), {}, **where), fill("normal", make("cpu"), {}, **where)
        assert_bitwise_equal(patterns(got.cpu()), patterns(want))


def test_more_than_2_to_the_32_elements() -> None:
    """5 GB of fp8: the end of it equals the CPU's."""
    count = 2**32 + 2**30 + 77
    if torch.cuda.mem_get_info()[0] < count + 2**30:
        pytest.skip("needs 6 GB of free GPU memory")
    tensor = fill("uniform", torch.empty(count, dtype=torch.float8_e5m2, device="cuda"), {}, offset=5)
    for first in (0, 2**31 - 50, 2**32 - 50, count - 100_000):
        want = fill("uniform", torch.empty(100_000, dtype=torch.float8_e5m2), {}, offset=5 + first)
        assert_bitwise_equal(patterns(tensor[first : first + 100_000].cpu()), patterns(want), str(first))


def test_a_model_in_one_batch() -> None:
    with shardinit.recording():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(100)), nn.LSTM(16, 8))
    shardinit.init_model_(model, 3, device="cuda")
    with shardinit.recording():
        other = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(100)), nn.LSTM(16, 8))
    shardinit.init_model_(other, 3, device="cpu")
    for (name, got), want in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert got.is_cuda and torch.equal(got.cpu(), want), name


def test_the_current_stream_orders_fills() -> None:
    """A fill waits for what was queued before it on its stream, and what follows sees it."""
    stream = torch.cuda.Stream()
    tensor = torch.zeros(1 << 22, device="cuda")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        tensor.fill_(9.0)
        fill("normal", tensor, {})
        doubled = tensor * 2
    torch.cuda.current_stream().wait_stream(stream)
    want = fill("normal", torch.empty(1 << 22), {})
    assert torch.equal(doubled.cpu(), want * 2)


def test_a_fill_does_not_wait_for_the_device() -> None:
    tensor = torch.zeros(1024, device="cuda")
    fill("normal", tensor, {})
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    event = torch.cuda.Event()
    started = time.perf_counter()
    fill("normal", tensor, {})
    event.record()
    assert time.perf_counter() - started < 0.3 and not event.query(), "the fill must only be queued"
    torch.cuda.synchronize()


def test_capture_into_a_graph() -> None:
    """Kernels that were never launched before, too: they are loaded without breaking the capture."""
    tensors = [torch.zeros(10_001, dtype=dtype, device="cuda") for dtype in TORCH_DTYPES.values()]
    boxes = [torch.zeros(50, 60, dtype=dtype, device="cuda")[:, 3:33] for dtype in TORCH_DTYPES.values()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensor in tensors:
            fill("trunc_normal", tensor, {})
        for box in boxes:
            fill("trunc_normal", box, dict(a=2.0, b=2.1), offset=(0, 0), global_shape=(50, 30))
    for tensor in (*tensors, *boxes):
        tensor.zero_()
    graph.replay()
    for tensor in tensors:
        assert_bitwise_equal(
            patterns(tensor.cpu()), patterns(fill("trunc_normal", torch.empty_like(tensor, device="cpu"), {}))
        )
    for box in boxes:
        want = fill("trunc_normal", torch.empty(50, 30, dtype=box.dtype), dict(a=2.0, b=2.1))
        assert_bitwise_equal(patterns(box.cpu()), patterns(want))


def test_capture_by_a_process_that_has_filled_nothing() -> None:
    """No kernel is loaded yet then."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "capture_into"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("current", [0, 1])
def test_the_tensor_s_device_counts_not_the_current_one(current: int) -> None:
    tensor = torch.zeros(1000, device="cuda:1")
    with torch.cuda.device(current):
        fill("normal", tensor, {})
        assert torch.cuda.current_device() == current
        assert torch.zeros(1, device="cuda").device.index == current
    assert torch.equal(tensor.cpu(), fill("normal", torch.empty(1000), {}))


def test_a_device_that_there_is_not() -> None:
    tensor = torch.zeros(1000, device="cuda")
    piece = (tensor.data_ptr(), 1, (1000,), (1,), 0, (1,), 2, (1.0, 0.0), 0, 0, ())
    with pytest.raises(RuntimeError, match=r"cuda:99.*invalid device ordinal"):
        _native.fill_cuda([piece], 99, 0)
    fill("normal", tensor, {})  # and it leaves no error behind
    torch.cuda.synchronize()
    assert np.isfinite(tensor.cpu().numpy()).all()
