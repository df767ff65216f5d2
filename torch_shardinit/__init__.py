"""Bit-identical initialisation of sharded PyTorch models."""

from .ops import normal_, random_bits_, trunc_normal_, uniform_
from .stream import STREAM_VERSION, manual_seed, tensor_id

__all__ = ["STREAM_VERSION", "manual_seed", "normal_", "random_bits_", "tensor_id", "trunc_normal_", "uniform_"]
