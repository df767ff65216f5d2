"""The raw fills: one tensor or shard, in place, from (seed, tensor_id, global index)."""

from __future__ import annotations

import math
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from . import _native
from .draws import DTYPE_CODES, INTEGER_DTYPES, check_draw, lower
from .locate.deepspeed import check_not_stand_in
from .locate.dtensor import is_dtensor, locate_dtensor
from .native import check_memory, fill, piece
from .stream import as_int, resolve_seed
from .stream import tensor_id as id_of_name
from .targets import PLAIN_CLASSES, Place, check_array, check_tensor, is_flat_parameter, place_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T", torch.Tensor, np.ndarray)

# torch sees the fills as one operator: it can be traced, and modes such as FakeTensorMode reach it. seed, tensor_id and
# start cross the schema as two's complement, since its int is int64.
_LIBRARY = torch.library.Library("torch_shardinit", "DEF")
_LIBRARY.define(
    "fill_(Tensor(a!) self, str distribution, float[] params, int seed, int tensor_id, int start, int[] steps) -> ()"
)
_MASK64 = (1 << 64) - 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _fill_native(
    self: torch.Tensor, distribution: str, params: list[float], seed: int, tensor_id: int, start: int, steps: list[int]
) -> None:
    key, identity = seed & _MASK64, tensor_id & _MASK64
    check_memory("fill", self)
    pieces = [piece(self, distribution, tuple(params), seed=key, tensor_id=identity, start=start, steps=steps)]
    fill(pieces, self.device)


_LIBRARY.impl("fill_", _fill_native, "CPU")
_LIBRARY.impl("fill_", _fill_native, "CUDA")
torch.library.register_fake("torch_shardinit::fill_", lambda *args: None, lib=_LIBRARY)
_OPERATOR = torch.ops.torch_shardinit.fill_.default


