"""Init code that runs layers to find sizes or scales."""

from __future__ import annotations

import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns

import torch_shardinit as shardinit
from torch_shardinit.program import Played


class Scaled(nn.Module):
    """A gain from the layers' own output. Batch_norm's statistics in eval mode are empty on the CPU, not on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).eval()
        nn.init.constant_(self.layers[0].weight, 0.25)
        nn.init.constant_(self.layers[0].bias, 0.5)
        with torch.no_grad():
            output = self.layers(torch.arange(50.0).reshape(1, 2, 5, 5))
        self.head = nn.Linear(output.shape[1], 2)
        self.gain = nn.Parameter(output.amax((0, 2, 3)))


def test_a_forward_in_eval_mode_is_played() -> None:
    with shardinit.recording():
        model = Scaled()
    plan = shardinit.record(model)
    assert isinstance(plan.entries["gain"].program, Played)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as it is played
    try:
        want = Scaled()
    finally:
        torch.set_num_threads(threads)
    shardinit.init_model_(model, 3, device="cpu")
    assert model.head.weight.shape == want.head.weight.shape
    assert_bitwise_equal(patterns(model.gain), patterns(want.gain))
