"""DeepSpeed ZeRO-3: partitions that hold the unsharded model's values, with no broadcast and no whole parameter.

    torchrun --nproc-per-node 2 examples/deepspeed_zero3.py

zero.Init inside recording() builds on meta and makes empty partitions at its end; init_model_ fills them. What is
printed stays the same on any number of processes, although ranks have different torch seeds.
"""

import logging
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn

import torch_shardinit as shardinit

logger.setLevel(logging.ERROR)

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1001, 64, padding_idx=0)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(64, 1001, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)

    with shardinit.recording(), deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Net()
    shardinit.init_model_(model, seed=42, device="cpu")  # before deepspeed.initialize, whose optimizer copies values
    digest = shardinit.fingerprint(model).digest
    held = sum(one.ds_tensor.numel() for one in model.parameters())

    engine, *_ = deepspeed.initialize(model=model, config=CONFIG, model_parameters=model.parameters())
    tokens = torch.arange(1, 17)[None]
    losses = []
    for _ in range(2):
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(f"{loss.item():.4f}")
    print(f"rank {rank} holds {held} elements")
    if rank == 0:
        print(f"model {digest}, losses {' '.join(losses)}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
