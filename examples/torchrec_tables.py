"""Embedding tables of TorchRec that hold the same values however they are sharded.

    torchrun --nproc-per-node 2 examples/torchrec_tables.py

Ranks have different torch seeds on purpose. Take another number of them, or shard a table in another way: what is
printed stays.
"""

import logging
import warnings

import torch
import torch.distributed as dist
import torchrec.distributed.sharding_plan as by
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

import torch_shardinit as shardinit

logging.getLogger("torchrec").setLevel(logging.ERROR)
warnings.simplefilter("ignore", FutureWarning)  # TorchRec uses what torch has deprecated


class Ranker(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rows = {"user": 1000, "item": 500, "shop": 50, "country": 10}
        tables = [EmbeddingBagConfig(num_embeddings=n, embedding_dim=16, name=name) for name, n in rows.items()]
        tables[1].init_fn = lambda weight: torch.nn.init.normal_(weight, std=0.01)
        self.tables = EmbeddingBagCollection(tables)
        self.score = torch.nn.Linear(16 * len(tables), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.score(self.tables(features).values()).squeeze(1)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)

with shardinit.recording():  # nothing is allocated
    model = Ranker()

sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
shardings = {
    "user": by.row_wise(),
    "item": by.column_wise(ranks=[0, world - 1, 0, world - 1]),
    "shop": by.table_wise(rank=world - 1),
    "country": by.data_parallel(),
}
plan = by.construct_module_sharding_plan(model.tables, shardings, world_size=world, device_type="cpu", sharder=sharder)
model = DistributedModelParallel(model, plan=ShardingPlan({"tables": plan}), sharders=[sharder])

shardinit.init_model_(model, seed=42)  # each rank fills what it holds

for name, value in model.state_dict().items():
    is_sharded = hasattr(value, "local_shards")
    held = [shard.tensor for shard in value.local_shards()] if is_sharded else [value]
    bits = torch.tensor(sum(int(part.view(torch.int32).sum()) for part in held))
    if is_sharded:
        dist.all_reduce(bits)
    if rank == 0:
        print(f"{name:40} {int(bits) % 2**32:08x}")

batch = KeyedJaggedTensor(list(shardings), values=torch.arange(8), lengths=torch.ones(8, dtype=torch.int64))
model(batch).sum().backward()  # the tables' optimizer runs in the backward
print(f"rank {rank} of {world} has trained for a step")
dist.destroy_process_group()
