"""Pipeline parallelism: each rank initialises its own stage, and together they are the whole model.

torchrun --nproc-per-node 2 examples/pipeline.py
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

import torch_shardinit as shardinit


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 100)
        for layer in self.layers:
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)


def record() -> Model:
    with shardinit.recording():
        return Model()


def main() -> None:
    rank, cpu = dist.get_rank(), torch.device("cpu")

    model = record()
    plan = shardinit.record(model)  # before pipeline(), which makes new modules out of it
    example = torch.zeros(2, 8, dtype=torch.long, device="meta")  # a microbatch
    pipe = pipeline(model, (example,), split_spec={"layers.2": SplitPoint.BEGINNING})
    module = pipe.get_stage_module(rank).to_empty(device=cpu)
    # Stages of pipeline() keep the whole model's names. One that is built by hand with names of its own says what they
    # are in the whole: plan.apply_(module, seed=42, rename=lambda name: ...).
    plan.apply_(module, seed=42)

    tokens = torch.arange(32).view(4, 8)
    schedule = ScheduleGPipe(pipe.build_stage(rank, cpu), n_microbatches=2)
    output = schedule.step(tokens) if rank == 0 else schedule.step()

    # Only to compare: the unsharded model of one process.
    whole = shardinit.init_model_(record(), seed=42, device=cpu)
    parameters = dict(whole.named_parameters())
    equal = [torch.equal(parameter, parameters[name]) for name, parameter in module.named_parameters()]
    print(f"rank {rank}: {sum(equal)} of {len(equal)} parameters equal the unsharded model's")
    assert all(equal)
    if rank == 1:
        assert torch.allclose(output, whole(tokens), atol=1e-5)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()  # torch 2.13 may abort at exit where a sharded model outlives its process group
    dist.destroy_process_group()
