"""Bit-identical initialisation of sharded PyTorch models, with no communication. Start with README.md."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("torch_shardinit needs torch, 2.11 or later: pip install torch") from error

from .agree import check_consistent, check_replicas
from .build import build_info
from .errors import RecordError, ReplicaMismatchError, ShardInitError, UninitializedError
from .fingerprint import Fingerprint, fingerprint
from .model import init_model_, param_init_fn
from .ops import normal_, random_bits_, trunc_normal_, uniform_
from .ops_draws import bernoulli_, cauchy_, exponential_, geometric_, log_normal_, random_
from .plan import Plan
from .record import record, recording, reset_parameters
from .stream import STREAM_VERSION, manual_seed, tensor_id

__all__ = [
    "STREAM_VERSION",
    "Fingerprint",
    "Plan",
    "RecordError",
    "ReplicaMismatchError",
    "ShardInitError",
    "UninitializedError",
    "bernoulli_",
    "build_info",
    "cauchy_",
    "check_consistent",
    "check_replicas",
    "exponential_",
    "fingerprint",
    "geometric_",
    "init_model_",
    "log_normal_",
    "manual_seed",
    "normal_",
    "param_init_fn",
    "random_",
    "random_bits_",
    "record",
    "recording",
    "reset_parameters",
    "tensor_id",
    "trunc_normal_",
    "uniform_",
]
