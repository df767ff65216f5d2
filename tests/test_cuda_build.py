"""What a build without a GPU, or without CUDA, says."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_shardinit as shardinit
from torch_shardinit import _native


def fake_cuda_tensor() -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(8, device="cuda")


def test_build_info_and_version_say_what_was_built() -> None:
    info = shardinit.build_info()
    assert info["cuda"] == _native.CUDA
    shown = subprocess.run([sys.executable, "-m", "torch_shardinit", "--version"], capture_output=True, text=True)
    assert f"CUDA {_native.CUDA or 'not built'}\n" in shown.stdout
    if _native.CUDA is not None:
        assert _native.CUDA.split()[1] == "all-major"


def test_a_build_without_cuda_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = fake_cuda_tensor()
    monkeypatch.setattr(_native, "CUDA", None)
    message = r"normal_: tensor must be on cpu, got one on cuda:0: .*without CUDA; install it again .*SHARDINIT_CUDA=1"
    with pytest.raises(ValueError, match=message):
        shardinit.normal_(tensor)


def test_a_rocm_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = fake_cuda_tensor()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ValueError, match="must be on cpu or an NVIDIA GPU, got one on a ROCm device"):
        shardinit.normal_(tensor)


def test_other_devices_are_refused() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensor = torch.empty(8, device="xpu")
    with pytest.raises(ValueError, match="normal_: tensor must be on cpu or an NVIDIA GPU, got one on xpu:0"):
        shardinit.normal_(tensor)


@pytest.mark.skipif(_native.CUDA is None, reason="built without CUDA")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_driver_a_launch_is_an_error_and_the_cpu_works() -> None:
    tensor = torch.zeros(8)
    piece = (tensor.data_ptr(), 1, (8,), (1,), 0, (1,), 2, (1.0, 0.0), 0, 0, ())
    message = (
        r"^(filling on cuda:0: the driver \(CUDA \d+,|asking for the current device, to fill on cuda:0: ).*\(cudaError"
    )
    with pytest.raises(RuntimeError, match=message):
        _native.fill_cuda([piece], 0, 0)
    assert shardinit.normal_(tensor, seed=1).abs().sum() > 0


def test_pieces_that_no_kernel_may_get() -> None:
    good = (4096, 1, (8,), (1,), 0, (1,), 2, (1.0, 0.0), 0, 0, ())
    assert len(_native.launches([good], 132)) == 1
    with pytest.raises(ValueError, match="num_multiprocessors must be at least 1"):
        _native.launches([good], 0)
    for field, value, message in (
        (0, 0, "holds no memory"),
        (0, 4098, "aligned to its elements"),
        (3, (1, 1), "as many"),
    ):
        bad = (*good[:field], value, *good[field + 1 :])
        with pytest.raises(ValueError, match=message):
            _native.launches([bad], 132)
