"""The zoo: convolutions, vision transformers, fields, generators."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrizations
from zoo_registry import zoo


@zoo
class ViT(nn.Module):
    """trunc_normal_ on tokens, a convolution initialised as a matrix, LayerScale."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 10, width) * 0.02)
        self.layers = nn.ModuleList()
        for _ in range(2):
            block = nn.Module()
            block.attn = nn.MultiheadAttention(width, 2, batch_first=True)
            block.gamma = nn.Parameter(1e-5 * torch.ones(width))
            block.mlp = nn.Sequential(nn.Linear(width, 11), nn.GELU(), nn.Linear(11, width))
            self.layers.append(block)
        self.head = nn.Linear(width, 5)
        self.init_weights()

    def init_weights(self) -> None:
        weight = self.patch.weight.data
        nn.init.xavier_uniform_(weight.view([weight.shape[0], -1]))
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        self.apply(self._init_weights)
        self.head.weight.data.mul_(0.001)
        self.head.bias.data.mul_(0.001)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.constant_(module.bias, 0)


def timm_trunc_normal_(tensor: torch.Tensor, std: float, a: float = -2.0, b: float = 2.0) -> None:
    """By the inverse of the error function, as before torch had it."""
    low, high = (0.5 * (1 + math.erf(x / math.sqrt(2))) for x in (a / std, b / std))
    with torch.no_grad():
        tensor.uniform_(2 * low - 1, 2 * high - 1)
        tensor.erfinv_().mul_(std * math.sqrt(2.0)).clamp_(a, b)


@zoo
class Swin(nn.Module):
    """Truncated normals of one's own, a table of relative positions, and its index computed."""

    def __init__(self, window: int = 3, heads: int = 2) -> None:
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        coords = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij"))
        flat = torch.flatten(coords, 1)
        relative = (flat[:, :, None] - flat[:, None, :]).permute(1, 2, 0).contiguous()
        relative[:, :, 0] += window - 1
        relative[:, :, 1] += window - 1
        relative[:, :, 0] *= 2 * window - 1
        self.register_buffer("relative_position_index", relative.sum(-1))
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones((heads, 1, 1))))
        self.init_weights()

    def init_weights(self) -> None:
        timm_trunc_normal_(self.relative_position_bias_table, std=0.02)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, bias=False), nn.BatchNorm2d(width)


@zoo
class ResNet(nn.Module):
    """The whole model overrides what its layers' constructors did; the last norm of each branch is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 5, 7, bias=False)
        self.layers = nn.ModuleList(Residual(5) for _ in range(2))
        self.fc = nn.Linear(5, 4)
        self.init_weights()

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)):
                nn.init.constant_(module.weight, 1)
                nn.init.constant_(module.bias, 0)
        for module in self.modules():
            if isinstance(module, Residual):
                nn.init.constant_(module.bn2.weight, 0)


@zoo
class EfficientNet(nn.Module):
    """The fan out of a grouped convolution is divided by its groups."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 6, 3, bias=False), nn.Conv2d(6, 6, 5, groups=6, bias=False)
        self.bn, self.fc = nn.BatchNorm2d(6, eps=1e-3), nn.Linear(6, 5)
        self.init_weights()

    def init_weights(self) -> None:
        for conv in (self.stem, self.depthwise):
            fan_out = conv.kernel_size[0] * conv.kernel_size[1] * conv.out_channels // conv.groups
            conv.weight.data.normal_(0, math.sqrt(2.0 / fan_out))
        bound = 1.0 / math.sqrt(self.fc.weight.size(0))
        self.fc.weight.data.uniform_(-bound, bound)
        self.fc.bias.data.zero_()


