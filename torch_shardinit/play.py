"""Plays slices of the tape: once, at full size, on the CPU, in one intra-op thread, with torch's own operators.

No torch generator is read: random numbers come from the stream, as programs of named tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import region as rg
from .composite import draw_composite_
from .derive import Deriver, ReadsUnwritten
from .errors import RecordError, UninitializedError
from .eye import without_eye
from .program import Exact, Played, PlayedDraw, PlayedExact, PlayedItem, PlayedOp, Ref
from .slicing import Refused, Slice, Slicer, UnwrittenAtEnd, map_refs
from .tape import Tape

_CPU = torch.device("cpu")
# Bytes of memory that nothing wrote: as fp32 and bf16 they are ordinary numbers far from each other.
_GARBAGE = (0x3E, 0x41)
_Memory = dict[int, torch.UntypedStorage]


def evaluate(played: Played, seed: int, id_of: Callable[[str, int], int]) -> torch.Tensor:
    """The tensor that a played program gives, on the CPU. Other storages are freed when their last use is over."""
    result = _run(played, [played.out], seed, id_of, _GARBAGE[0])[0]
    if played.check_unwritten:
        again = _run(played, [played.out], seed, id_of, _GARBAGE[1])[0]
        if not torch.equal(_bytes(result), _bytes(again)):
            raise UninitializedError("some elements depend on memory that nothing wrote (torch.empty)")
    return result


def values_now(tape: Tape, refs: Sequence[Ref], before: int, what: str) -> list[torch.Tensor]:
    """Values that init code asks for while it is recorded."""
    piece = _constant_slice(tape, refs, before, what)
    return _run(piece.played, piece.outs, 0, _no_id, _GARBAGE[0])


def check_not_random(tape: Tape, refs: Sequence[Ref], before: int, what: str) -> None:
    _constant_slice(tape, refs, before, what)


def _constant_slice(tape: Tape, refs: Sequence[Ref], before: int, what: str) -> Slice:
    try:
        return Slicer(tape, None, Deriver(tape)).slice(refs, before)
    except Refused as error:
        raise RecordError(
            f"{what}, but they depend on random numbers ({error.where}), which a recording does not have: what init "
            "code does must be the same for every seed"
        ) from error
    except (ReadsUnwritten, UnwrittenAtEnd) as error:
        raise RecordError(f"{what}, but nothing that was recorded wrote them") from error


def _no_id(name: str, draw: int) -> int:
    raise AssertionError(name)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _view(memory: _Memory, ref: Ref) -> torch.Tensor:
    empty = torch.empty(0, dtype=ref.dtype)
    return empty.set_(memory[ref.storage], ref.offset, ref.sizes, ref.strides)  # type: ignore[call-overload]


def _storages(op: PlayedItem) -> set[int]:
    found: set[int] = set()
    if not isinstance(op, PlayedOp):
        return {op.view.storage}
    map_refs(lambda ref: found.add(ref.storage), (op.args, tuple(value for _, value in op.kwargs)))
    return found | {ref.storage for _, ref in op.fresh}


def _run(
    played: Played, outs: Sequence[Ref], seed: int, id_of: Callable[[str, int], int], garbage: int
) -> list[torch.Tensor]:
    kept = {ref.storage for ref in outs}
    last_use: dict[int, int] = {}
    for index, op in enumerate(played.ops):
        for storage in _storages(op):
            last_use[storage] = index
    memory: _Memory = {}

    def provide(storage: int) -> None:
        if storage in memory:
            return
        constant = played.constants.get(storage)
        if constant is not None:
            memory[storage] = constant.untyped_storage().clone()
        else:
            memory[storage] = torch.UntypedStorage(played.num_bytes[storage])
            torch.empty(0, dtype=torch.uint8).set_(memory[storage]).fill_(garbage)

    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    no_autocast = torch.autocast("cpu", enabled=False)  # what it casts is on the tape
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), no_autocast:
        torch.set_num_threads(1)
        try:
            for index, op in enumerate(played.ops):
                fresh = {ref.storage for _, ref in op.fresh} if isinstance(op, PlayedOp) else set()
                used = _storages(op)
                for storage in used - fresh:
                    provide(storage)
                if isinstance(op, PlayedExact):
                    tensor_id = id_of(op.name, op.draw) if op.is_random else 0
                    fill_exact_(_view(memory, op.view), op.program, seed, tensor_id)
                elif isinstance(op, PlayedDraw):
                    view, tensor_id = _view(memory, op.view), id_of(op.name, op.draw)
                    draw_composite_(op, view, played.num_bytes, seed, tensor_id, threads)
                else:
                    unused = {storage for storage in fresh - kept if last_use[storage] == index}
                    _run_op(op, memory, played.num_bytes, unused)
                for storage in used - kept:
                    if last_use[storage] == index:
                        memory.pop(storage, None)
            for storage in kept:
                provide(storage)
            return [_view(memory, ref) for ref in outs]
        finally:
            torch.set_num_threads(threads)
            torch.set_default_dtype(dtype)


@functools.cache
def _overload(label: str) -> Any:
    namespace, _, rest = label.partition("::")
    name, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def _run_op(op: PlayedOp, memory: _Memory, num_bytes: Sequence[int], unused: Collection[int] = ()) -> None:
    """unused: storages of results that nothing reads. They may have another size than on meta, as the statistics of
    batch_norm in eval mode."""

    def real(value: Any) -> Any:
        value = map_refs(lambda ref: _view(memory, ref), value)
        return _CPU if isinstance(value, torch.device) else value

    torch.set_default_dtype(op.default_dtype)
    kwargs = {key: real(value) for key, value in op.kwargs if key != "pin_memory"}
    result = _overload(op.op)(*(real(value) for value in op.args), **kwargs)
    results = result if isinstance(result, (list, tuple)) else (result,)
    tensors = [item for item in results if isinstance(item, torch.Tensor)]
    for index, ref in op.fresh:
        if ref.storage in unused:
            continue
        tensor = tensors[index]
        storage = tensor.untyped_storage()
        same = (tensor.storage_offset(), tensor.stride(), tensor.dtype) == (ref.offset, ref.strides, ref.dtype)
        if same and storage.nbytes() == num_bytes[ref.storage]:
            memory[ref.storage] = storage
        else:  # meta kernels may choose other strides
            memory[ref.storage] = torch.UntypedStorage(num_bytes[ref.storage])
            _view(memory, ref).copy_(tensor)


def fill_exact_(tensor: torch.Tensor, program: Exact, seed: int, tensor_id: int) -> None:
    """Runs an exact program in place on the whole tensor, a CPU one with any strides, by the kernels that fill shards;
    elements that no step writes stay."""
    from . import native
    from .draws import check_draw

    name = native.dtype_name(tensor.dtype)
    if name is None:
        raise TypeError(f"an exact program needs a dtype of the stream, got {tensor.dtype}")
    shape = tuple(tensor.shape)
    for box, chain in program.straight(rg.full_box(shape)):
        if not chain:
            continue
        start, steps = rg.grid_of_box(box, shape)
        for view, (first, *rest), is_diagonal in without_eye(tensor[rg.slices(box)] if shape else tensor, box, chain):
            piece = native.piece(
                view,
                first.op,
                check_draw(first.op, first.args, name, f"{first.op}_"),
                seed=seed,
                tensor_id=tensor_id,
                start=0 if is_diagonal else start,
                steps=rg.row_major_strides(view.shape) if is_diagonal else steps,
                unary=native.unary_codes([(step.op, step.args) for step in rest]),
            )
            native.fill([piece])
