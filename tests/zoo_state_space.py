"""The zoo: state-space models and decay tables."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
from zoo_registry import zoo


@zoo
class Mamba(nn.Module):
    """A table of logarithms, and a bias that is the inverse softplus of random numbers."""

    def __init__(self, inner: int = 7, state: int = 4) -> None:
        super().__init__()
        self.in_proj, self.conv1d = nn.Linear(5, 2 * inner), nn.Conv1d(inner, inner, 3, groups=inner)
        self.dt_proj = nn.Linear(2, inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, state + 1, dtype=torch.float32).repeat(inner, 1)))
        self.A_heads = nn.Parameter(torch.log(torch.empty(inner).uniform_(1, 16)))
        self.D = nn.Parameter(torch.ones(inner))
        self.init_weights()

    def init_weights(self) -> None:
        inner = self.dt_proj.out_features
        nn.init.uniform_(self.dt_proj.weight, -(2**-0.5), 2**-0.5)
        low, high = math.log(1e-3), math.log(0.1)
        dt = torch.exp(torch.rand(inner) * (high - low) + low).clamp(min=1e-4)
        with torch.no_grad():
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))


@zoo
class RWKV(nn.Module):
    """Decay tables that Python loops fill, with ratios that depend on the layer."""

    def __init__(self, width: int = 6, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for layer in range(layers):
            block = nn.Module()
            ratio, rest = layer / (layers - 1), 1.0 - layer / layers
            speed = torch.ones(width)
            for i in range(width):
                speed[i] = -5 + 8 * (i / (width - 1)) ** (0.7 + 1.3 * ratio)
            block.time_decay = nn.Parameter(speed)
            zigzag = torch.tensor([(i + 1) % 3 - 1 for i in range(width)]) * 0.5
            block.time_first = nn.Parameter(torch.ones(width) * math.log(0.3) + zigzag)
            steps = torch.arange(width).float().div(width).view(1, 1, width)
            block.time_mix = nn.Parameter(torch.pow(steps, rest))
            block.key = nn.Linear(width, width, bias=False)
            block.output = nn.Linear(width, width, bias=False)
            self.layers.append(block)
        self.init_weights()

    def init_weights(self) -> None:
        for block in self.layers:
            nn.init.orthogonal_(block.key.weight, gain=0.1)
            nn.init.zeros_(block.output.weight)


@zoo
class S4(nn.Module):
    """A diagonal state space: steps on a logarithmic scale, a complex matrix kept as its logarithm and its imaginary
    part, complex output weights kept as pairs of real numbers, and HiPPO's matrix."""

    def __init__(self, channels: int = 5, state: int = 8) -> None:
        super().__init__()
        half = state // 2
        log_dt = torch.rand(channels) * (math.log(0.1) - math.log(1e-3)) + math.log(1e-3)
        self.log_dt = nn.Parameter(log_dt)
        self.log_A_real = nn.Parameter(torch.log(0.5 * torch.ones(channels, half)))
        self.A_imag = nn.Parameter(math.pi * torch.arange(half).repeat(channels, 1))
        self.C = nn.Parameter(torch.view_as_real(torch.complex(*torch.randn(2, channels, half))).clone())
        q = torch.arange(state, dtype=torch.float64)
        column, row = torch.meshgrid(q, q, indexing="ij")
        r = 2 * q + 1
        hippo = -(torch.where(row >= column, r, 0.0) - torch.diag(q))
        scale = torch.diag(torch.sqrt(r))
        self.register_buffer("A", (scale @ hippo @ torch.linalg.inv(scale)).float())
        self.D = nn.Parameter(torch.empty(channels))
        self.output = nn.Linear(channels, 2 * channels)
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.D)
        self.output.reset_parameters()
