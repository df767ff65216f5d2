"""The zoo: language models, recurrent and state-space models, tables, and what wraps them."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
from torch.nn.utils import parametrizations
from zoo_registry import zoo


class Block(nn.ModuleDict):
    """FSDP2 takes no container without a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.values():
            x = module(x)
        return x


@zoo
class GPT2(nn.Module):
    """apply(_init_weights), then residual projections again by name, with a smaller std; head and embedding tied."""

    def __init__(self, width: int = 6, layers: int = 3) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, width), nn.Embedding(7, width)
        self.layers = nn.ModuleList(
            Block(
                {
                    "ln": nn.LayerNorm(width),
                    "c_attn": nn.Linear(width, 3 * width),
                    "c_proj": nn.Linear(width, width),
                    "c_fc": nn.Linear(width, 4 * width),
                }
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("mask", torch.tril(torch.ones(7, 7)).view(1, 1, 7, 7), persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                parameter.data.normal_(mean=0.0, std=0.02 / math.sqrt(2 * len(self.layers)))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.data.zero_()


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


@zoo
class Llama(nn.Module):
    """init_weights of each block with a depth-dependent std; rotary tables as complex and real buffers."""

    def __init__(self, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(13, width)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            block = Block({"norm": RMSNorm(width)})
            for name, out in (("wq", width), ("wk", width // 2), ("wv", width // 2), ("wo", width), ("w1", 3 * width)):
                block[name] = nn.Linear(width, out, bias=False)
            self.layers.append(block)
        self.norm, self.output = RMSNorm(width), nn.Linear(width, 13, bias=False)
        freqs = 1.0 / (10000.0 ** (torch.arange(0, width, 2)[: width // 2].float() / width))
        angles = torch.outer(torch.arange(9), freqs).float()
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.register_buffer("inv_freq", freqs)
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.tok_embeddings.weight)
        for index, block in enumerate(self.layers):
            block["norm"].reset_parameters()
            for name in ("wq", "wk", "wv", "wo", "w1"):
                std = 0.02 / (2 * (index + 1)) ** 0.5 if name == "wo" else 0.02
                nn.init.trunc_normal_(block[name].weight, mean=0.0, std=std)
        self.norm.reset_parameters()
        width = self.output.in_features
        cutoff = 3 * width**-0.5
        nn.init.trunc_normal_(self.output.weight, 0.0, width**-0.5, -cutoff, cutoff)


@zoo
class FusedQKV(nn.Module):
    """Three draws in one weight, by torch.cat into it and by chunks of it; padding rows; a master weight split."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(6, 15, bias=False)
        self.in_proj = nn.Parameter(torch.empty(12, 5))
        self.embedding = nn.Embedding(10, 4, padding_idx=3)
        self.init_weights()
        master = torch.empty(9, 4).normal_(std=0.5)
        self.halves = nn.ParameterList([part.clone() for part in master.split([5, 4])])

    def init_weights(self) -> None:
        parts = [nn.init.trunc_normal_(torch.empty(5, 6), std=std) for std in (0.02, 0.03, 0.04)]
        with torch.no_grad():
            self.wqkv.weight.copy_(torch.cat(parts))
        for chunk in self.in_proj.chunk(3):
            nn.init.xavier_uniform_(chunk)
        nn.init.normal_(self.embedding.weight)
        self.embedding.weight.data[self.embedding.padding_idx].zero_()


@zoo
class T5(nn.Module):
    """A factor and a fan for each kind of module."""

    def __init__(self, width: int = 8, inner: int = 12, factor: float = 1.0) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, width)
        self.layers = nn.ModuleList()
        for index in range(2):
            block = Block({name: nn.Linear(width, inner, bias=False) for name in "qkv"})
            block["o"] = nn.Linear(inner, width, bias=False)
            if index == 0:
                block["relative_attention_bias"] = nn.Embedding(6, 4)
            self.layers.append(block)
        self.init_weights(width, factor)

    def init_weights(self, width: int = 8, factor: float = 1.0) -> None:
        self.shared.weight.data.normal_(mean=0.0, std=factor * 1.0)
        for block in self.layers:
            block["q"].weight.data.normal_(mean=0.0, std=factor * ((width * 3) ** -0.5))
            for name in ("k", "v"):
                block[name].weight.data.normal_(mean=0.0, std=factor * (width**-0.5))
            block["o"].weight.data.normal_(mean=0.0, std=factor * ((4 * 3) ** -0.5))
            if "relative_attention_bias" in block:
                block["relative_attention_bias"].weight.data.normal_(mean=0.0, std=factor * (width**-0.5))


@zoo
class MixtureOfExperts(nn.Module):
    """Stacked experts, each initialised by its slice; a router; biases that only the constructor sets."""

    def __init__(self, experts: int = 5, width: int = 4, inner: int = 6) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, inner, width))
        self.w2 = nn.Parameter(torch.empty(experts, width, inner))
        self.w3 = nn.Parameter(torch.empty(experts * inner, width))
        self.router = nn.Linear(width, experts, bias=False)
        self.register_buffer("expert_bias", torch.zeros(experts), persistent=True)
        self.init_weights()

    def init_weights(self) -> None:
        experts, inner, width = self.w1.shape
        for expert in range(experts):
            nn.init.kaiming_uniform_(self.w1[expert], a=math.sqrt(5))
            nn.init.trunc_normal_(self.w2.data[expert], std=0.02 / (expert + 1))
        nn.init.normal_(self.w3.view(experts, inner, width), std=0.03)
        nn.init.normal_(self.router.weight, std=0.02)


@zoo
class DLRM(nn.Module):
    """Tables of different heights with bounds by their heights, and normals by fan in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.EmbeddingBag(n, 4, mode="sum") for n in (17, 3, 8))
        self.bottom = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4))
        self.init_weights()

    def init_weights(self) -> None:
        for table in self.layers:
            bound = math.sqrt(1 / table.num_embeddings)
            table.weight.data.uniform_(-bound, bound)
        for module in self.bottom:
            if isinstance(module, nn.Linear):
                fan_out, fan_in = module.weight.shape
                nn.init.normal_(module.weight, 0.0, math.sqrt(2 / (fan_in + fan_out)))
                nn.init.normal_(module.bias, 0.0, math.sqrt(1 / fan_out))


@zoo
class OrthogonalLSTM(nn.Module):
    """Recurrent weights orthogonal as a whole and by gates; the forget gate's bias 1."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, width, num_layers=2), nn.GRU(width, 3, bidirectional=True)
        self.init_weights(width)

    def init_weights(self, width: int = 5) -> None:
        for name, parameter in self.lstm.named_parameters():
            if "weight_hh" in name:
                nn.init.orthogonal_(parameter)
            elif "weight_ih" in name:
                nn.init.xavier_uniform_(parameter.data)
            else:
                parameter.data.fill_(0)
                parameter.data[width : 2 * width].fill_(1)
        for parameter in self.gru.parameters():
            if parameter.dim() == 2:
                for gate in parameter.chunk(3):
                    nn.init.orthogonal_(gate, gain=math.sqrt(2))


class LoRALinear(nn.Linear):
    def __init__(self, fan_in: int, fan_out: int, rank: int) -> None:
        super().__init__(fan_in, fan_out)
        self.weight.requires_grad_(False)
        self.lora_A = nn.Parameter(self.weight.new_zeros((rank, fan_in)))
        self.lora_B = nn.Parameter(self.weight.new_zeros((fan_out, rank)))
        self.reset_lora_parameters()

    def reset_lora_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)


@zoo
class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LoRALinear(5, 7, 2) for _ in range(2))

    def init_weights(self) -> None:
        for layer in self.layers:
            layer.reset_lora_parameters()


@zoo
class MuP(nn.Module):
    """A readout that is divided by the width, hidden weights by fan in, after a default init."""

    def __init__(self, width: int = 9, base: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, width), nn.Linear(width, width)])
        self.readout = nn.Linear(width, 5)
        self.init_weights(base)

    def init_weights(self, base: int = 3) -> None:
        width = self.readout.in_features
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight, a=1, mode="fan_in")
        self.readout.reset_parameters()
        with torch.no_grad():
            self.readout.weight.mul_(base / width)
            self.layers[1].weight.data /= math.sqrt(width / base)


@zoo
class WeightNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.new = parametrizations.weight_norm(nn.Conv1d(3, 5, 3), dim=0)
        self.old = torch.nn.utils.weight_norm(nn.Linear(5, 4))
        self.init_weights()
        self.g = nn.Parameter(self.old.weight_v.detach().norm(dim=1))

    def init_weights(self) -> None:
        """Of v only: g follows from what was in v when the norm was put on."""
        for bias in (self.new.bias, self.old.bias):
            nn.init.zeros_(bias)


@zoo
class TorchTransformer(nn.Module):
    """torch.nn's own: copies of one layer, then drawn again where they are matrices; and copies as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Transformer(6, 2, 2, 1, 9, batch_first=True)
        layer = nn.TransformerEncoderLayer(6, 3, 7, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.query = nn.Embedding(5, 6)

    def init_weights(self) -> None:
        self.whole._reset_parameters()
        self.query.reset_parameters()


@zoo
class Sparse(nn.Module):
    """An echo state network's reservoir, scaled by a norm, and a random mask of connections."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.reservoir = nn.Linear(3, 8), nn.Linear(8, 8, bias=False)
        self.register_buffer("mask", torch.empty(8, 8, dtype=torch.bool))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.sparse_(self.reservoir.weight, sparsity=0.4, std=0.5)
        with torch.no_grad():
            self.reservoir.weight.div_(torch.linalg.matrix_norm(self.reservoir.weight))
        self.mask.copy_(torch.rand(8, 8) < 0.3)


@zoo
class CastAfterInit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 6) for _ in range(2))
        self.token = nn.Parameter(torch.empty(3, 5).normal_(std=0.1) / math.sqrt(5))
        nn.init.orthogonal_(self.layers[1].weight)
        self.to(torch.bfloat16)

    def init_weights(self) -> None:
        """On bf16 tensors what the constructor did on fp32 ones."""
        self.layers[0].reset_parameters()
        nn.init.orthogonal_(self.layers[1].weight)


@zoo
class BERT(nn.Module):
    """A padding row zeroed after apply, a decoder that is tied to the embedding and has a bias of its own, positions
    as a buffer of indices, norms of another class."""

    def __init__(self, width: int = 6, vocabulary: int = 9) -> None:
        super().__init__()
        self.embeddings = Block(
            {
                "word": nn.Embedding(vocabulary, width, padding_idx=0),
                "position": nn.Embedding(8, width),
                "segment": nn.Embedding(2, width),
                "norm": nn.LayerNorm(width, eps=1e-12),
            }
        )
        self.layers = nn.ModuleList(
            Block(
                {
                    **{name: nn.Linear(width, width) for name in ("query", "key", "value", "dense")},
                    "up": nn.Linear(width, 10),
                    "down": nn.Linear(10, width),
                    "norm": nn.LayerNorm(width),
                }
            )
            for _ in range(2)
        )
        self.decoder = nn.Linear(width, vocabulary)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.decoder.weight, self.decoder.bias = self.embeddings["word"].weight, self.bias
        self.register_buffer("position_ids", torch.arange(8).expand((1, -1)), persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.data.normal_(mean=0.0, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.data.zero_()
            elif isinstance(module, nn.LayerNorm):
                module.bias.data.zero_()
                module.weight.data.fill_(1.0)
            elif isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()
