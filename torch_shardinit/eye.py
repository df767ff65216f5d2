"""The "eye" step: 1 where an element's indices along two dimensions of the step's region are equal, else 0.

The kernels know constants only, so a piece of it is filled with zeros, then its diagonal, a strided view, with ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import region as rg
from .program import Ref, Step
from .region import Box


def eye_step(view: Ref, dims: tuple[int, int], owner: Ref, where: Box | None) -> Step | None:
    """The step on `owner` that an eye along dimensions `dims` of `view` is, where `view` holds the box `where` of
    owner; None where the owner has no such dimensions."""
    box = rg.full_box(owner.sizes) if where is None else where
    steps = [span.step * stride for span, stride in zip(box, owner.strides, strict=True)]
    found = []
    for dim in dims:
        size, stride = view.sizes[dim], view.strides[dim]
        fitting = [d for d, span in enumerate(box) if span.size == size and (size == 1 or steps[d] == stride)]
        if size == 1:  # any dimension of one element will do, but none twice
            fitting = [d for d in fitting if d not in found]
        if not fitting:
            return None
        found.append(fitting[0])
    others = [dim for dim in range(len(view.sizes)) if dim not in dims]
    left = sorted(span.size for d, span in enumerate(box) if d not in found and span.size > 1)
    if found[0] == found[1] or left != sorted(view.sizes[dim] for dim in others if view.sizes[dim] > 1):
        return None
    return Step("eye", (float(found[0]), float(found[1])), where)


def diagonal_of(step: Step, box: Box, view: torch.Tensor) -> torch.Tensor | None:
    """The ones of an eye step in `view`, which holds the box `box` of a tensor; None where it has none."""
    first, second = (int(dim) for dim in step.args)
    inside = box if step.region is None else tuple(map(_relative, box, step.region))
    common = rg.intersect((inside[first],), (inside[second],))
    if common is None:
        return None
    (values,) = common
    offset, stride = view.storage_offset(), 0
    for dim in (first, second):
        span = inside[dim]
        offset += (values.start - span.start) // span.step * view.stride(dim)
        stride += values.step // span.step * view.stride(dim) if values.size > 1 else 0
    others = [dim for dim in range(view.dim()) if dim not in (first, second)]
    sizes = [values.size, *(view.shape[dim] for dim in others)]
    return view.as_strided(sizes, [stride, *(view.stride(dim) for dim in others)], offset)


def _relative(inner: rg.Span, outer: rg.Span) -> rg.Span:
    """A span of indices as indices into `outer`, which holds them all."""
    step = inner.step // outer.step if inner.size > 1 else 1
    return rg.span((inner.start - outer.start) // outer.step, step, inner.size)


def without_eye(
    view: torch.Tensor, box: Box, chain: Sequence[Step]
) -> list[tuple[torch.Tensor, tuple[Step, ...], bool]]:
    """A chain that may begin with an eye, on a view that holds `box`, as (view, chain, whether it is a diagonal) with
    no eye, to be run in this order. Elements of a diagonal are all the same and have no indices."""
    first, *rest = chain
    if first.op != "eye":
        return [(view, tuple(chain), False)]
    parts = [(view, (Step("fill", (0.0,)), *rest), False)]
    diagonal = diagonal_of(first, box, view)
    if diagonal is not None:
        parts.append((diagonal, (Step("fill", (1.0,)), *rest), True))
    return parts
