"""Which torch operators a Plan that comes from a file may name, and whether its played programs stay within bounds.

Such an operator is a registered one of torch.ops.aten that a tape could hold: it computes (is no view), draws no random
numbers, is no composite, and takes and gives ordinary tensors and numbers. Programs run on meta tensors first, where an
operator says which memory it would take without taking it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .program import Played, PlayedOp, Ref
from .slicing import map_refs
from .tape import OpInfo

_LABEL = re.compile(r"aten::([A-Za-z_][A-Za-z0-9_]*)(?:\.([A-Za-z_][A-Za-z0-9_]*))?")
# Of the operators with a leading underscore, which torch uses among itself and need not check their arguments, those
# that init code leads to.
_INTERNAL = frozenset(
    {
        *("_to_copy", "_conj_physical", "_fft_c2c", "_fft_c2r", "_fft_r2c", "_softmax", "_log_softmax", "_unsafe_view"),
        *(
            "_weight_norm_interface",
            "_linalg_eigh",
            "_linalg_svd",
            "_linalg_det",
            "_linalg_slogdet",
            "_linalg_solve_ex",
        ),
        *("_index_put_impl_", "_cdist_forward", "_euclidean_dist", "_logcumsumexp", "_convolution", "_pdist_forward"),
    }
)
_REFUSED = re.compile(
    r"backward|sparse|quant|mkldnn|cudnn|miopen|fbgemm|nested|sobol|segment_reduce|from_file|^set_?$|^resize|^record"
    r"|^rename|^pin_memory|^native_|lstm|gru|^rnn|^sym_|^q_|^int_repr|^_local_scalar"
)
_TYPES = re.compile(
    r"(Optional|List)\[(.+)\]|Tensor|int|bool|float|number|str|Device|Generator|SymInt|ScalarType|Layout|MemoryFormat"
)


def _is_ordinary(kind: str) -> bool:
    match = _TYPES.fullmatch(kind)
    return match is not None and (match[2] is None or _is_ordinary(match[2]))


@functools.cache
def _registered() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


@functools.cache
def operator(label: str) -> Any:
    """The overload that a schema name means. ValueError where it must not be run."""
    match = _LABEL.fullmatch(label)
    if match is None or label not in _registered():
        raise ValueError(f"must be the schema name of an operator of torch.ops.aten, got {label!r}")
    name, overload = match.groups()
    op = getattr(getattr(torch.ops.aten, name), overload or "default")
    info = OpInfo(op)
    plain = (not name.startswith("_") or name in _INTERNAL or name.startswith("_foreach_")) and not _REFUSED.search(
        name
    )
    types = [str(arg.type) for arg in (*op._schema.arguments, *op._schema.returns)]
    if (
        not plain
        or info.is_view
        or info.is_empty
        or info.is_composite
        or not info.deterministic
        or not all(map(_is_ordinary, types))
    ):
        raise ValueError(
            "must be an operator that a recording can hold (no view, no random numbers, no operator internal to "
            f"torch), got {label!r}"
        )
    return op


def check_in_bounds(ref: Ref, num_bytes: tuple[int, ...]) -> None:
    """ValueError where a view leaves its storage."""
    if not 0 <= ref.storage < len(num_bytes):
        raise ValueError(f"must be a view of one of the {len(num_bytes)} storages, got number {ref.storage}")
    last = sum((size - 1) * stride for size, stride in zip(ref.sizes, ref.strides, strict=True))
    end = ref.offset + last + 1 if ref.numel() else 0
    if end * ref.dtype.itemsize > num_bytes[ref.storage]:
        raise ValueError(
            f"must lie in its storage of {num_bytes[ref.storage]} bytes, got a view that ends at byte "
            f"{end * ref.dtype.itemsize}"
        )


def check_on_meta(played: Played, where: Callable[[int], str]) -> None:
    """Runs a played program on meta tensors. ValueError, with where(index of the operation), where an operator does not
    take its arguments, needs values to know the size of its result, or gives another one than the program says."""
    storages = [torch.UntypedStorage(size, device="meta") for size in played.num_bytes]

    def view(value: Any) -> Any:
        def one(ref: Ref) -> torch.Tensor:
            empty = torch.empty(0, dtype=ref.dtype, device="meta")
            return empty.set_(storages[ref.storage], ref.offset, ref.sizes, ref.strides)  # type: ignore[call-overload]

        value = map_refs(one, value)
        return torch.device("meta") if isinstance(value, torch.device) else value

    dtype = torch.get_default_dtype()
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            for index, op in enumerate(played.ops):
                if not isinstance(op, PlayedOp):
                    continue
                torch.set_default_dtype(op.default_dtype)
                kwargs = {key: view(value) for key, value in op.kwargs if key != "pin_memory"}
                try:
                    result = operator(op.op)(*(view(value) for value in op.args), **kwargs)
                except Exception as error:
                    first = str(error).splitlines()[0] if str(error) else type(error).__name__
                    raise ValueError(f"{where(index)}: {op.op} must take its arguments on meta: {first}") from error
                _check_results(result, op, played.num_bytes, storages, where(index))
        finally:
            torch.set_default_dtype(dtype)


def _check_results(
    result: Any, op: PlayedOp, num_bytes: tuple[int, ...], storages: list[torch.UntypedStorage], where: str
) -> None:
    tensors = [item for item in (result if isinstance(result, (list, tuple)) else (result,)) if torch.is_tensor(item)]
    for number, _ in op.fresh:
        if number >= len(tensors):
            raise ValueError(f"{where}: {op.op} must give result {number}, got {len(tensors)} results")
    places = dict(op.fresh)
    for number, tensor in enumerate(tensors):
        place = places.get(number)
        limit = 0 if place is None else num_bytes[place.storage]
        known = any(tensor.untyped_storage()._cdata == storage._cdata for storage in storages)
        if place is not None and (tuple(tensor.shape), tensor.dtype) != (place.sizes, place.dtype):
            raise ValueError(
                f"{where}: result {number} of {op.op} must be {place.dtype} of shape {list(place.sizes)}, as the "
                f"program says, got {tensor.dtype} of shape {list(tensor.shape)}"
            )
        if not known and tensor.untyped_storage().nbytes() > limit:
            raise ValueError(
                f"{where}: result {number} of {op.op} must fit in {limit} bytes, got "
                f"{tensor.untyped_storage().nbytes()}"
            )
    for storage, size in zip(storages, num_bytes, strict=True):
        if storage.nbytes() != size:
            raise ValueError(f"{where}: {op.op} must not give its operands other sizes")
