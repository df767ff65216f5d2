"""Ordinary tensors: what a plain or DDP model registers, and the whole tensors beside sharded ones."""

from __future__ import annotations

import torch

from .. import region


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether this is memory and nothing more: a Tensor, a Parameter, or a subclass that leaves torch's functions and
    operators alone. Quantised, lazy, fake and jagged tensors override them."""
    cls = type(tensor)
    function = cls.__torch_function__
    return cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and (
        getattr(function, "__func__", function) is torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
        or function is torch._C._disabled_torch_function_impl
    )


def check_strided(tensor: torch.Tensor, name: str) -> None:
    """A tensor can be filled element by element if each index has an address of its own."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name}: a tensor to fill must be dense (torch.strided), got layout {tensor.layout}")
    if tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested"
        raise ValueError(f"{name}: a tensor to fill must be dense, got a {kind} one")
    if not tensor.is_contiguous() and region.overlaps_itself(tensor.shape, tensor.stride()):
        raise ValueError(
            f"{name}: each element must have memory of its own, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()} (an expanded tensor?)"
        )


def geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same elements of the same storage: one tensor under two names."""
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )
