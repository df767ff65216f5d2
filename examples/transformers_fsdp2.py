"""A transformers model with random weights under FSDP2, and LoRA adapters added once it is sharded.

    torchrun --nproc-per-node 2 examples/transformers_fsdp2.py

from_config runs the model's own init code, so recording() sees all of it. What is printed stays the same on any number
of processes, although ranks have different torch seeds.
"""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

import torch_shardinit as shardinit

CONFIG = LlamaConfig(
    vocab_size=1003,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


def main() -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(rank)

    with shardinit.recording():  # nothing is allocated
        model = AutoModelForCausalLM.from_config(CONFIG)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shardinit.init_model_(model, seed=42, device="cpu")
    digest = shardinit.fingerprint(model).digest
    if rank == 0:
        print(f"model    {digest}")

    # peft puts ordinary parameters around the sharded ones, replicas on all ranks: they must be equal there.
    with shardinit.recording():
        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    base = [name for name, _ in (*model.named_parameters(), *model.named_buffers()) if "lora_" not in name]
    shardinit.init_model_(model, seed=43, device="cpu", keep=base)
    shardinit.check_replicas(model)
    digest = shardinit.fingerprint(model).digest
    if rank == 0:
        print(f"adapters {digest}")

    tokens = torch.arange(16)[None]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    print(f"rank {rank}: loss {loss.item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()  # torch 2.13 may abort at exit where a sharded model outlives its process group
    dist.destroy_process_group()
