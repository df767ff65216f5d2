"""What single nodes of a tape say: constants, draws of the stream, torch.nn.init functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import region as rg
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
    """(distribution, its arguments) of a random node that the stream has; None of other nodes."""
    make = _DRAWS.get(node.info.name)
    if make is None or (node.info.name == "normal" and "float_float" not in node.info.label):
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
    names = COMPOSITE.get(node.info.name)
    return (node.info.name, tuple(float(node.kwargs[name]) for name in names)) if names else None
