"""Collections of TorchRec, and every way to shard one that runs on the CPU."""

# ruff: noqa: E402 - TorchRec may not be there
from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from frameworks import require

require("torchrec")
import torchrec.distributed.embeddingbag as sharded_ebc
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan

CPU = torch.device("cpu")
FUSED = {"learning_rate": 0.1, "optimizer": EmbOptimType.EXACT_ADAGRAD}  # one that has state
Sharding = Callable[..., Any]

logging.getLogger("torchrec").setLevel(logging.ERROR)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """TorchRec itself calls what torch has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def bag_configs(names: list[str], rows: int, dim: int, **options: Any) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"bag_{name}"], **options)
        for name in names
    ]


def row_configs(names: list[str], rows: int, dim: int, **options: Any) -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"row_{name}"], **options)
        for name in names
    ]


def shardings(world: int, local: int) -> dict[str, Sharding]:
    """For a world on machines of `local` ranks each. Grids need column blocks of 128."""
    hosts = world // local
    return {
        "data": data_parallel(),
        "table_last": table_wise(rank=world - 1),
        "rows": row_wise(),
        "columns": column_wise(ranks=[(3 * shard) % world for shard in range(4)]),  # up to four of them on one rank
        "columns_on_one": column_wise(ranks=[0] * 4),
        "host_rows": table_row_wise(host_index=hosts - 1),
        **({"grid": grid_shard(host_indexes=[hosts - 1, 0])} if hosts > 1 else {}),
    }


def sharder_of(collection: nn.Module) -> Any:
    if isinstance(collection, EmbeddingBagCollection):
        return EmbeddingBagCollectionSharder(fused_params=dict(FUSED))
    assert isinstance(collection, EmbeddingCollection)
    return EmbeddingCollectionSharder(fused_params=dict(FUSED))


def plan_of(collection: nn.Module, per_table: dict[str, Sharding], local: int, kernel: str) -> Any:
    plan = construct_module_sharding_plan(
        collection,
        per_table,
        local_size=local,
        world_size=dist.get_world_size(),
        device_type="cpu",
        sharder=sharder_of(collection),
    )
    for sharding in plan.values():
        if sharding.sharding_type != "data_parallel":
            sharding.compute_kernel = kernel
    return plan


def set_hosts(local: int) -> None:
    """TorchRec reads from the environment how ranks lie on machines."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank % local), LOCAL_WORLD_SIZE=str(local))


class _NotFake:
    """torch.distributed for a module of TorchRec that leaves a collection unfinished on a fake process group."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_backend(self, group: Any = None) -> str:
        return "gloo"


def shard(collection: nn.Module, per_table: dict[str, Sharding], local: int, kernel: str, **env: Any) -> nn.Module:
    """One collection, by its sharder, without DistributedModelParallel. Fit for a fake process group."""
    set_hosts(local)
    sharding_env = ShardingEnv.from_process_group(dist.group.WORLD)
    for name, value in env.items():
        setattr(sharding_env, name, value)
    before = sharded_ebc.dist
    sharded_ebc.dist = _NotFake()
    try:
        with quiet():
            plan = plan_of(collection, per_table, local, kernel)
            return sharder_of(collection).shard(collection, plan, sharding_env, CPU)
    finally:
        sharded_ebc.dist = before


def distribute(
    model: nn.Module, per_collection: dict[str, dict[str, Sharding]], local: int, kernel: str
) -> DistributedModelParallel:
    """The usual way. DistributedDataParallel of the dense part does not broadcast."""
    set_hosts(local)
    collections = {name: model.get_submodule(name) for name in per_collection}
    with quiet():
        return DistributedModelParallel(
            model,
            device=CPU,
            plan=ShardingPlan(
                {name: plan_of(one, per_collection[name], local, kernel) for name, one in collections.items()}
            ),
            sharders=[sharder_of(one) for one in {type(one): one for one in collections.values()}.values()],
            data_parallel_wrapper=DefaultDataParallelWrapper(ddp_kwargs={"init_sync": False}),
        )
