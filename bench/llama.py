"""Llama 3 as plain torch modules, with the init code that such models come with (torchtitan's distributions): what the
benchmarks of recording, locating and filling large models build. Nothing here knows of sharding or of this library."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn


@dataclass(frozen=True)
class LlamaConfig:
    dim: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    num_kv_heads: int = 8
    vocab_size: int = 128_256
    max_length: int = 8192
    rope_base: float = 500_000.0


# The published shapes.
SHAPES = {
    "8b": LlamaConfig(dim=4096, num_layers=32, num_heads=32, hidden_dim=14_336),
    "70b": LlamaConfig(dim=8192, num_layers=80, num_heads=64, hidden_dim=28_672),
    "405b": LlamaConfig(dim=16_384, num_layers=126, num_heads=128, hidden_dim=53_248),
    "tiny": LlamaConfig(dim=64, num_layers=3, num_heads=8, hidden_dim=160, vocab_size=512, max_length=64),
}


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotary_table(head_dim: int, max_length: int, base: float) -> torch.Tensor:
    """cos and sin of every position and frequency: shape (2, max_length, head_dim / 2)."""
    frequencies = 1.0 / (base ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = torch.outer(torch.arange(max_length).float(), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs of (batch, heads, length, head_dim) by their position's angles."""
    cos, sin = table[:, : x.shape[-2]]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.wq = nn.Linear(config.dim, config.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * self.head_dim, config.dim, bias=False)

    def init_weights(self, std: float) -> None:
        for linear in (self.wq, self.wk, self.wv):
            nn.init.trunc_normal_(linear.weight, mean=0.0, std=0.02)
        nn.init.trunc_normal_(self.wo.weight, mean=0.0, std=std)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            linear(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for linear in (self.wq, self.wk, self.wv)
        )
        mixed = nn.functional.scaled_dot_product_attention(
            rotate(query, table), rotate(key, table), value, is_causal=True, enable_gqa=True
        )
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def init_weights(self, std: float) -> None:
        nn.init.trunc_normal_(self.w1.weight, mean=0.0, std=0.02)
        for linear in (self.w2, self.w3):
            nn.init.trunc_normal_(linear.weight, mean=0.0, std=std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim)
        self.ffn_norm = RMSNorm(config.dim)
        self.std = 0.02 / (2 * (layer + 1)) ** 0.5

    def init_weights(self) -> None:
        for norm in (self.attention_norm, self.ffn_norm):
            norm.reset_parameters()
        self.attention.init_weights(self.std)
        self.feed_forward.init_weights(self.std)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    rotary: torch.Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        table = rotary_table(config.dim // config.num_heads, config.max_length, config.rope_base)
        self.register_buffer("rotary", table, persistent=False)

    def init_weights(self) -> None:
        nn.init.normal_(self.tok_embeddings.weight)
        for layer in self.layers:
            layer.init_weights()  # type: ignore[operator]
        self.norm.reset_parameters()
        std = self.config.dim**-0.5
        nn.init.trunc_normal_(self.output.weight, mean=0.0, std=std, a=-3 * std, b=3 * std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rotary)
        return self.output(self.norm(x))


def build(config: LlamaConfig) -> Llama:
    """A model with its init code run."""
    model = Llama(config)
    model.init_weights()
    return model
