"""Every Python example of the README and of docs/agree.md runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = [
    example
    for page in ("README.md", "docs/agree.md")
    for example in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:torch_shardinit", "-c", EXAMPLES[number]],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 9
