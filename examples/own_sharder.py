"""A sharder that no framework knows: Plan.fill_ takes any part of a tensor, as a run of elements or as a box.

    python examples/own_sharder.py

Here ranks are a loop. Each holds an equal part of one flat buffer of all parameters (as ZeRO does), and beside it the
vocabulary's rows in blocks of equal size, the last one padded (as Megatron does).
"""

import torch
from torch import nn

import torch_shardinit as shardinit

WORLD = 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.up, self.down = nn.Linear(16, 50), nn.Linear(50, 16)
        nn.init.trunc_normal_(self.up.weight, std=0.02)
        with torch.no_grad():
            self.embedding.weight[7].zero_()


def flat_shard(plan: shardinit.Plan, rank: int) -> torch.Tensor:
    """This rank's part of all parameters, one after the other, padded with zeros to a multiple of the ranks."""
    entries = [entry for entry in plan.entries.values() if entry.kind == "parameter"]
    total = sum(torch.Size(entry.shape).numel() for entry in entries)
    size = -(-total // WORLD)
    low, high = rank * size, (rank + 1) * size
    shard = torch.zeros(size)
    start = 0  # of the parameter at hand, in the flat buffer
    for entry in entries:
        stop = start + torch.Size(entry.shape).numel()
        first, last = max(start, low), min(stop, high)
        if first < last:  # offset: the parameter's own element at which this rank's run begins
            plan.fill_(entry.name, shard[first - low : last - low], offset=first - start, seed=42)
        start = stop
    return shard


def vocabulary_shard(plan: shardinit.Plan, rank: int) -> torch.Tensor:
    """Rows rank * size .. of the embedding; those beyond the vocabulary are padding, and zero."""
    rows, dim = plan.entries["embedding.weight"].shape
    size = -(-rows // WORLD)
    shard = torch.zeros(size, dim)
    held = min(size, rows - rank * size)
    # offset: the coordinates of the box's first element
    plan.fill_("embedding.weight", shard[:held], offset=(rank * size, 0), seed=42)
    return shard


def main() -> None:
    with shardinit.recording():
        model = Model()
    plan = shardinit.record(model)
    print(plan)

    whole = shardinit.init_model_(model, seed=42, device="cpu")
    flat = torch.cat([parameter.detach().flatten() for _, parameter in sorted(whole.named_parameters())])
    shards = torch.cat([flat_shard(plan, rank) for rank in range(WORLD)])
    rows = torch.cat([vocabulary_shard(plan, rank) for rank in range(WORLD)])
    equal = torch.equal(shards[: flat.numel()], flat), torch.equal(rows[:100], whole.embedding.weight)
    print(f"{WORLD} flat shards equal the whole: {equal[0]}; {WORLD} blocks of rows: {equal[1]}")
    assert all(equal) and not shards[flat.numel() :].any() and not rows[100:].any()


if __name__ == "__main__":
    main()