@zoo
class RepVGG(nn.Module):
    """Branches that begin as the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.grouped = nn.Conv2d(5, 7, 3), nn.Conv2d(6, 9, 3, groups=3)
        self.temporal, self.depthwise = nn.Conv1d(4, 4, 5), nn.Conv1d(5, 5, 3, groups=5)
        self.square, self.wide = nn.Linear(5, 5), nn.Linear(7, 4)
        self.whitening = nn.Parameter(torch.eye(6) * 0.5 + 0.1)
        self.init_weights()

    def init_weights(self) -> None:
        for module in (self.conv, self.temporal, self.depthwise):
            nn.init.dirac_(module.weight)
        nn.init.dirac_(self.grouped.weight, groups=3)
        nn.init.eye_(self.square.weight)
        nn.init.eye_(self.wide.weight)
        with torch.no_grad():
            self.square.weight.mul_(0.9)


def zero_module(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.detach().zero_()
    return module


@zoo
class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(1, 4), nn.Conv2d(4, 4, 3), zero_module(nn.Conv2d(4, 4, 3))) for _ in range(2)
        )
        self.time = nn.Sequential(nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 9))
        half = 3
        freqs = torch.exp(-math.log(10000) * torch.arange(0, half, dtype=torch.float32) / half)
        self.register_buffer("freqs", freqs)

    def init_weights(self) -> None:
        for block in self.layers:
            block[1].reset_parameters()
            zero_module(block[2])


@zoo
class Siren(nn.Module):
    def __init__(self, omega: float = 30.0) -> None:
        super().__init__()
        self.layers, self.omega = nn.ModuleList([nn.Linear(2, 7), nn.Linear(7, 7), nn.Linear(7, 1)]), omega
        self.B = nn.Parameter(torch.randn(2, 5) * 10, requires_grad=False)
        self.init_weights()

    def init_weights(self) -> None:
        with torch.no_grad():
            for index, layer in enumerate(self.layers):
                bound = 1 / layer.in_features if index == 0 else math.sqrt(6 / layer.in_features) / self.omega
                layer.weight.uniform_(-bound, bound)


@zoo
class SpectralNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([parametrizations.spectral_norm(nn.Conv2d(3, 5, 3))])
        self.old = torch.nn.utils.spectral_norm(nn.Linear(7, 4))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.xavier_uniform_(self.layers[0].parametrizations.weight.original)


@zoo
class Teacher(nn.Module):
    """A student with a copy of itself that follows it, and a tensor of prototypes that are normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 7), nn.LayerNorm(7), nn.Linear(7, 5))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, 9), dim=0))
        self.register_buffer("center", torch.zeros(1, 5))
        self.prototypes = nn.Linear(5, 6, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        self.prototypes.reset_parameters()
        self.prototypes.weight.data.copy_(F.normalize(self.prototypes.weight.data.clone(), dim=1, p=2))


@zoo
class DiT(nn.Module):
    """Sines and cosines as frozen positions, xavier for all and zeros for what conditions a block (adaLN-zero)."""

    def __init__(self, width: int = 8, tokens: int = 6) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 2, stride=2)
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, width), requires_grad=False)
        self.label = nn.Embedding(5, width)
        self.layers = nn.ModuleList()
        for _ in range(2):
            block = nn.Module()
            block.qkv, block.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            block.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
            self.layers.append(block)
        self.final = nn.Linear(width, 12)
        self.init_weights()

    def init_weights(self) -> None:
        def basic(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.constant_(module.bias, 0)

        self.apply(basic)
        _, tokens, width = self.pos_embed.shape
        omega = 1.0 / 10000 ** (torch.arange(width // 2, dtype=torch.float64) / (width / 2))
        angles = torch.outer(torch.arange(tokens, dtype=torch.float64), omega)
        table = torch.cat([angles.sin(), angles.cos()], dim=1)
        self.pos_embed.data.copy_(table.float().unsqueeze(0))
        weight = self.patch.weight.data
        nn.init.xavier_uniform_(weight.view([weight.shape[0], -1]))
        nn.init.normal_(self.label.weight, std=0.02)
        for block in self.layers:
            nn.init.constant_(block.modulation[-1].weight, 0)
            nn.init.constant_(block.modulation[-1].bias, 0)
        nn.init.constant_(self.final.weight, 0)


@zoo
class Codec(nn.Module):
    """An audio codec: a weight-normed convolution, a vector quantiser's codebook and its running averages, a spectral
    window."""

    def __init__(self, codes: int = 7, width: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(1, width, 5), nn.GroupNorm(2, width))
        self.positions = parametrizations.weight_norm(nn.Conv1d(width, width, 4, groups=2), dim=2)
        self.codebook = nn.Embedding(codes, width)
        self.register_buffer("window", torch.hann_window(9))
        self.register_buffer("cluster_size", torch.zeros(codes))
        self.register_buffer("average", self.codebook.weight.data.clone())
        self.register_buffer("steps", torch.tensor(0))
        self.init_weights()

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv1d) and not hasattr(module, "parametrizations"):
                nn.init.kaiming_normal_(module.weight)
                bound = math.sqrt(module.groups / (module.in_channels * module.kernel_size[0]))
                nn.init.uniform_(module.bias, a=-bound, b=bound)
        self.codebook.weight.data.uniform_(-1.0 / 7, 1.0 / 7)
        self.average.copy_(self.codebook.weight.data)
