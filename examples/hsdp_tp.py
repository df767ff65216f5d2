"""Three axes: replicas, FSDP2 shards, tensor parallelism. The model is the same on any mesh.

torchrun --nproc-per-node 8 examples/hsdp_tp.py         # 2 replicas x 2 shards x 2 of tensor parallelism
torchrun --nproc-per-node 4 examples/hsdp_tp.py 1 2 2   # the same digest
"""

import gc
import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_shardinit as shardinit


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 100), nn.Linear(100, 48)
        nn.init.kaiming_normal_(self.up.weight)  # fan_in is that of the whole tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(301, 48)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


STYLES = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
}


def main() -> None:
    shape = tuple(int(size) for size in sys.argv[1:]) or (2, 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard", "tp"))

    with shardinit.recording():
        model = Model()
    parallelize_module(model, mesh["tp"], STYLES)
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh["replica", "shard"])
    shardinit.init_model_(model, seed=42, device="cpu")

    model(torch.arange(20)[None]).sum().backward()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.full_tensor().detach().numpy().tobytes())
    if dist.get_rank() == 0:
        print(f"mesh {shape}: {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()  # torch 2.13 may abort at exit where a sharded model outlives its process group
    dist.destroy_process_group()
