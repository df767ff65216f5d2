"""Python's and NumPy's random numbers in init code are refused, and the message names the line."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from random import gauss as gauss_by_name
from random import random as random_by_name

import numpy as np
import pytest
import torch
import torch.nn as nn
from numpy.random import default_rng as default_rng_by_name
from numpy.random import randn as randn_by_name
from numpy.random import random_sample as random_sample_by_name

import torch_shardinit as shardinit

MESSAGE = "init code must draw its random numbers from torch, got "


def this_line(offset: int = 0) -> str:
    return f"{__file__}:{sys._getframe(1).f_lineno + offset}"


def states() -> tuple[object, str]:
    return random.getstate(), str(np.random.get_state())


CALLS: dict[str, Callable[[], object]] = {
    "random.random() at": lambda: random.random(),
    "random.uniform() at": lambda: random.uniform(0, 1),
    "random.shuffle() at": lambda: random.shuffle([1, 2, 3]),
    "random.getrandbits() at": lambda: random.getrandbits(8),
    "random.random() at (by name)": lambda: gauss_by_name(0, 1),
    "numpy.random.rand() at": lambda: np.random.rand(),
    "numpy.random.normal() at": lambda: np.random.normal(size=(2, 3)),
    "numpy.random.permutation() at": lambda: np.random.permutation(4),
    "numpy.random.sample() at": lambda: np.random.sample(),
    "a NumPy generator without a seed at": lambda: np.random.default_rng(),
    "a NumPy generator without a seed at (by name)": lambda: default_rng_by_name(),
    "a NumPy generator without a seed at (legacy)": lambda: np.random.RandomState(),
}


@pytest.mark.parametrize("what", CALLS)
def test_error_draws_name_the_line(what: str) -> None:
    call, before = CALLS[what], states()
    line = f"{__file__}:{call.__code__.co_firstlineno}"
    want = re.escape(f"{MESSAGE}{what.partition(' (')[0]} {line}: ")
    with pytest.raises(shardinit.RecordError, match=want), shardinit.recording():
        nn.Linear(2, 2)
        call()
    with pytest.raises(shardinit.RecordError, match=want):
        shardinit.record(nn.Linear(2, 2), lambda model: nn.init.constant_(model.weight, float(bool(call()))))
    assert states() == before, "refused before it drew"
    call()
    assert states() != before or "without a seed" in what, "afterwards the functions are as they were"


@pytest.mark.parametrize(("name", "draw"), [("random", random_by_name), ("numpy.random", randn_by_name)])
def test_error_draws_that_came_by_another_name(name: str, draw: Callable[[], float]) -> None:
    """They cannot be stopped, but are seen at the next operation: the message names that and the one before."""
    before = states()
    first, second = this_line(+3), this_line(+5)
    message = re.escape(f"{MESSAGE}draws from {name} between {first} and {second}: ")
    with pytest.raises(shardinit.RecordError, match=message), shardinit.recording():
        torch.zeros(3)
        value = draw()
        torch.full((3,), value)
    assert states() == before, "and put back"
    with pytest.raises(shardinit.RecordError, match=re.escape(f"{MESSAGE}draws from {name} after {this_line(+2)}: ")):
        with shardinit.recording(), torch.no_grad():
            nn.Parameter(torch.zeros(3))
            draw()
    assert states() == before


def test_error_many_numpy_draws_between_two_operations() -> None:
    """624 words bring the generator's place around again; its words are others, which the end of a recording sees."""
    np.random.seed(1)
    np.random.rand()
    place = np.random.get_state()[2]  # type: ignore[index]
    random_sample_by_name(624 // 2)
    assert np.random.get_state()[2] == place  # type: ignore[index]
    with pytest.raises(shardinit.RecordError, match=r"draws from numpy\.random after .*test_other_generators.py:\d+: "):
        with shardinit.recording():
            random_sample_by_name(624 // 2)
            nn.Linear(2, 2)


def test_seeds_and_generators_of_ones_own_are_fine() -> None:
    before = states()
    with shardinit.recording():
        random.seed(3)
        np.random.seed(3)
        np.random.set_state(np.random.get_state())
        model = nn.Linear(2, 2)
        values = np.random.default_rng(7).normal(size=3), random.Random(7).random()
        model.register_buffer("table", torch.tensor(values[0]).mul(values[1]))
    assert states() == before
    assert shardinit.record(model).lookup("table") is not None


def test_other_threads_may_draw() -> None:
    drawn: list[float] = []
    with shardinit.recording():
        thread = threading.Thread(
            target=lambda: drawn.append(random.Random(1).random() + np.random.RandomState().rand())
        )
        thread.start()
        thread.join()
    assert drawn


def test_the_functions_are_the_modules_own_afterwards() -> None:
    before = {name: value for module in (random, np.random) for name, value in vars(module).items()}
    inside, outside = threading.Event(), threading.Event()

    def other() -> None:
        with shardinit.recording():
            inside.set()
            outside.wait()

    thread = threading.Thread(target=other)
    with pytest.raises(ZeroDivisionError), shardinit.recording():
        thread.start()
        inside.wait()
        assert random.random is not before["random"]
        raise ZeroDivisionError
    outside.set()
    thread.join()
    now = {name: value for module in (random, np.random) for name, value in vars(module).items()}
    assert now == before and not {"random", "getrandbits"} & vars(random.random.__self__).keys()
    random.random()


def test_modules_that_are_imported_during_a_recording_may_make_generators() -> None:
    code = """
import sys, types, torch_shardinit as s, torch, pathlib
sys.path.insert(0, sys.argv[1])
with s.recording():
    import lazy_module
    model = torch.nn.Linear(2, 2)
assert s.record(model).lookup("weight") is not None
print("ok")
"""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/lazy_module.py", "w") as file:
            file.write("import numpy as np\ngenerator = np.random.default_rng()\n")
        done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert done.stdout.strip() == "ok", done.stderr
