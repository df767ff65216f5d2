"""FSDP2: build on meta, shard on meta, then give each rank memory for its shards alone and fill them.

torchrun --nproc-per-node 2 examples/fsdp2_meta.py
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_shardinit as shardinit


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self, vocabulary: int = 1001, dim: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embedding.weight  # a tie, kept
        self.depth = depth

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.blocks:
            nn.init.trunc_normal_(block.down.weight, std=0.02 / (2 * self.depth) ** 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    with shardinit.recording():
        model = Model()
        model.init_weights()  # init code that the constructor does not call runs in here too
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shardinit.init_model_(model, seed=42, device="cpu")

    # 1001 rows on two ranks are 501 and 500; together they are the tensor that one process would have made.
    weight = model.embedding.weight
    want = shardinit.normal_(torch.empty(1001, 64), 0.02, seed=42, tensor_id="embedding.weight")
    equal = torch.equal(weight.full_tensor(), want)
    model(torch.arange(8)[None]).sum().backward()

    print(f"rank {mesh.get_rank()} holds {weight.to_local().shape[0]} rows of embedding.weight; equal: {equal}")
    assert equal and model.head.weight is model.embedding.weight


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()  # torch 2.13 may abort at exit where a sharded model outlives its process group
    dist.destroy_process_group()
