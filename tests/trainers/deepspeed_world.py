"""DeepSpeed on gloo, and a model of odd sizes for it."""

from __future__ import annotations

import logging
import os
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.ops
import torch
import torch.nn as nn
from deepspeed.utils import logger

logger.setLevel(logging.ERROR)

# Its all_reduce through shared memory would be compiled at the first use, and gloo's counter would not see it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def start(rank: int, world: int) -> None:
    """After run_gloo has made the process group: DeepSpeed takes it over. Ranks are seeded differently."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(1000 + rank)


def config(stage: int, *, optimizer: bool = True, bf16: bool = False, **zero: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": bf16},
        "gradient_clipping": 0.0,  # 1.0 by default
    }
    if optimizer:
        found["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        found |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return found


class Net(nn.Module):
    """Odd sizes, a tie, a padding row, a plain parameter, a table, and init code that the constructor does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=3)
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.ones(5) * 0.5)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(6.0).cos())

    def init_weights(self) -> None:
        nn.init.trunc_normal_(self.up.weight, std=0.02)
        nn.init.orthogonal_(self.down.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.table
        x = self.norm(x + self.down(self.up(x).relu())) * self.scale.sum()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


class Turned(nn.Module):
    """A parameter that is not contiguous, which DeepSpeed by itself can't broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.empty(3, 5, 4).permute(2, 0, 1))
        nn.init.normal_(self.turned, std=0.1)


TOKENS = torch.arange(10).view(2, 5)


class Wide(nn.Module):
    """Four parameters of 16 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(4))
