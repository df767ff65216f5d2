"""Megatron-core: a GPTModel that is the same at every tensor parallel size, without a master weight anywhere.

    torchrun --nproc-per-node 2 examples/megatron_tp.py

The layers record the whole weights, so that init functions see the global shape; each rank fills its own part. What is
printed stays the same on any number of processes that divides 4, although ranks have different torch seeds. On GPUs
leave use_cpu_initialization out and pass device="cuda".
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

import torch_shardinit as shardinit


def main() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    torch.manual_seed(rank)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=172,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        tensor_model_parallel_size=world,
        use_cpu_initialization=True,
    )

    with shardinit.recording():  # nothing is allocated
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=1024, max_sequence_length=32)
    shardinit.init_model_(model, seed=42, device="cpu")  # before Megatron's DistributedDataParallel and optimizer

    fc1 = model.decoder.layers[0].mlp.linear_fc1.weight  # two pieces of the whole: gate and up
    want = shardinit.normal_(
        torch.empty(2 * 172, 64), 0.02, seed=42, tensor_id="decoder.layers.0.mlp.linear_fc1.weight"
    )
    mine = torch.cat([half.chunk(world)[rank] for half in want.chunk(2)])
    print(f"rank {rank} holds {fc1.shape[0]} rows of linear_fc1; equal: {torch.equal(fc1, mine)}")
    digest = shardinit.fingerprint(model).digest
    if rank == 0:
        print(f"model {digest}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
