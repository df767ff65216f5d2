"""docs/stream.md, the golden vectors and the code say the same thing."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TORCH_DTYPES, assert_bitwise_equal, patterns

import torch_shardinit as shardinit
from torch_shardinit import _native
from torch_shardinit.reference_draws import DRAWS

ROOT = Path(__file__).parent.parent
HEX_FLOAT = re.compile(r"-?0x[01](?:\.[0-9a-f]+)?p[+-]?[0-9]+")
GOLDEN = sorted((ROOT / "tests" / "data").glob("golden_*.txt"))


def _constants(path: Path) -> set[float]:
    return {float.fromhex(text) for text in HEX_FLOAT.findall(path.read_text())}


@pytest.mark.parametrize(
    "sources",
    [
        ("csrc/transform.h", "csrc/params.cpp", "csrc/elementary.h"),
        ("torch_shardinit/_tables.py", "torch_shardinit/reference.py", "torch_shardinit/reference_draws.py"),
    ],
)
def test_every_constant_of_the_page_is_in_the_code(sources: tuple[str, ...]) -> None:
    page = _constants(ROOT / "docs" / "stream.md")
    assert len(page) > 90
    code = set().union(*(_constants(ROOT / name) for name in sources))
    missing = {value.hex() for value in page if value not in code and -value not in code}
    assert not missing


def test_decimal_constants_of_the_page_are_in_the_code() -> None:
    page = (ROOT / "docs" / "stream.md").read_text()
    table = page[page.index("Decimal constants") : page.index("## 7")]
    values = {float(text) for text in re.findall(r"\d+\.\d+(?:e-\d+)?", table)}
    assert len(values) == 46 - 1  # 48 coefficients; three are 1, written without a point
    for name in ("csrc/transform.h", "torch_shardinit/_tables.py"):
        code = {float(text) for text in re.findall(r"\d+\.\d+(?:e-\d+)?", (ROOT / name).read_text())}
        assert values <= code, name


@pytest.mark.parametrize("path", GOLDEN, ids=[path.stem for path in GOLDEN])
def test_golden_vectors(isa: str, path: Path) -> None:
    cases = 0
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            continue
        name, dtype, parameters, *fields, data = line.split()
        kwargs = {}
        if parameters != "-":
            kwargs = {k: float.fromhex(v) for k, v in (pair.split("=") for pair in parameters.split(","))}
        where = {k: int(v) for k, v in (field.split("=") for field in fields)}
        target = torch.empty(where["count"], dtype=TORCH_DTYPES.get(dtype) or getattr(torch, dtype))
        getattr(shardinit, f"{name}_")(
            target, **kwargs, seed=where["seed"], tensor_id=where["id"], offset=where["start"]
        )
        got = patterns(target)
        want = np.frombuffer(bytes.fromhex(data), got.dtype.newbyteorder("<")).astype(got.dtype)
        assert_bitwise_equal(got, want, line[:120])
        cases += 1
    assert cases > 30


def test_the_native_module_is_of_this_stream() -> None:
    assert _native.STREAM_VERSION == shardinit.STREAM_VERSION == 1


def test_golden_files_are_there() -> None:
    assert [path.stem for path in GOLDEN] == sorted(f"golden_{name}" for name in DRAWS)
