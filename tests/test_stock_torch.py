"""What was recorded is what stock torch does: with torch's own generator in place of the stream, in program order and
from one seed, a recorded model is the eagerly built one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import recorded_models
import torch
import torch.nn as nn
from torch_replay import replayed
from zoo import MODELS

import torch_shardinit as shardinit

SEED = 5
# Of other test files, with idioms that no model of the zoo has.
OTHERS = ("Decoder", "Zoo", "Tables", "StateSpace", "LowRank", "Rows")
ALL: dict[str, Callable[[], nn.Module]] = {**MODELS, **{f"other-{n}": getattr(recorded_models, n) for n in OTHERS}}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("name", ALL)
def test_recorded_equals_eager(name: str) -> None:
    torch.manual_seed(SEED)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's QR has other bits with two
    try:
        want = tensors_of(ALL[name]())
    finally:
        torch.set_num_threads(before)
    with shardinit.recording():
        model = ALL[name]()
    by_tape, by_program = replayed(model, shardinit.record(model), SEED)
    assert by_tape.keys() == want.keys()
    for key, tensor in by_tape.items():
        assert tensor.dtype == want[key].dtype and torch.equal(as_bytes(tensor), as_bytes(want[key])), key
    for key, tensor in by_program.items():
        assert tensor.dtype == want[key].dtype and torch.equal(as_bytes(tensor), as_bytes(want[key])), key
