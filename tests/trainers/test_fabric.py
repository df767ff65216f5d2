"""Lightning Fabric: ModelParallelStrategy with an empty init, initialised after setup or while it shards."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from common import assert_equal, differing, gathered, local_init, same_on_all_ranks, values_of
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_shardinit as shardinit
from torch_shardinit.verify_processes import run_gloo

SEED = 41


class Block(nn.Module):
    """`scale` is written by no reset_parameters: stock Fabric leaves whatever memory held."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 14), nn.Linear(14, 6)
        self.scale = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu()) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.trunc_normal_(self.blocks[0].up.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


TOKENS = torch.arange(10).view(2, 5)


def data_parallel(model: Any, mesh: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def tensor_parallel(model: Any, mesh: Any) -> Any:
    for block in model.blocks:
        parallelize_module(block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _fabric(strategy: Any, world: int) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    return fabric


def _recorded(fabric: Fabric) -> Net:
    with fabric.init_module(empty_init=True), shardinit.recording():
        model = Net()
    assert all(one.is_meta for one in model.parameters())
    return model


def _check(fabric: Fabric, model: Any, whole: Net, what: str) -> None:
    """Equal, then trained for a step."""
    assert_equal(gathered(model.module), values_of(whole), what)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    loss, expected = model(TOKENS), whole(TOKENS)
    assert torch.allclose(loss, expected, rtol=1e-5), what
    fabric.backward(loss)
    optimizer.step()
    assert differing(gathered(model.module), values_of(whole)), what


def _worker(rank: int, world: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), NODE_RANK="0")
    torch.manual_seed(1000 + rank)
    with shardinit.recording():
        whole = Net()
    shardinit.init_model_(whole, SEED, device="cpu")
    layouts: list[tuple[Callable[[Any, Any], Any], int, int]] = [(data_parallel, 2, 1), (tensor_parallel, 1, 2)]
    for shard, dp, tp in layouts:
        # After setup, over what Fabric has made of memory by then.
        fabric = _fabric(ModelParallelStrategy(shard, dp, tp), world)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = fabric.setup(_recorded(fabric))
        assert any("Parameter initialization incomplete" in str(one.message) for one in caught) or rank > 0
        assert differing(gathered(model.module), values_of(whole))
        assert (
            not same_on_all_ranks(gathered(model.module)["embedding.weight"]) or dp > 1
        )  # replicas under tensor parallelism
        with local_init(model), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "head.weight and embedding.weight were recorded as one")
            shardinit.init_model_(model, SEED)
        _check(fabric, model, whole, f"{shard.__name__}, after setup")

        # While it shards: memory is made here, ties are kept, and nothing is initialised twice.
        def both(model: Any, mesh: Any, shard: Any = shard) -> Any:
            model = shard(model, mesh)
            with local_init(model):
                return shardinit.init_model_(model, SEED, device="cpu")

        fabric = _fabric(ModelParallelStrategy(both, dp, tp), world)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            model = fabric.setup(_recorded(fabric))
        assert model.head.weight is model.embedding.weight
        _check(fabric, model, whole, f"{shard.__name__}, in parallelize_fn")

    fabric = _fabric(DDPStrategy(init_sync=False), world)
    with fabric.init_module(), shardinit.recording():
        net = Net()
    shardinit.init_model_(net, SEED, device=fabric.device)
    model = fabric.setup(net)
    shardinit.check_replicas(model)
    _check(fabric, model, whole, "DDP")


def test_model_parallel_strategy_equals_one_process() -> None:
    run_gloo(_worker, 2, limit=100, threads=1)
