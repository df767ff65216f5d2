"""DeepSpeed ZeRO-3: the run of each parameter that a rank's partition holds, and partitions for a recorded model.

A ZeRO-3 parameter is a Parameter of size 0 that carries its partition beside it: `ds_tensor`, a 1-D tensor. The whole
is flattened row-major, padded at its end and cut into equal parts, one for each rank of the parameter's group. A
parameter that DeepSpeed keeps gathered (`ds_persist`) holds a second copy of the whole, and with hpZ a second
partition; both are reported as copies.

zero.Init makes such parameters from whole ones that it broadcasts from rank 0. Inside a recording it does not act: what
is built in it stays on meta until the recording ends, and gets partitions then, with no values, whole tensors or
messages (`Partitioning`). All that is used of DeepSpeed is read through `_read`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import region
from ..errors import RecordError
from .held import Held, HeldParameters, Parts, misfit, read

PACKAGE = "deepspeed"
_PARTITIONING = "deepspeed.runtime.zero.partition_parameters"


def _read(owner: object, attribute: str) -> Any:
    return read(PACKAGE, "a ZeRO-3 parameter", owner, attribute)


def is_partitioned(tensor: object) -> bool:
    """Whether a tensor is a ZeRO-3 parameter."""
    return hasattr(tensor, "ds_tensor") and hasattr(tensor, "ds_shape")


# --- where the elements are ----------------------------------------------------------------------------------------


def _run(memory: torch.Tensor, rank: int, world: int, numel: int, name: str) -> tuple[torch.Tensor, int, torch.Tensor]:
    """(the part of a partition that holds elements, the first one's index, the padding behind it)."""
    length = -(-numel // world)
    if memory.dim() != 1 or memory.numel() != length or not memory.is_contiguous() or not 0 <= rank < world:
        raise misfit(
            PACKAGE,
            name,
            f"its partition must be 1-D and contiguous with {length} of {numel} elements, got shape "
            f"{tuple(memory.shape)} on rank {rank} of {world}",
        )
    start = min(rank * length, numel)
    held = min(length, numel - start)
    return memory[:held], start, memory[held:]


def _check_in_memory(partition: Any, name: str) -> None:
    if not isinstance(partition, torch.Tensor):
        raise misfit(PACKAGE, name, f"its ds_tensor must be a tensor, got {partition!r}")
    if _read(partition, "final_location") is not None or _read(partition, "status").name != "AVAILABLE":
        raise TypeError(f"{name}: a ZeRO-3 partition must be in memory to be located, got one that is swapped out")
    if hasattr(partition, "ds_quant_scale"):
        raise TypeError(f"{name}: a ZeRO-3 partition must hold the parameter's own values, got a quantised one")


def _gathered(parameter: torch.Tensor, shape: tuple[int, ...], name: str) -> Parts:
    """The second copy of a parameter that DeepSpeed keeps gathered."""
    status = _read(parameter, "ds_status").name
    if status == "NOT_AVAILABLE":
        return []
    if status != "AVAILABLE" or not _read(parameter, "ds_persist"):
        raise ValueError(
            f"{name}: a ZeRO-3 parameter must be partitioned to be located, got one that is gathered (inside "
            "GatheredParameters, or between a forward and the end of its backward)"
        )
    if tuple(parameter.shape) != shape:
        raise misfit(PACKAGE, name, f"a gathered parameter must have its shape {shape}, got {tuple(parameter.shape)}")
    return [(parameter.detach(), (0,) * len(shape))]


def _secondary(parameter: torch.Tensor, numel: int, name: str) -> tuple[Parts, list[torch.Tensor]]:
    """hpZ: a second partition among the ranks of one machine, and its padding."""
    memory = _read(parameter, "ds_secondary_tensor")
    if memory is None:
        return [], []
    _check_in_memory(memory, name)
    group, size = _read(parameter, "ds_zero_param_process_group"), _read(parameter, "ds_secondary_tensor_group_size")
    rank = torch.distributed.get_rank(group)
    world = _read(parameter, "ds_zero_partition_world_size")
    # As long as the first partitions of a group's ranks together, which may end behind those of the tensor.
    length = -(-numel // world) * world // size
    if memory.dim() != 1 or memory.numel() != length or not 0 <= rank < size:
        raise misfit(
            PACKAGE,
            name,
            f"its secondary partition must be 1-D with {length} elements, got {tuple(memory.shape)} on rank {rank}",
        )
    start = min(rank * length, numel)
    held = min(length, numel - start)
    return [(memory.detach()[:held], start)], [memory.detach()[held:]]


def _add(parameter: torch.Tensor, holders: tuple[tuple[nn.Module, str], ...], found: HeldParameters) -> None:
    name = f"{type(holders[0][0]).__name__}.{holders[0][1]}"
    shape, partition = tuple(_read(parameter, "ds_shape")), _read(parameter, "ds_tensor")
    numel = region.numel(region.full_box(shape))
    _check_in_memory(partition, name)
    if _read(parameter, "ds_numel") != numel:
        raise misfit(PACKAGE, name, f"its ds_numel must be that of its shape {shape}, got {parameter.ds_numel}")  # type: ignore[attr-defined]
    rank, world = _read(parameter, "ds_zero_partition_rank"), _read(parameter, "ds_zero_partition_world_size")
    view, start, padding = _run(partition.detach(), rank, world, numel, name)
    found.padding.append(padding)
    copies, more_padding = _secondary(parameter, numel, name)
    found.padding += more_padding
    copies += _gathered(parameter, shape, name)
    parts: Parts = [(view, start)]
    found.tensors.append(
        Held(parameter, holders, shape, partition.dtype, bool(parameter.requires_grad), parts, tuple(copies))
    )


_TOO_LATE = (
    "parameters must be initialised before deepspeed.initialize, which copies them to the optimizer's fp32 master "
    "parameters: the next step would write those back, got one that an optimizer of ZeRO looks after"
)


def _has_master(parameter: torch.Tensor) -> bool:
    return getattr(parameter, "_z3_optimizer", None) is not None or getattr(parameter, "_hp_mapping", None) is not None


def collect(modules: Sequence[nn.Module], found: HeldParameters) -> None:
    """Adds the ZeRO-3 parameters of these modules to `found`, and which of them it is too late to fill."""
    places: dict[int, tuple[torch.Tensor, list[tuple[nn.Module, str]]]] = {}
    for module in modules:
        for attribute, registered in module._parameters.items():
            if registered is not None:
                places.setdefault(id(registered), (registered, []))[1].append((module, attribute))
    for parameter, holders in places.values():
        if is_partitioned(parameter):
            _add(parameter, tuple(holders), found)
        if _has_master(parameter):
            found.refusals[id(parameter)] = _TOO_LATE


def check_not_stand_in(function: str, tensor: torch.Tensor) -> None:
    """A fill of a ZeRO-3 parameter itself would write nothing, for it has size 0."""
    if is_partitioned(tensor) and tuple(tensor.shape) != tuple(tensor.ds_shape):  # type: ignore[attr-defined]
        raise ValueError(
            f"{function}: a ZeRO-3 parameter is a stand-in of size 0 for {list(tensor.ds_shape)}, "  # type: ignore[attr-defined]
            "got one; its partition can be filled (ds_tensor, with offset=), or the model by init_model_"
        )


# --- partitions for a recorded model -------------------------------------------------------------------------------


class _NoValues(TorchDispatchMode):
    """DeepSpeed cuts a partition out of a whole parameter: here out of one without memory, so nothing is copied."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default and not args[0].is_meta and 0 in args[0].stride():
            return torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def _partitioned(parameter: nn.Parameter, init: Any, dtype: torch.dtype | None) -> nn.Parameter:
    """A ZeRO-3 parameter with an uninitialised partition, in the place of one on meta."""
    wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    # One element that stands for all.
    shown = torch.empty(1, dtype=wanted, device=_read(init, "local_device")).expand(parameter.shape)
    fresh = nn.Parameter(shown, requires_grad=parameter.requires_grad)
    fresh.__dict__.update(parameter.__dict__)
    _read(init, "_convert_to_deepspeed_param")(fresh)
    with torch.no_grad(), _NoValues():
        fresh.partition()  # type: ignore[attr-defined]
    if not is_partitioned(fresh) or fresh.numel():
        raise misfit(PACKAGE, "zero.Init", f"partition() must leave a stand-in of size 0, got {tuple(fresh.shape)}")
    return fresh


class Partitioning:
    """What zero.Init was asked for in a recording: as a context manager, or with module=. Carried out at its end."""

    def __init__(self, seen: Callable[[], list[nn.Module]]) -> None:
        self._seen = seen
        self._before: list[tuple[Any, list[nn.Module]]] = []  # contexts that are open: (Init, the modules before it)
        self._asked: dict[int, tuple[nn.Parameter, Any, torch.dtype | None]] = {}
        self._inits: list[Any] = []

    def enter(self, init: Any) -> None:
        self._before.append((init, self._seen()))
        self._inits.append(init)

    def leave(self, init: Any) -> None:
        entered, before = self._before.pop()
        assert entered is init
        changes_dtype = any(override.name == "dtype" for override in _read(init, "tensor_overrides") or ())
        known = {id(module) for module in before}
        fresh = [module for module in self._seen() if id(module) not in known]
        parameters = [one for module in fresh for one in module._parameters.values() if one is not None]
        self.ask(init, parameters, _read(init, "dtype") if changes_dtype else None)

    def ask(self, init: Any, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None = None) -> None:
        for parameter in parameters:
            if not is_partitioned(parameter):
                self._asked.setdefault(id(parameter), (parameter, init, dtype))

    def carry_out(self, modules: Sequence[nn.Module]) -> None:
        """Puts ZeRO-3 parameters in the place of those that were asked for, ties kept."""
        fresh: dict[int, nn.Parameter] = {}
        for module in modules if self._asked else ():
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) not in self._asked:
                    continue
                if not parameter.is_meta:
                    raise RecordError(
                        f"{type(module).__name__}.{name} must be on meta for zero.Init to partition it inside "
                        f"recording(), got one on {parameter.device}"
                    )
                if id(parameter) not in fresh:
                    fresh[id(parameter)] = _partitioned(*self._asked[id(parameter)])
                module._parameters[name] = fresh[id(parameter)]
            if isinstance(module, nn.RNNBase):
                module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
        for init in self._inits:
            if _read(init, "mem_efficient_linear"):
                _read(init, "_enable_mem_efficient_linear")()


_active = threading.local()
_lock = threading.Lock()
_users = 0
_originals: dict[tuple[type, str], Any] = {}


def _patch() -> None:
    """zero.Init asks the recording of its thread, if there is one, before it acts."""
    module = sys.modules.get(_PARTITIONING)
    if module is None or _originals:
        return
    context = read(PACKAGE, _PARTITIONING, module, "InsertPostInitMethodToModuleSubClasses")
    init = read(PACKAGE, _PARTITIONING, module, "Init")
    for cls, name, ask in (
        (context, "__enter__", lambda asked, self: asked.enter(self)),
        (context, "__exit__", lambda asked, self, *error: asked.leave(self)),
        (init, "_convert_to_zero_parameters", lambda asked, self, parameters: asked.ask(self, parameters)),
    ):
        original = _originals[cls, name] = read(PACKAGE, "zero.Init", cls, name)
        setattr(cls, name, _asking(original, ask))


def _asking(original: Any, ask: Any) -> Any:
    @functools.wraps(original)
    def asking(self: Any, *args: Any) -> Any:
        asked = getattr(_active, "partitioning", None)
        if asked is None or not getattr(self, "enabled", True):
            return original(self, *args)
        return ask(asked, self, *args)

    return asking


@contextlib.contextmanager
def partitioning_later(seen: Callable[[], list[nn.Module]]) -> Iterator[Partitioning]:
    """For as long as this is on, zero.Init of this thread only notes what it is asked for.

    seen: the modules of the recording so far.

    Raises:
        RecordError: zero.Init is already on, and has replaced torch's factories and every module's constructor.
    """
    global _users
    if getattr(sys.modules.get(_PARTITIONING), "zero_init_context", 0):
        raise RecordError("recording() must be entered before deepspeed.zero.Init, got one inside of the other")
    with _lock:
        _users += 1
        _patch()
    # DeepSpeed may be imported while a recording is on; a model is built after that.
    handle = nn.modules.module.register_module_parameter_registration_hook(lambda *_: _late())
    asked = _active.partitioning = Partitioning(seen)
    try:
        yield asked
    finally:
        _active.partitioning = None
        handle.remove()
        with _lock:
            _users -= 1
            if not _users:
                for (cls, name), original in _originals.items():
                    setattr(cls, name, original)
                _originals.clear()


def _late() -> None:
    if not _originals and _PARTITIONING in sys.modules:
        with _lock:
            _patch()