def _is_watched() -> bool:
    """Whether something of torch may want to see the operator: a mode, torch.func, a trace, torch.compile, the
    profiler. Calling it costs several times what a small fill does."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.compiler.is_compiling()
        or torch.autograd._profiler_enabled()
    )


class _DefaultIdUses:
    """Remembers the last fills that left tensor_id out, to warn once when two of them hold the same values."""

    def __init__(self) -> None:
        self.recent: deque[tuple[int, int, int, int]] = deque(maxlen=64)
        self.warned = False

    def note(self, function: str, key: int, place: Place, shape: tuple[int, ...], storage: int) -> None:
        if self.warned or 0 in shape:
            return
        last = place.start + sum((size - 1) * step for size, step in zip(shape, place.steps, strict=True))
        for other_key, first, end, other_storage in self.recent:
            if other_key == key and storage != other_storage and first <= last and place.start <= end:
                self.warned = True
                warnings.warn(
                    f"{function}: a second fill left tensor_id out for the same seed and overlapping indices, so that "
                    "two tensors hold the same draws. Pass tensor_id= (an int, or the tensor's name).",
                    stacklevel=4,
                )
                return
        self.recent.append((key, place.start, last, storage))


_default_id_uses = _DefaultIdUses()


def _identity(function: str, tensor_id: object, draw: object) -> int:
    number = as_int(draw, f"{function}: draw")
    if isinstance(tensor_id, str):
        return id_of_name(tensor_id, number)
    value = as_int(tensor_id, f"{function}: tensor_id")
    if not 0 <= value <= _MASK64:
        raise ValueError(f"{function}: tensor_id must be in [0, 2^64), got {value}")
    if number != 0:
        raise ValueError(f"{function}: draw goes with a tensor_id that is a name, got draw={number}, tensor_id={value}")
    return value


def raw_fill(
    tensor: Any,
    distribution: str,
    params: tuple[object, ...],
    seed: object,
    tensor_id: object,
    draw: object,
    offset: object,
    global_shape: object,
) -> Any:
    function = f"{distribution}_"
    if not isinstance(tensor, (torch.Tensor, np.ndarray)):
        raise TypeError(f"{function}: tensor must be a torch.Tensor or numpy.ndarray, got {type(tensor).__name__}")
    if isinstance(tensor, torch.Tensor):
        check_not_stand_in(function, tensor)
    key = resolve_seed(seed)
    identity = _identity(function, 0 if tensor_id is None else tensor_id, draw)
    local: Any = tensor
    if is_dtensor(tensor):
        if offset is not None or global_shape is not None:
            raise ValueError(f"{function}: a DTensor knows its place; offset and global_shape must be left out")
        located = locate_dtensor(cast("DTensor", tensor), f"{function}: DTensor")
        if located is None:
            return tensor  # this rank is not in the DTensor's mesh and holds nothing of it
        local, _, offset = located
        global_shape = tuple(tensor.shape)
    elif isinstance(tensor, torch.Tensor) and is_flat_parameter(tensor) and offset is None:
        raise ValueError(
            f"{function}: a FlatParameter needs offset=, the global index of its first element; "
            "init_model_ fills FSDP models by name"
        )
    strides: tuple[int, ...] = ()
    if isinstance(local, torch.Tensor):
        dtype = check_tensor(function, local)
    else:
        dtype, strides = check_array(function, local)
    shape = tuple(local.shape)
    values = () if distribution == "random_bits" else check_draw(distribution, params, dtype, function)
    place = place_of(function, shape, offset, global_shape)
    if math.prod(shape) == 0:
        return tensor
    if isinstance(local, np.ndarray):
        address = local.ctypes.data
        code = DTYPE_CODES.get(dtype, INTEGER_DTYPES.get(dtype))
        grid = (address, code, shape, strides, place.start, place.steps)
        lowered = lower(distribution, values)
        draws = (lowered.code, lowered.params, key, identity, lowered.unary)
        _native.fill([grid + draws], torch.get_num_threads())
        storage = address
    else:
        if type(local) in PLAIN_CLASSES and not _is_watched():
            start, steps = place
            one = piece(local, distribution, values, seed=key, tensor_id=identity, start=start, steps=steps)
            fill([one], local.device)
        else:
            with torch.no_grad():
                _OPERATOR(local, distribution, values, _signed(key), _signed(identity), place.start, place.steps)
        if not local.is_inference():
            torch.autograd.graph.increment_version(tensor)
        storage = local.untyped_storage()._cdata
    if tensor_id is None:
        _default_id_uses.note(function, key, place, shape, storage)
    return tensor


_COMMON = """
        seed: int in [-2^63, 2^64); None is the process default (manual_seed).
        tensor_id: int in [0, 2^64), or the tensor's name. Left out it is 0, the same for every tensor.
        draw: which draw of a named tensor; only with a name.
        offset: the global row-major index of the shard's first element (the shard is one contiguous run of the global
            tensor: an FSDP flat shard, a dim-0 shard), or a tuple of global coordinates, with ``global_shape``: the
            shard is the box there. Left out, the tensor is the whole. A DTensor knows its place and takes neither.
        global_shape: the unsharded tensor's shape. Beside an int offset it is checked, where the shard has as many
            dimensions: only a box of whole rows is one run.

    Returns:
        The tensor. No memory is allocated, no torch generator is read or moved.

    Raises:
        TypeError: the tensor's class or dtype, or an argument's type, is none of those above.
        ValueError: an argument is out of range, or the tensor is on meta, sparse, self-overlapping, outside its
            storage, misaligned, inside a torch.func transform, or a FlatParameter without an offset. The tensor is
            unchanged.

    Values: docs/stream.md, {section}.
    """


def documented(section: str) -> Any:
    def decorate(function: Any) -> Any:
        function.__doc__ = function.__doc__.rstrip() + _COMMON.format(section=section)
        return function

    return decorate


@documented("section 5")
def normal_(
    tensor: T,
    std: float = 1.0,
    *,
    mean: float = 0.0,
    seed: int | None = None,
    tensor_id: int | str | None = None,
    draw: int = 0,
    offset: int | tuple[int, ...] | None = None,
    global_shape: tuple[int, ...] | None = None,
) -> T:
    """Fills a tensor or shard in place with N(mean, std^2).

    Args:
        tensor: strided torch.Tensor (leaf parameters too), DTensor, or writable NumPy array of a floating dtype.
        std: finite and >= 0; 0 gives mean.
        mean: finite.
    """
    return raw_fill(tensor, "normal", (std, mean), seed, tensor_id, draw, offset, global_shape)


@documented("section 4")
def uniform_(
    tensor: T,
    a: float = 0.0,
    b: float = 1.0,
    *,
    seed: int | None = None,
    tensor_id: int | str | None = None,
    draw: int = 0,
    offset: int | tuple[int, ...] | None = None,
    global_shape: tuple[int, ...] | None = None,
) -> T:
    """Fills a tensor or shard in place with U[a, b), below b in every dtype.

    Args:
        tensor: strided torch.Tensor (leaf parameters too), DTensor, or writable NumPy array of a floating dtype.
        a: finite, <= b. a == b: every value is a.
        b: finite; b - a is too.
    """
    return raw_fill(tensor, "uniform", (a, b), seed, tensor_id, draw, offset, global_shape)


@documented("section 6")
def trunc_normal_(
    tensor: T,
    std: float = 1.0,
    *,
    mean: float = 0.0,
    a: float = -2.0,
    b: float = 2.0,
    seed: int | None = None,
    tensor_id: int | str | None = None,
    draw: int = 0,
    offset: int | tuple[int, ...] | None = None,
    global_shape: tuple[int, ...] | None = None,
) -> T:
    """Fills a tensor or shard in place with N(mean, std^2) conditioned on [a, b].

    Args:
        tensor: strided torch.Tensor (leaf parameters too), DTensor, or writable NumPy array of a floating dtype.
        std: finite and > 0.
        mean: finite.
        a: lower bound in the values' own units (not in std), or -inf; <= b.
        b: upper bound, or +inf. [a, b] must come within 12 std of the mean.
    """
    return raw_fill(tensor, "trunc_normal", (std, mean, a, b), seed, tensor_id, draw, offset, global_shape)


@documented("section 3")
def random_bits_(
    tensor: T,
    *,
    seed: int | None = None,
    tensor_id: int | str | None = None,
    draw: int = 0,
    offset: int | tuple[int, ...] | None = None,
    global_shape: tuple[int, ...] | None = None,
) -> T:
    """Fills an integer tensor or shard in place with the stream's raw words.

    Args:
        tensor: strided torch.Tensor, DTensor, or writable NumPy array of int32, uint32, int64 or uint64.
    """
    return raw_fill(tensor, "random_bits", (), seed, tensor_id, draw, offset, global_shape)
