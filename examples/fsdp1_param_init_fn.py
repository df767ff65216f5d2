"""FSDP1 initialises each unit as it materialises it: no rank ever holds the model, and none sends anything.

torchrun --nproc-per-node 2 examples/fsdp1_param_init_fn.py
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import torch_shardinit as shardinit

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64, padding_idx=0)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(4))
        self.head = nn.Linear(64, 1000)
        nn.init.trunc_normal_(self.head.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def record() -> Model:
    with shardinit.recording():  # on meta: nothing is allocated, every initialisation is noted
        return Model()


def main() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)  # torch's seed may differ: it is not read

    model = record()
    sharded = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}),
        param_init_fn=shardinit.param_init_fn(model, seed=42),  # made before wrapping, for it needs the names
        device_id=CPU,
        use_orig_params=True,
    )
    held = sum(parameter.numel() for parameter in sharded.parameters())

    # What one process would have made; only to compare, as no real run does.
    whole = dict(shardinit.init_model_(record(), seed=42, device=CPU).named_parameters())
    with FSDP.summon_full_params(sharded, writeback=False):
        equal = [torch.equal(p, whole[n.replace("_fsdp_wrapped_module.", "")]) for n, p in sharded.named_parameters()]

    tokens = torch.arange(32).view(2, 16)
    sharded(tokens).square().mean().backward()  # it trains

    print(f"rank {rank} holds {held} elements; {sum(equal)} of {len(equal)} parameters equal the unsharded ones")
    assert all(equal) and len(equal) == len(whole)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()  # torch 2.13 may abort at exit where a sharded model outlives its process group
    dist.destroy_process_group()
