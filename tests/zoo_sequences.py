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
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                parameter.data.normal_(mean=0.0, std=0.02 / math.sqrt(2 * layers))

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
        for index in range(layers):
            block = Block({"norm": RMSNorm(width)})
            for name, out in (("wq", width), ("wk", width // 2), ("wv", width // 2), ("wo", width), ("w1", 3 * width)):
                block[name] = nn.Linear(width, out, bias=False)
                std = 0.02 / (2 * (index + 1)) ** 0.5 if name == "wo" else 0.02
                nn.init.trunc_normal_(block[name].weight, mean=0.0, std=std)
            self.layers.append(block)
        self.norm, self.output = RMSNorm(width), nn.Linear(width, 13, bias=False)
        nn.init.normal_(self.tok_embeddings.weight)
        cutoff = 3 * width**-0.5
        nn.init.trunc_normal_(self.output.weight, 0.0, width**-0.5, -cutoff, cutoff)
        freqs = 1.0 / (10000.0 ** (torch.arange(0, width, 2)[: width // 2].float() / width))
        angles = torch.outer(torch.arange(9), freqs).float()
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.register_buffer("inv_freq", freqs)


@zoo
class FusedQKV(nn.Module):
    """Three draws in one weight, by torch.cat into it and by chunks of it; padding rows; a master weight split."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(6, 15, bias=False)
        parts = [nn.init.trunc_normal_(torch.empty(5, 6), std=std) for std in (0.02, 0.03, 0.04)]
        with torch.no_grad():
            self.wqkv.weight.copy_(torch.cat(parts))
        self.in_proj = nn.Parameter(torch.empty(12, 5))
        for chunk in self.in_proj.chunk(3):
            nn.init.xavier_uniform_(chunk)
        self.embedding = nn.Embedding(10, 4, padding_idx=3)
        master = torch.empty(9, 4).normal_(std=0.5)
        self.halves = nn.ParameterList([part.clone() for part in master.split([5, 4])])


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
        self.shared.weight.data.normal_(mean=0.0, std=factor * 1.0)
        for block in self.layers:
            block["q"].weight.data.normal_(mean=0.0, std=factor * ((width * 3) ** -0.5))
            for name in ("k", "v"):
                block[name].weight.data.normal_(mean=0.0, std=factor * (width**-0.5))
            block["o"].weight.data.normal_(mean=0.0, std=factor * ((4 * 3) ** -0.5))
            if "relative_attention_bias" in block:
                block["relative_attention_bias"].weight.data.normal_(mean=0.0, std=factor * (width**-0.5))


@zoo
class Mamba(nn.Module):
    """A table of logarithms, and a bias that is the inverse softplus of random numbers."""

    def __init__(self, inner: int = 7, state: int = 4) -> None:
        super().__init__()
        self.in_proj, self.conv1d = nn.Linear(5, 2 * inner), nn.Conv1d(inner, inner, 3, groups=inner)
        self.dt_proj = nn.Linear(2, inner)
        nn.init.uniform_(self.dt_proj.weight, -(2**-0.5), 2**-0.5)
        low, high = math.log(1e-3), math.log(0.1)
        dt = torch.exp(torch.rand(inner) * (high - low) + low).clamp(min=1e-4)
        with torch.no_grad():
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))
        self.A_log = nn.Parameter(torch.log(torch.arange(1, state + 1, dtype=torch.float32).repeat(inner, 1)))
        self.A_heads = nn.Parameter(torch.log(torch.empty(inner).uniform_(1, 16)))
        self.D = nn.Parameter(torch.ones(inner))


@zoo
class RWKV(nn.Module):
    """Decay tables that Python loops fill, with ratios that depend on the layer."""

    def __init__(self, width: int = 6, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for layer in range(layers):
            block = nn.Module()
            ratio, rest = layer / (layers - 1), 1.0 - layer / layers
            speed = torch.ones(width)
            for i in range(width):
                speed[i] = -5 + 8 * (i / (width - 1)) ** (0.7 + 1.3 * ratio)
            block.time_decay = nn.Parameter(speed)
            zigzag = torch.tensor([(i + 1) % 3 - 1 for i in range(width)]) * 0.5
            block.time_first = nn.Parameter(torch.ones(width) * math.log(0.3) + zigzag)
            steps = torch.arange(width).float().div(width).view(1, 1, width)
            block.time_mix = nn.Parameter(torch.pow(steps, rest))
            block.key = nn.Linear(width, width, bias=False)
            nn.init.orthogonal_(block.key.weight, gain=0.1)
            block.output = nn.Linear(width, width, bias=False)
            nn.init.zeros_(block.output.weight)
            self.layers.append(block)


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
        for table in self.layers:
            bound = math.sqrt(1 / table.num_embeddings)
            table.weight.data.uniform_(-bound, bound)
        self.bottom = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4))
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
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)


@zoo
class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LoRALinear(5, 7, 2) for _ in range(2))


@zoo
class MuP(nn.Module):
    """A readout that is divided by the width, hidden weights by fan in, after a default init."""

    def __init__(self, width: int = 9, base: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, width), nn.Linear(width, width)])
        self.readout = nn.Linear(width, 5)
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight, a=1, mode="fan_in")
        with torch.no_grad():
            self.readout.weight.mul_(base / width)
            self.layers[1].weight.data /= math.sqrt(width / base)


@zoo
class WeightNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.new = parametrizations.weight_norm(nn.Conv1d(3, 5, 3), dim=0)
        self.old = torch.nn.utils.weight_norm(nn.Linear(5, 4))
        self.g = nn.Parameter(self.old.weight_v.detach().norm(dim=1))


@zoo
class TorchTransformer(nn.Module):
    """torch.nn's own: copies of one layer, then drawn again where they are matrices; and copies as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Transformer(6, 2, 2, 1, 9, batch_first=True)
        layer = nn.TransformerEncoderLayer(6, 3, 7, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.query = nn.Embedding(5, 6)


@zoo
class Sparse(nn.Module):
    """An echo state network's reservoir, scaled by a norm, and a random mask of connections."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.reservoir = nn.Linear(3, 8), nn.Linear(8, 8, bias=False)
        nn.init.sparse_(self.reservoir.weight, sparsity=0.4, std=0.5)
        with torch.no_grad():
            self.reservoir.weight.div_(torch.linalg.matrix_norm(self.reservoir.weight))
        self.register_buffer("mask", torch.rand(8, 8) < 0.3)


@zoo
class CastAfterInit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 6) for _ in range(2))
        self.token = nn.Parameter(torch.empty(3, 5).normal_(std=0.1) / math.sqrt(5))
        nn.init.orthogonal_(self.layers[1].weight)
        self.to(torch.bfloat16)
