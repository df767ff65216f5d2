"""What single nodes of a tape say: constants, draws of the stream, torch.nn.init functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import region as rg
from .native import end_of_integers
from .program import COMPOSITE, Ref, Step
from .tape import Node


class NotExact(Exception):
    """The view has no exact program: it is played, if that can be done."""

    def __init__(self, node: Node | None, why: str) -> None:
        super().__init__(why)
        self.node, self.why = node, why


_NO_VALUE = object()
FILLS: dict[str, Callable[[Node], Any]] = {
    **dict.fromkeys(("zeros", "zero_", "zeros_like", "new_zeros"), lambda node: 0.0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda node: 1.0),
    **dict.fromkeys(("full", "full_like", "fill_"), lambda node: arg_of(node, 1, "fill_value", "value")),
    "new_full": lambda node: arg_of(node, 2, "fill_value"),
    "scalar_tensor": lambda node: arg_of(node, 0, "s"),
}
_DRAWS: dict[str, Callable[[Node], tuple[str, tuple[Any, ...]]]] = {
    "uniform_": lambda node: ("uniform", (arg_of(node, 1, "from", default=0.0), arg_of(node, 2, "to", default=1.0))),
    "normal_": lambda node: ("normal", (arg_of(node, 2, "std", default=1.0), arg_of(node, 1, "mean", default=0.0))),
    "trunc_normal_": lambda node: ("trunc_normal", tuple(node.kwargs[key] for key in ("std", "mean", "a", "b"))),
    **dict.fromkeys(("rand", "rand_like"), lambda node: ("uniform", (0.0, 1.0))),
    **dict.fromkeys(("randn", "randn_like"), lambda node: ("normal", (1.0, 0.0))),
    "normal": lambda node: ("normal", (arg_of(node, 1, "std", default=1.0), arg_of(node, 0, "mean", default=0.0))),
    "exponential_": lambda node: ("exponential", (arg_of(node, 1, "lambd", default=1.0),)),
    "log_normal_": lambda node: (
        "log_normal",
        (arg_of(node, 1, "mean", default=1.0), arg_of(node, 2, "std", default=2.0)),
    ),
    "cauchy_": lambda node: ("cauchy", (arg_of(node, 1, "median", default=0.0), arg_of(node, 2, "sigma", default=1.0))),
    "geometric_": lambda node: ("geometric", (arg_of(node, 1, "p"),)),
}


def arg_of(node: Node, position: int, *names: str, default: Any = _NO_VALUE) -> Any:
    if position < len(node.args):
        return node.args[position]
    for name in names:
        if name in node.kwargs:
            return node.kwargs[name]
    if default is _NO_VALUE:
        raise NotExact(node, f"{node.info.label} without {names[0]}")
    return default


def draw_of(node: Node) -> tuple[str, tuple[float, ...]] | None:
    """(distribution, its arguments) of a random node that the kernels draw; None of other nodes."""
    make = _DRAWS.get(node.info.name)
    if make is None:
        integers = _integers_of(node)
        return integers if integers is not None and next(node.results()).dtype.is_floating_point else None
    dtype = next(node.results()).dtype
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    if is_integer or (node.info.name == "normal" and "float_float" not in node.info.label):
        return None
    op, args = make(node)
    if not all(isinstance(value, (int, float)) for value in args):
        return None
    return op, tuple(float(value) for value in args)


def dirac_steps(node: Node, ref: Ref) -> list[Step]:
    """torch.nn.init.dirac_ on all of `ref`: an identity in the middle of each group's kernel, else zeros."""
    groups = int(node.kwargs.get("groups", 1))
    rows = ref.sizes[0] // groups
    size = min(rows, ref.sizes[1])
    middle = [rg.span(extent // 2, 1, 1) for extent in ref.sizes[2:]]
    if size == 1:  # depthwise: one step for all groups
        return [Step("fill", (0.0,)), Step("fill", (1.0,), (rg.span(0, rows, groups), rg.span(0, 1, 1), *middle))]
    eyes = [
        Step("eye", (0.0, 1.0), (rg.span(group * rows, 1, size), rg.span(0, 1, size), *middle))
        for group in range(groups)
    ]
    return [Step("fill", (0.0,)), *eyes]


def composite_of(node: Node) -> tuple[str, tuple[float, ...]] | None:
    """(operation, its arguments) of a random node that composite.py runs."""
    if node.info.name in ("orthogonal_", "sparse_"):
        return node.info.name, tuple(float(node.kwargs[name]) for name in COMPOSITE[node.info.name])
    if node.info.label in ("aten::randperm", "aten::randperm.generator"):
        return "permutation", ()
    if node.info.name == "geometric_":
        return "geometric", (float(arg_of(node, 1, "p")),)
    return _integers_of(node)


def _integers_of(node: Node) -> tuple[str, tuple[float, ...]] | None:
    """bernoulli_ and torch's random integers, of any real dtype."""
    label = node.info.label.removesuffix(".generator").removesuffix("_generator")
    dtype = next(node.results()).dtype
    if label == "aten::bernoulli_.float" and not dtype.is_complex:
        p = arg_of(node, 1, "p", default=0.5)
        return ("bernoulli", (float(p),)) if 0 <= p <= 1 else None
    bounds = _bounds(node, label, dtype)
    if bounds is None or dtype.is_complex:
        return None
    low, high = (int(bound) for bound in bounds)
    # As floats they must be the same numbers, and their distance fit in 64 bits.
    exact = float(low) == low and float(high) == high
    return ("random", (float(low), float(high))) if exact and 0 < high - low < 1 << 64 else None


def _bounds(node: Node, label: str, dtype: torch.dtype) -> tuple[Any, Any] | None:
    """[low, high) of torch's random integers; those of random_() are the integers that the dtype holds one by one."""
    if label == "aten::random_":
        return 0, end_of_integers(dtype)
    positions = {
        "aten::random_.to": (None, 1),
        "aten::random_.from": (1, 2),
        "aten::randint": (None, 0),
        "aten::randint.low": (0, 1),
        "aten::randint_like": (None, 1),
        "aten::randint_like.low_dtype": (1, 2),
    }.get(label)
    if positions is None:
        return None
    low = 0 if positions[0] is None else arg_of(node, positions[0], "low", "from")
    high = arg_of(node, positions[1], "high", "to")
    return (low, high) if isinstance(low, int) and isinstance(high, int) else None
