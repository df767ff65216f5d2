"""Frameworks outside torch: never imported by this package, and required by its tests where they must be there."""

from __future__ import annotations

import subprocess
import sys

import pytest
from frameworks import require

from torch_shardinit.locate.held import misfit, read


def test_no_framework_is_imported() -> None:
    code = (
        "import sys, torch, torch_shardinit as shardinit\n"
        "from torch_shardinit.locate import locate\n"
        "with shardinit.recording():\n"
        "    model = torch.nn.Sequential(torch.nn.EmbeddingBag(5, 4), torch.nn.Linear(4, 4))\n"
        "shardinit.init_model_(model, seed=1, device='cpu', init_fn=shardinit.reset_parameters)\n"
        "assert len(locate(model).pieces) == 3\n"
        "frameworks = {'torchrec', 'fairscale', 'fbgemm_gpu', 'deepspeed', 'megatron', 'transformers'}\n"
        "print(sorted(frameworks & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_a_missing_framework_skips_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDINIT_REQUIRE_FRAMEWORKS", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"no_such_framework can't be imported.*ModuleNotFoundError"):
        require("no_such_framework")
    monkeypatch.setenv("SHARDINIT_REQUIRE_FRAMEWORKS", "1")
    with pytest.raises(ModuleNotFoundError, match="no_such_framework"):
        require("no_such_framework")
    assert require("json")[0].__name__ == "json"


def test_error_names_the_package_and_its_version() -> None:
    message = r"^that: a str must have _secret, got one without \(pytest \d+\.\d+.*; see the README"
    with pytest.raises(ValueError, match=message):
        read("pytest", "that", "a string", "_secret")
    assert "no_such_framework (of unknown version)" in str(misfit("no_such_framework", "it", "must fit"))
