"""Small models with the idioms of real ones, for the tests of recording, and a second, eager way to their values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_shardinit import region as rg
from torch_shardinit.plan import Plan
from torch_shardinit.program import RANDOM, Exact, Played


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = RMSNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.gate = nn.Linear(dim, 2 * dim, bias=False)
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)
        self.scale = nn.Parameter(1e-4 * torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.scale * self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def rotary(dim: int, length: int) -> torch.Tensor:
    frequencies = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))
    return torch.outer(torch.arange(length).float(), frequencies).cos()


class Decoder(nn.Module):
    """Embedding with a padding row, tied head, RMSNorm by hand, rotary buffer, trunc_normal_, a region step."""

    def __init__(self, dim: int = 8, vocabulary: int = 11, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim, padding_idx=2)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.register_buffer("cos", rotary(dim, 16), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.position = nn.Parameter(torch.empty(5, dim))
        nn.init.trunc_normal_(self.position, std=0.02)
        with torch.no_grad():
            self.position[1:3].fill_(7.0)
        self.apply(self._init_weights)
        self.head.weight = self.embedding.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Zoo(nn.Module):
    """Modules of torch with torch's own init, and the ways in which people write values by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 2, proj_size=1)
        self.conv = nn.Conv2d(2, 3, 3)
        self.bn = nn.BatchNorm2d(3)
        self.transformer_layer = nn.TransformerEncoderLayer(4, 2, 8)
        self.bilinear = nn.Bilinear(2, 3, 4)
        self.xavier = nn.Parameter(nn.init.xavier_normal_(torch.empty(4, 6)))
        self.kaiming = nn.Parameter(torch.empty(4, 3, 2))
        nn.init.kaiming_normal_(self.kaiming, mode="fan_out")
        self.scaled = nn.Parameter(torch.randn(7) * 0.02)
        self.shifted = nn.Parameter(1 - 2 * torch.rand(3, 2))
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))
        self.joined = nn.Parameter(torch.cat([torch.randn(2, 4), 0.5 * torch.randn(3, 4)]))
        self.stacked = nn.Parameter(torch.stack([torch.zeros(3), torch.randn(3)], dim=1))
        self.copied = nn.Parameter(torch.empty(4, 4))
        with torch.no_grad():
            self.copied[:2].copy_(torch.randn(2, 4))
            self.copied[2:] = 0.25
            self.copied.div_(3).clamp_(min=-0.3).sub_(0.01)
        self.narrow = nn.Parameter(torch.randn(4, 2).to(torch.bfloat16))
        self.strided = nn.Parameter(torch.empty(4, 6))
        with torch.no_grad():
            self.strided[:, ::2].normal_(std=0.1)
            self.strided[:, 1::2].uniform_(-1, 1)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4, dtype=torch.bool)))
        self.register_buffer("table", torch.tensor([[1.0, 2.0], [3.0, 4.5]]))
        encoding = torch.empty(6, 4)
        encoding[:, 0::2] = torch.sin(torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.1]))
        encoding[:, 1::2] = torch.cos(torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.1]))
        self.register_buffer("encoding", encoding)
        # timm's truncated normal: random in place, then a function that no exact step is
        self.erf = nn.Parameter(torch.empty(3, 5))
        with torch.no_grad():
            self.erf.uniform_(-0.9, 0.9).erfinv_().mul_(0.02)
        self.decay = nn.Parameter(torch.log(torch.rand(7) + 1))
        self.gates = nn.ParameterList(nn.Parameter(torch.empty(6)) for _ in range(6))
        with torch.no_grad():
            self.gates[0].exponential_(2.0)
            self.gates[1].log_normal_()
            self.gates[2].cauchy_(sigma=3.0)
            self.gates[3].geometric_(0.25)
            self.gates[4].bernoulli_(0.3).mul_(2)
            self.gates[5].copy_(torch.rand(6).sqrt().neg().exp())
        # computed from another tensor
        self.log_of_scaled = nn.Parameter(self.scaled.detach().abs().add(1).log())


class Tables(nn.Module):
    """Tables as real models build them: complex rotary, relative positions, sinusoids, rates by .item()."""

    def __init__(self) -> None:
        super().__init__()
        rates = 1.0 / (10000.0 ** (torch.arange(0, 8, 2)[:4].float() / 8))
        angles = torch.outer(torch.arange(16), rates).float()
        self.register_buffer("rotary", torch.polar(torch.ones_like(angles), angles))
        grid = torch.stack(torch.meshgrid([torch.arange(4), torch.arange(4)], indexing="ij")).flatten(1)
        relative = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0).contiguous()
        relative[:, :, 0] += 3
        relative[:, :, 1] += 3
        relative[:, :, 0] *= 7
        self.register_buffer("relative", relative.sum(-1))
        table = torch.zeros(20, 6)
        position = torch.arange(0, 20, dtype=torch.float).unsqueeze(1)
        step = torch.exp(torch.arange(0, 6, 2).float() * (-math.log(10000.0) / 6))
        table[:, 0::2] = torch.sin(position * step)
        table[:, 1::2] = torch.cos(position * step)
        self.register_buffer("sinusoids", table.unsqueeze(0).transpose(0, 1))
        self.drops = nn.ModuleList(nn.Dropout(rate.item()) for rate in torch.linspace(0, 0.3, 5))


