"""A decoder-style transformer as its author would write it: nothing here knows of sharding or of this library.

`python -m torch_shardinit verify` initialises it in every layout. Each idiom is one that is hard to get right under
sharding: an embedding with a padding row, a weight tied to it, parameters and tables whose values only the constructor
sets, and an init that depends on the depth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class DecoderConfig:
    """The defaults make 20.3 million parameters; no size of theirs that is sharded divides the vocabulary."""

    vocab_size: int = 16_001
    dim: int = 384
    num_layers: int = 8
    num_heads: int = 6
    hidden_dim: int = 1024
    max_length: int = 1024
    padding_idx: int = 0


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * scale * self.weight


def rotary_table(head_dim: int, max_length: int, base: float = 10_000.0) -> torch.Tensor:
    """cos and sin of every position and frequency: shape (2, max_length, head_dim / 2)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(max_length).float(), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs of (batch, heads, length, head_dim) by their position's angles."""
    cos, sin = table[:, : x.shape[-2]]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = F.scaled_dot_product_attention(rotate(query, table), rotate(key, table), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class GatedMLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim)
        self.mlp = GatedMLP(config)

    def init_weights(self, std: float) -> None:
        nn.init.trunc_normal_(self.attention.qkv.weight, std=0.02)
        nn.init.normal_(self.attention.out.weight, std=std)
        nn.init.xavier_uniform_(self.mlp.gate.weight)
        nn.init.trunc_normal_(self.mlp.up.weight, std=0.02, a=-0.04, b=0.04)
        nn.init.normal_(self.mlp.down.weight, std=std)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    rotary: torch.Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim, padding_idx=config.padding_idx)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        table = rotary_table(config.dim // config.num_heads, config.max_length)
        self.register_buffer("rotary", table, persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.embedding.weight, std=0.02)
        with torch.no_grad():
            self.embedding.weight[self.config.padding_idx].fill_(0)
        # Each block adds twice to the residual stream.
        std = 0.02 / math.sqrt(2 * self.config.num_layers)
        for block in self.blocks:
            block.init_weights(std)  # type: ignore[operator]

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """The logits, (batch, length, vocab_size); with targets, (batch, length), the mean loss."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotary)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=self.config.padding_idx)


def decoder() -> Decoder:
    """20.3 million parameters."""
    return Decoder(DecoderConfig())


def tiny() -> Decoder:
    """For tests: 56 thousand parameters, with odd sizes that no world divides."""
    return Decoder(DecoderConfig(vocab_size=301, dim=36, num_layers=3, num_heads=3, hidden_dim=90, max_length=32))
