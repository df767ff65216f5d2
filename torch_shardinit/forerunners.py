"""Temporaries whose elements are only copied or cast, all of them, into one tensor: `model.to(torch.bfloat16)` after
init, `weight.copy_(orthogonal_(torch.empty_like(weight)))`. Their random numbers are those of the tensor itself, as if
its init code had worked on it in place; so the bf16 model is the fp32 model rounded, for played tensors too."""

from __future__ import annotations

from . import region as rg
from .derive import locate
from .nodes import arg_of
from .program import Ref
from .tape import Node, Tape

_WHOLE_MOVES = frozenset({"_to_copy", "clone", "copy_"})


def forerunners(tape: Tape) -> dict[int, tuple[Ref, Ref]]:
    """Storage -> (the tensor at the end to which all of it goes, its elements in the order of that tensor).

    Of several tensors it is the one with the fewest copies in between, since a cast of the whole model adds one to
    each; where that is not one alone (a layer copied n times) the storage is left out."""
    owned = {ref.storage for ref in tape.owners}
    goes_to: dict[int, list[tuple[int, Ref, Ref]]] = {}
    for owner in tape.owners:
        current, seen = owner, {owner.storage}
        while (source := _source_of(tape, current)) is not None and source.storage not in seen | owned:
            goes_to.setdefault(source.storage, []).append((len(seen), owner, source))
            seen.add(source.storage)
            current = source
    found = {}
    for storage, tensors in goes_to.items():
        fewest = min(hops for hops, _, _ in tensors)
        nearest = [(owner, source) for hops, owner, source in tensors if hops == fewest]
        if len(nearest) == 1:
            found[storage] = nearest[0]
    return found


def _source_of(tape: Tape, ref: Ref) -> Ref | None:
    """What was moved over the whole of `ref`, last, if nothing else overwrote all of it since."""
    if not _is_whole(tape, ref):
        return None
    for node, view in reversed(tape.writers(ref.storage)):
        if view != ref and locate(ref, view) is not None:
            continue
        if node.info.name in _WHOLE_MOVES:
            return _moved(tape, node, view, ref)
        if node.info.overwrites or any(view is fresh for _, fresh in node.fresh):
            return None
    return None


def _moved(tape: Tape, node: Node, view: Ref, ref: Ref) -> Ref | None:
    source = arg_of(node, 1 if node.info.name == "copy_" else 0, "src", "self")
    if not isinstance(source, Ref) or source.sizes != view.sizes or not source.dtype.is_floating_point:
        return None
    return _in_order(source, view, ref) if _is_whole(tape, source) else None


def _in_order(source: Ref, view: Ref, ref: Ref) -> Ref | None:
    """`source`, whose elements are those of `view`, in the order in which `ref` has the same memory."""
    if view == ref:
        return source
    row_major = [rg.row_major_strides(one.sizes) for one in (source, view, ref)]
    if all(_same_strides(one, strides) for one, strides in zip((source, view, ref), row_major, strict=True)):
        return Ref(source.storage, source.offset, ref.sizes, row_major[2], source.dtype)
    dims = {(size, stride): dim for dim, (size, stride) in enumerate(zip(view.sizes, view.strides, strict=True))}
    wanted = [(size, stride) for size, stride in zip(ref.sizes, ref.strides, strict=True)]
    if any(pair not in dims for pair in wanted if pair[0] > 1):
        return None
    strides = tuple(source.strides[dims[pair]] if pair[0] > 1 else 1 for pair in wanted)
    return Ref(source.storage, source.offset, ref.sizes, strides, source.dtype)


def _same_strides(ref: Ref, strides: tuple[int, ...]) -> bool:
    pairs = zip(ref.sizes, ref.strides, strides, strict=True)
    return all(size == 1 or stride == other for size, stride, other in pairs)


def _is_whole(tape: Tape, ref: Ref) -> bool:
    """Whether a tensor is each element of its storage once."""
    covers = ref.numel() * ref.dtype.itemsize == tape.num_bytes.get(ref.storage)
    return covers and ref.numel() > 0 and not rg.overlaps_itself(ref.sizes, ref.strides)