class StateSpace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_a = nn.Parameter(torch.log(torch.arange(1, 5, dtype=torch.float32).repeat(3, 1).contiguous()))
        self.d = nn.Parameter(torch.ones(3))
        self.dt = nn.Linear(2, 3)
        nn.init.uniform_(self.dt.weight, -0.1, 0.1)
        dt = torch.exp(torch.full((3,), -2.0) * 1.5).clamp(min=1e-4)
        with torch.no_grad():
            self.dt.bias.copy_(dt + torch.log(-torch.expm1(-dt)))


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2, 5)), nn.Parameter(torch.zeros(5, 2))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.tokens = nn.Parameter(torch.randn(1, 3, 4))
        self.linear = nn.Linear(3, 3)
        self.linear.weight.data.normal_(mean=0.0, std=1 / math.sqrt(3))
        self.linear.bias.data.zero_()
        self.linear.weight.data = self.linear.weight.data / 2


class Rows(nn.Module):
    """Loops over rows, and arithmetic on slices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 3))
        self.long = nn.Parameter(torch.empty(1500, 2))
        self.longer = nn.Parameter(torch.empty(3000, 2))
        with torch.no_grad():
            for row in range(6):
                self.weight[row].normal_(0, 0.1 * (row + 1))
            self.weight[::2] *= 2
            self.weight[:, 1] += 1
            self.weight.mul_(torch.tensor(3.0)).neg_()
            for row in range(700):
                self.long[row].fill_(row)
            self.long[700:].normal_()
            for row in range(3000):
                self.longer[row].fill_(row)


def pattern(shape: tuple[int, ...], distribution: str, args: tuple[float, ...]) -> torch.Tensor:
    """Fixed numbers in place of random ones: a function of the element's index in the filled view."""
    count = int(torch.Size(shape).numel())
    u = ((torch.arange(count, dtype=torch.float32) * 0.754877666).remainder(1.0)).reshape(shape)
    if distribution == "uniform":
        return args[0] + u * (args[1] - args[0])
    if distribution not in ("normal", "trunc_normal"):
        return (u * 7).floor() + sum(args)
    values = (u * 3 - 1.5) * args[0] + args[1]
    return values.clamp(*args[2:]) if distribution == "trunc_normal" else values


TORCH_DEFAULTS: dict[str, tuple[float, ...]] = {
    "exponential_": (1.0,),
    "log_normal_": (1.0, 2.0),
    "cauchy_": (0.0, 1.0),
    "geometric_": (),
    "bernoulli_": (0.5,),
}


class _FixedRandom(TorchDispatchMode):
    """Stock torch, its random operators answered by `pattern`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        defaults = TORCH_DEFAULTS.get(name)
        if defaults is not None:
            numbers = [float(value) for value in args[1:] if isinstance(value, (int, float))]
            numbers += [kwargs[key] for key in ("lambd", "mean", "median", "std", "sigma", "p") if key in kwargs]
            args[0].copy_(pattern(tuple(args[0].shape), name[:-1], (*numbers, *defaults[len(numbers) :])))
        elif name in ("normal_", "uniform_", "randn", "rand", "randn_like", "rand_like"):
            numbers = [value for value in args[1:] if isinstance(value, (int, float))]
            if name == "uniform_":
                draw = ("uniform", tuple((*numbers, *(0.0, 1.0)[len(numbers) :])))
            elif name == "normal_":
                mean, std = (*numbers, *(0.0, 1.0)[len(numbers) :])
                draw = ("normal", (std, mean))
            else:
                draw = ("normal", (1.0, 0.0)) if name.startswith("randn") else ("uniform", (0.0, 1.0))
            target = args[0] if name.endswith("_") else result
            target.copy_(pattern(tuple(target.shape), *draw))
        return result


@contextlib.contextmanager
def fixed_random() -> Iterator[None]:
    """For eager runs: pattern instead of random numbers, trunc_normal_ included."""

    def trunc_normal_(tensor, mean, std, a, b, generator=None):  # type: ignore[no-untyped-def]
        with torch.no_grad():
            return tensor.copy_(pattern(tuple(tensor.shape), "trunc_normal", (std, mean, a, b)))

    with mock.patch("torch.nn.init._no_grad_trunc_normal_", trunc_normal_), _FixedRandom():
        yield


def interpret_(tensor: torch.Tensor, program: Exact, *_: object) -> None:
    """An exact program, step by step on the whole tensor, with pattern for random numbers."""
    work = tensor.float() if tensor.dtype.itemsize < 4 else tensor
    for step in program.steps:
        box = rg.full_box(tuple(work.shape)) if step.region is None else step.region
        view = work[rg.slices(box)] if box else work
        if step.op in RANDOM:
            view.copy_(pattern(tuple(view.shape), step.op, step.args))
        elif step.op == "clamp":
            view.clamp_(*step.args)
        elif step.op == "eye":
            grid = torch.meshgrid(*(torch.arange(size) for size in view.shape), indexing="ij")
            view.copy_(grid[int(step.args[0])] == grid[int(step.args[1])])
        else:
            getattr(view, f"{step.op}_")(*step.args)
    if work is not tensor:
        tensor.copy_(work)


def interpreted(plan: Plan) -> dict[str, torch.Tensor]:
    """The values of all tensors of a Plan under every name, with pattern for random numbers."""
    values = {}
    with mock.patch("torch_shardinit.play.fill_exact_", interpret_):
        for entry in plan.entries.values():
            if isinstance(entry.program, Exact):
                tensor = torch.full(entry.shape, float("nan"), dtype=entry.dtype)
                interpret_(tensor, entry.program)
            else:
                assert isinstance(entry.program, Played), f"{entry.name}: {entry.program.describe()}"
                tensor = entry.program.evaluate(0, lambda name, draw: 0)
            values.update(dict.fromkeys(entry.aliases, tensor))
    return values


def eager(make: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    """The same from stock torch."""
    with fixed_random():
        model = make()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}
