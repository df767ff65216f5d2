"""What an init must not do: communicate, unshard, or allocate anything of a tensor's full size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
UNSHARDING = (
    "torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params",
    "torch.distributed.fsdp._runtime_utils._lazy_init",
    "torch.distributed.fsdp._flat_param.FlatParamHandle.unshard",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.unshard",
    "torch.distributed.tensor.DTensor.full_tensor",
    "torch.distributed.tensor.DTensor.redistribute",
)


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """Those of all tensors in a structure that have memory; of DTensors, the local tensor's."""
    tensors = [getattr(leaf, "_local_tensor", leaf) for leaf in _pytree.tree_leaves(values)]
    found = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor) and not tensor.is_meta]
    return {storage._cdata: storage for storage in found}


class LocalOnly(TorchDispatchMode):
    """Raises on an operator that communicates. fresh: the bytes of each storage that an operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            raise AssertionError(f"an init must not communicate, got {func}")
        before = _storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        self.fresh += [storage.nbytes() for key, storage in _storages(result).items() if key not in before]
        return result


@contextlib.contextmanager
def local_init() -> Iterator[LocalOnly]:
    """An init inside this is an AssertionError where it communicates or asks a framework to unshard."""
    with contextlib.ExitStack() as stack:
        for target in UNSHARDING:
            error = AssertionError(f"an init must not call {target.rpartition('.')[2]}")
            stack.enter_context(mock.patch(target, side_effect=error))
        yield stack.enter_context(LocalOnly())
