"""Lightning Fabric: ModelParallelStrategy, built empty, and initialised while it shards.

    torchrun --nproc-per-node 2 examples/fabric.py

Fabric would give memory to what is still on meta after parallelize_fn, untie it, and call each module's
reset_parameters with a generator of the rank's own; after init_model_ nothing is left to it. What is printed stays the
same on any number of processes, although ranks have different torch seeds.
"""

import os

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import torch_shardinit as shardinit


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1001, 64)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(2))
        self.scale = nn.Parameter(torch.full((64,), 0.5))  # no reset_parameters writes it
        self.head = nn.Linear(64, 1001, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x * self.scale)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def shard_and_init(model: Net, mesh) -> Net:
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return shardinit.init_model_(model, seed=42, device="cpu")


def main() -> None:
    world = int(os.environ["WORLD_SIZE"])
    strategy = ModelParallelStrategy(shard_and_init, data_parallel_size=world, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    torch.manual_seed(fabric.global_rank)

    with fabric.init_module(empty_init=True), shardinit.recording():
        model = Net()
    model = fabric.setup(model)
    assert model.head.weight is model.embedding.weight
    digest = shardinit.fingerprint(model).digest

    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(2):
        loss = model(torch.arange(1, 17)[None])
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.4f}")
    if fabric.global_rank == 0:
        print(f"model {digest}, losses {' '.join(losses)}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
