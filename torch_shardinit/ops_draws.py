"""More raw fills, of the draws that docs/stream.md, section 12, defines; ops.py has the others."""

from __future__ import annotations

import numpy as np
import torch

from .native import end_of_integers
from .ops import T, documented, raw_fill


@documented("section 12")
def exponential_(
    tensor: T,
    lambd: float = 1.0,
    *,
    seed: int | None = None,
    tensor_id: int | str | None = None,
    draw: int = 0,
    offset: int | tuple[int, ...] | None = None,
    global_shape: tuple[int, ...] | None = None,
) -> T:
    """Fills a tensor or shard in place with the exponential distribution of density lambd * exp(-lambd * x), x > 0.

    Args:
        tensor: strided torch.Tensor (leaf parameters too), DTensor, or writable NumPy array of a floating dtype.
        lambd: the rate, 1 / mean; finite and > 0.
    """
    return raw_fill(tensor, "exponential", (lambd,), seed, tensor_id, draw, offset, global_shape)


@documented("section 12")
def log_normal_(
    tensor: T,
    mean: float = 1.0,
    std: float = 2.0,
    *,
    seed: int | None = None,
    tensor_id: int | str | None = None,
    draw: int = 0,
    offset: int | tuple[int, ...] | None = None,
    global_shape: tuple[int, ...] | None = None,
) -> T:
    """Fills a tensor or shard in place with exp of N(mean, std^2).

    Args:
        tensor: strided torch.Tensor (leaf parameters too), DTensor, or writable NumPy array of a floating dtype.
        mean: of the underlying normal, as torch has it; finite.
        std: of the underlying normal; finite and > 0.
    """
    return raw_fill(tensor, "log_normal", (mean, std), seed, tensor_id, draw, offset, global_shape)


@documented("section 12")
def cauchy_(
    tensor: T,
    median: float = 0.0,
    sigma: float = 1.0,
    *,
    seed: int | None = None,
    tensor_id: int | str | None = None,
    draw: int = 0,
    offset: int | tuple[int, ...] | None = None,
    global_shape: tuple[int, ...] | None = None,
) -> T:
    """Fills a tensor or shard in place with the Cauchy distribution, of density sigma / (pi * ((x - median)^2 +
    sigma^2)).

    Args:
        tensor: strided torch.Tensor (leaf parameters too), DTensor, or writable NumPy array of a floating dtype.
        median: finite.
        sigma: half of the density's width at half of its height; finite and > 0.
    """
    return raw_fill(tensor, "cauchy", (median, sigma), seed, tensor_id, draw, offset, global_shape)


@documented("section 12")
def geometric_(
    tensor: T,
    p: float,
    *,
    seed: int | None = None,
    tensor_id: int | str | None = None,
    draw: int = 0,
    offset: int | tuple[int, ...] | None = None,
    global_shape: tuple[int, ...] | None = None,
) -> T:
    """Fills a tensor or shard in place with the number of trials up to and with the first success: k with probability
    (1 - p)^(k - 1) * p, k >= 1.

    Args:
        tensor: strided torch.Tensor (leaf parameters too), DTensor, or writable NumPy array of a floating dtype.
        p: of a success; > 0 and < 1, kept in fp64.
    """
    return raw_fill(tensor, "geometric", (p,), seed, tensor_id, draw, offset, global_shape)


@documented("section 12")
def bernoulli_(
    tensor: T,
    p: float = 0.5,
    *,
    seed: int | None = None,
    tensor_id: int | str | None = None,
    draw: int = 0,
    offset: int | tuple[int, ...] | None = None,
    global_shape: tuple[int, ...] | None = None,
) -> T:
    """Fills a tensor or shard in place with 1 with probability p, else 0; the same elements in every dtype.

    Args:
        tensor: strided torch.Tensor (leaf parameters too), DTensor, or writable NumPy array of a floating dtype, an
            integer one or bool.
        p: in [0, 1]; the probability is p rounded up to a multiple of 2^-32.
    """
    return raw_fill(tensor, "bernoulli", (p,), seed, tensor_id, draw, offset, global_shape)


def _default_high(tensor: object) -> int | None:
    if not isinstance(tensor, (torch.Tensor, np.ndarray)):
        return None
    dtype = getattr(torch, str(tensor.dtype).removeprefix("torch."), None)
    return end_of_integers(dtype) if isinstance(dtype, torch.dtype) and not dtype.is_complex else None


@documented("section 12")
def random_(
    tensor: T,
    low: int = 0,
    high: int | None = None,
    *,
    seed: int | None = None,
    tensor_id: int | str | None = None,
    draw: int = 0,
    offset: int | tuple[int, ...] | None = None,
    global_shape: tuple[int, ...] | None = None,
) -> T:
    """Fills a tensor or shard in place with integers, uniform in [low, high).

    Args:
        tensor: strided torch.Tensor (leaf parameters too), DTensor, or writable NumPy array of a floating dtype, an
            integer one or bool; an integer one must hold all of [low, high).
        low: an integer that fp64 holds exactly.
        high: likewise, > low, high - low < 2^64. Left out, the range goes up to the largest integer of an integer dtype
            (uint64: needs a low above 0), and to 2^d with d the bits of a floating dtype's significand (of fp64 to
            2^53 - 1).
    """
    bounds = (low, _default_high(tensor) if high is None else high)
    return raw_fill(tensor, "random", bounds, seed, tensor_id, draw, offset, global_shape)
