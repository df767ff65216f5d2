"""What a raw fill writes to: checks of tensors and arrays, and the place of a shard in its global tensor."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .draws import BITS_DTYPES, DTYPE_CODES, INTEGER_DRAWS, INTEGER_DTYPES
from .native import check_device, check_memory, dtype_name
from .region import overlaps_itself, row_major_strides
from .stream import as_int

INDEX_LIMIT = 1 << 63


class Place(NamedTuple):
    """Where a shard lies: its first element's global index, and the index step along each dimension."""

    start: int
    steps: tuple[int, ...]


def _shape(value: object, what: str) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, torch.Size)):
        raise TypeError(f"{what} must be a sequence of ints, got {value!r} ({type(value).__name__})")
    sizes = tuple(as_int(size, f"{what}[{d}]") for d, size in enumerate(value))
    for d, size in enumerate(sizes):
        if size < 0:
            raise ValueError(f"{what}[{d}] must be >= 0, got {size}")
    return sizes


def place_of(function: str, shape: tuple[int, ...], offset: object, global_shape: object) -> Place:
    """The place that ``offset`` and ``global_shape`` give a shard of this local shape. None for both: the whole tensor.

    Raises:
        TypeError, ValueError: see the raw fills' docstrings.
    """
    if offset is None and global_shape is None:
        return Place(0, row_major_strides(shape))
    sizes = None if global_shape is None else _shape(global_shape, f"{function}: global_shape")
    if sizes is not None and math.prod(sizes) > INDEX_LIMIT:
        raise ValueError(f"{function}: global_shape must hold at most 2^63 elements, got {list(sizes)}")
    if offset is None:
        if sizes is not None and sizes != shape:
            raise ValueError(
                f"{function}: a shard needs offset= beside global_shape, got shape {list(shape)} of {list(sizes)}"
            )
        offset = 0
    if isinstance(offset, (tuple, list, torch.Size)):
        corner = _shape(offset, f"{function}: offset")
        if sizes is None:
            raise ValueError(f"{function}: an offset of coordinates needs global_shape, got offset={corner} without it")
        if not len(corner) == len(sizes) == len(shape):
            raise ValueError(
                f"{function}: offset, global_shape and tensor must have as many dimensions, "
                f"got {len(corner)}, {len(sizes)} and {len(shape)}"
            )
        for d, (first, extent, size) in enumerate(zip(corner, shape, sizes, strict=True)):
            if first + extent > size:
                raise ValueError(
                    f"{function}: the box must lie inside global_shape {list(sizes)}, got offset {first} and size "
                    f"{extent} in dimension {d}"
                )
        # A dimension of one element takes no step; its own may be 2^63, which no int64 holds.
        steps = tuple(1 if n <= 1 else step for n, step in zip(sizes, row_major_strides(sizes), strict=True))
        return Place(sum(first * step for first, step in zip(corner, steps, strict=True)), steps)
    start = as_int(offset, f"{function}: offset")
    if sizes is not None and len(sizes) == len(shape) and sizes[1:] != shape[1:] and 0 not in shape:
        raise ValueError(
            f"{function}: offset must be a tuple of coordinates where the shard is a box, got {start} for shape "
            f"{list(shape)} of global_shape {list(sizes)}"
        )
    limit = INDEX_LIMIT if sizes is None else math.prod(sizes)
    if start < 0:
        raise ValueError(f"{function}: offset must be >= 0, got {start}")
    if start + math.prod(shape) > limit:
        bound = "2^63" if sizes is None else f"the {limit} of global_shape {list(sizes)}"
        raise ValueError(f"{function}: offset + elements must be at most {bound}, got {start} + {math.prod(shape)}")
    return Place(start, row_major_strides(shape))


def _check_overlap(function: str, shape: Sequence[int], strides: Sequence[int]) -> None:
    if overlaps_itself(shape, [abs(stride) for stride in strides]):  # NumPy has negative ones
        raise ValueError(
            f"{function}: elements must not share memory (an expanded or overlapping view?), "
            f"got shape {list(shape)}, strides {list(strides)}"
        )


def _check_dtype(function: str, name: str | None, shown: object) -> str:
    allowed = BITS_DTYPES if function == "random_bits_" else DTYPE_CODES
    if function.removesuffix("_") in INTEGER_DRAWS:
        allowed = {**DTYPE_CODES, **INTEGER_DTYPES}
    if name not in allowed:
        raise TypeError(f"{function}: dtype must be one of {', '.join(allowed)}, got {shown}")
    assert name is not None
    return name


def is_flat_parameter(tensor: torch.Tensor) -> bool:
    return bool(getattr(tensor, "_is_flat_param", False))


def _is_fake(tensor: torch.Tensor) -> bool:
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(tensor, fake.FakeTensor)


PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _is_known_class(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN_CLASSES or is_flat_parameter(tensor) or _is_fake(tensor)


def check_tensor(function: str, tensor: torch.Tensor) -> str:
    """The stream's dtype name of a tensor that can be filled in place.

    Raises:
        TypeError: its class or dtype can't be.
        ValueError: its layout, device or strides can't be.
    """
    if not _is_known_class(tensor):
        raise TypeError(
            f"{function}: tensor must be a plain torch.Tensor, Parameter or DTensor, got {type(tensor).__name__}"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise ValueError(f"{function}: tensor must not be inside a torch.func transform (vmap, grad); fill it outside")
    if tensor.is_nested:
        raise ValueError(f"{function}: tensor must not be nested")
    if tensor.layout != torch.strided:
        raise ValueError(f"{function}: tensor must be strided, got layout {tensor.layout}")
    if tensor.is_meta:
        raise ValueError(f"{function}: tensor must hold memory, got one on meta; materialise it first (to_empty)")
    if not tensor.is_cpu:
        check_device(function, tensor.device)
    name = _check_dtype(function, dtype_name(tensor.dtype), tensor.dtype)
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(f"{function}: tensor must not be a lazily negated or conjugated view")
    if not tensor.is_contiguous():
        _check_overlap(function, tensor.shape, tensor.stride())
    if not _is_fake(tensor):
        check_memory(function, tensor)
    return name


def check_array(function: str, array: np.ndarray) -> tuple[str, tuple[int, ...]]:
    """The stream's dtype name of a NumPy array that can be filled in place, and its strides in elements."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{function}: array must not be masked; its .data can be filled")
    if not array.flags.writeable:
        raise ValueError(f"{function}: array must be writable, got a read-only one")
    if not array.dtype.isnative:
        raise TypeError(f"{function}: array must be in native byte order, got dtype {array.dtype.str}")
    name = _check_dtype(function, array.dtype.name, array.dtype)
    if any(stride % array.itemsize for stride in array.strides):
        raise ValueError(
            f"{function}: strides must be whole elements of {array.itemsize} bytes, got {list(array.strides)} bytes"
        )
    if array.ctypes.data % array.itemsize:
        raise ValueError(f"{function}: array must be aligned to its {array.itemsize}-byte elements")
    strides = tuple(stride // array.itemsize for stride in array.strides)
    _check_overlap(function, array.shape, strides)
    return name, strides
