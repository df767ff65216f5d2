"""Megatron-core's tensor parallel parameters: the boxes of the whole that a rank holds, and a recording of the whole.

A parallel layer registers its rank's part of a weight and notes on it that it is one, along which dimension
(partition_dim) and in how many pieces (partition_stride): with stride s the whole is cut into s * world pieces, and
rank r keeps pieces r, r + world, ... one behind the other, as a gated MLP needs it for its two halves. The layer's
tp_group tells rank and world.

Layers initialise a whole master weight and cut it, or on a GPU their part alone, from a generator of the rank's own.
Under a recording they initialise a whole tensor on meta instead, so that init functions see the global shape and fan;
nothing of it is ever in memory. Everything else that such a layer writes must be one constant (biases are zeros).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn

from ..errors import RecordError
from .held import Held, HeldParameters, Parts, misfit, read
from .names import is_a

PACKAGE = "megatron"
_LAYERS = "megatron.core.tensor_parallel.layers"
_PARALLEL_STATE = "megatron.core.parallel_state"


def _read(owner: object, attribute: str) -> Any:
    return read("megatron-core", "a tensor parallel parameter of Megatron", owner, attribute)


# --- where the elements are ----------------------------------------------------------------------------------------


def pieces_of_rank(size: int, stride: int, rank: int, world: int) -> list[tuple[int, int, int]]:
    """(start in the part, start in the whole, length) of the pieces of a dimension of which a rank holds `size`."""
    length = size // stride
    if stride == 1 or world == 1:
        return [(0, rank * size, size)]
    return [(piece * length, (piece * world + rank) * length, length) for piece in range(stride)]


class _Cut:
    """How a parameter is cut: dim, stride, and the rank and size of the group."""

    def __init__(self, parameter: torch.Tensor, module: nn.Module, name: str) -> None:
        self.dim, self.stride = _read(parameter, "partition_dim"), _read(parameter, "partition_stride")
        group = _read(module, "tp_group")
        self.rank, self.world = group.rank(), group.size()
        fits = isinstance(self.dim, int) and 0 <= self.dim < parameter.dim()
        fits = (
            fits and isinstance(self.stride, int) and self.stride >= 1 and parameter.shape[self.dim] % self.stride == 0
        )
        if not fits or not 0 <= self.rank < self.world:
            raise misfit(
                "megatron-core",
                name,
                f"partition_dim and partition_stride must fit the shape {tuple(parameter.shape)}, got {self.dim} and "
                f"{self.stride} on rank {self.rank} of {self.world}",
            )

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(size * self.world if dim == self.dim else size for dim, size in enumerate(shape))

    def parts(self, local: torch.Tensor) -> Parts:
        found: Parts = []
        for start, global_start, length in pieces_of_rank(local.shape[self.dim], self.stride, self.rank, self.world):
            offset = [0] * local.dim()
            offset[self.dim] = global_start
            found.append((local.narrow(self.dim, start, length), tuple(offset)))
        return found


def is_parallel(tensor: object) -> bool:
    return getattr(tensor, "tensor_model_parallel", False) is True


def _check_not_grouped(module: nn.Module) -> None:
    if is_a(module, PACKAGE, "GroupedMLP") and (module.ep_group.size() > 1 or module.tp_group.size() > 1):  # type: ignore[operator,union-attr]
        raise TypeError(
            "GroupedMLP keeps all experts of a rank in one tensor, which can't be located under expert or tensor "
            "parallelism: use SequentialMLP"
        )


def _cuts(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter, _Cut]]:
    """(module, attribute, parameter, cut) of the parameters that are spread over several ranks."""
    for module in modules:
        _check_not_grouped(module)
        for attribute, parameter in module._parameters.items():
            if parameter is not None and is_parallel(parameter):
                cut = _Cut(parameter, module, f"{type(module).__name__}.{attribute}")
                if cut.world > 1:
                    yield module, attribute, parameter, cut


def collect(modules: Sequence[nn.Module], found: HeldParameters) -> None:
    """Adds the tensor parallel parameters of these modules to `found`."""
    places: dict[int, tuple[nn.Parameter, _Cut, list[tuple[nn.Module, str]]]] = {}
    for module, attribute, parameter, cut in _cuts(modules):
        places.setdefault(id(parameter), (parameter, cut, []))[2].append((module, attribute))
    for parameter, cut, holders in places.values():
        local = parameter.detach()
        shape, parts = cut.whole(local.shape), cut.parts(local)
        found.tensors.append(Held(parameter, tuple(holders), shape, local.dtype, parameter.requires_grad, parts))


def is_used() -> bool:
    return _LAYERS in sys.modules


# --- recording -----------------------------------------------------------------------------------------------------


class Wholes:
    """The whole tensors of a recording's parallel parameters: what their layers' init functions wrote."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(self, parameter: torch.Tensor, whole: torch.Tensor) -> None:
        self._found[id(parameter)] = parameter, whole

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a registered tensor; itself where it is whole."""
        return self._found[id(tensor)][1] if id(tensor) in self._found else tensor

    def complete(self, modules: Sequence[nn.Module], writer: Any, value_of: Callable[..., float | None]) -> None:
        """At the end of a recording, still under it: parameters of which only this rank's part was written.

        value_of(tensor, what): the value that all elements were given, None where nothing wrote them.
        """
        for module, attribute, parameter, cut in _cuts(modules):
            name = f"{type(module).__name__}.{attribute}"
            number = writer.known_number(parameter)
            written = number is not None and any(not node.info.is_empty for node, _ in writer.tape.writers(number))
            if id(parameter) in self._found:
                whole = self._found[id(parameter)][1]
                if tuple(whole.shape) != cut.whole(parameter.shape):
                    raise misfit(
                        "megatron-core",
                        name,
                        f"its layer must initialise the whole, {list(cut.whole(parameter.shape))}, got "
                        f"{list(whole.shape)}",
                    )
                if written:
                    raise RecordError(
                        f"{name} is tensor parallel, and was written again by code that sees one rank's part of it: "
                        "give such code as init_fn, which sees the whole"
                    )
                continue
            what = f"{name} is tensor parallel and was written by code that sees one rank's part: all must be equal"
            value = value_of(parameter, what) if written else None
            if value is not None:
                whole = torch.full(cut.whole(parameter.shape), value, dtype=parameter.dtype, device="meta")
                self.note(parameter, whole)


def _initialize_cpu(wholes: Wholes, original: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    """_initialize_affine_weight_cpu, without the cutting."""
    bound = _signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    weight = given["weight"]
    if not given.get("skip_set_tensor_parallel_attributes"):
        _set_attributes(weight, given["partition_dim"], given["stride"])
    whole = torch.empty(given["output_size"], given["input_size"], dtype=torch.float32)
    given["init_method"](whole)
    wholes.note(weight, whole.to(weight.dtype))
    return None


def _initialize_gpu(wholes: Wholes, original: Any, *args: Any, **kwargs: Any) -> None:
    """_initialize_affine_weight_gpu, of the whole and without a generator."""
    bound = _signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    weight, dim = given["weight"], given["partition_dim"]
    _set_attributes(weight, dim, given["stride"])
    state = sys.modules[_PARALLEL_STATE]
    kind = "expert_tensor_parallel" if given["is_expert"] else "tensor_model_parallel"
    world = _read(state, f"get_{kind}_world_size")()
    shape = [size * world if number == dim else size for number, size in enumerate(weight.shape)]
    whole = torch.empty(shape, dtype=weight.dtype, device="meta")
    given["init_method"](whole)
    wholes.note(weight, whole)


def _set_attributes(weight: torch.Tensor, dim: int, stride: int) -> None:
    _read(sys.modules[_LAYERS], "set_tensor_model_parallel_attributes")(weight, True, dim, stride)


@functools.cache
def _signature(function: Any) -> Any:
    import inspect

    return inspect.signature(function)


_REPLACEMENTS = {"_initialize_affine_weight_cpu": _initialize_cpu, "_initialize_affine_weight_gpu": _initialize_gpu}
_active = threading.local()


class _Patch:
    """The two functions, replaced wherever a module of Megatron has them, for as long as any thread records."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.places: list[tuple[Any, str, Any]] = []
        self.num_modules = 0

    def enter(self) -> None:
        with self.lock:
            self.users += 1
            self._replace()

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                for module, name, original in self.places:
                    setattr(module, name, original)
                self.places.clear()
                self.num_modules = 0

    def late(self) -> None:
        """Megatron may be imported while a recording is on."""
        if len(sys.modules) != self.num_modules and _LAYERS in sys.modules:
            with self.lock:
                self._replace()

    def _replace(self) -> None:
        if _LAYERS not in sys.modules:
            return
        self.num_modules = len(sys.modules)
        layers = sys.modules[_LAYERS]
        for name, replacement in _REPLACEMENTS.items():
            current = _read(layers, name)
            original = getattr(current, "__wrapped__", current)
            for module_name, module in list(sys.modules.items()):
                if module_name.startswith("megatron.") and getattr(module, name, None) is original:
                    self.places.append((module, name, original))
                    setattr(module, name, _recordable(original, replacement))


def _recordable(original: Any, replacement: Any) -> Any:
    @functools.wraps(original)
    def initialize(weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        wholes = getattr(_active, "wholes", None)
        if wholes is None or not weight.is_meta:
            return original(weight, *args, **kwargs)
        return replacement(wholes, original, weight, *args, **kwargs)

    return initialize


_patch = _Patch()


@contextlib.contextmanager
def wholes_on_meta() -> Iterator[Wholes]:
    """For as long as this is on, parallel layers of this thread initialise whole tensors on meta."""
    _patch.enter()
    handle = nn.modules.module.register_module_parameter_registration_hook(lambda *_: _patch.late())
    wholes = _active.wholes = Wholes()
    try:
        yield wholes
    finally:
        _active.wholes = None
        handle.remove()
        _patch.leave()
