"""TorchRec's sharded EmbeddingBagCollection and EmbeddingCollection: the boxes of each table that a rank holds.

The kernels hold the shards of many tables in one block of memory. A collection registers one slice of it for each
table, several column shards merged into one, and an empty parameter where this rank has nothing of the table; only its
state_dict tells where each shard lies: in a ShardedTensor, a DTensor (output_dtensor) or, for a data-parallel table, as
the whole table.

Two more things are TorchRec's own. A collection on meta does not run the init functions of its tables, so a recording
runs them (`tables_reset_on_meta`). And sharding replaces a collection by other modules, with nothing of the old ones
but the list of the tables: that list carries the records (`note_collections`, `carried_records`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.nn.modules import module as nn_module

from .held import Held, HeldParameters, Parts, misfit, read
from .names import is_a, walk_modules
from .private import package_version

PACKAGE = "torchrec"


class _Kind(NamedTuple):
    """A class of collections: where its tables are, and where the list of their configurations."""

    module: str
    name: str
    tables: str
    configs: str


_UNSHARDED = (
    _Kind("torchrec.modules.embedding_modules", "EmbeddingBagCollection", "embedding_bags", "_embedding_bag_configs"),
    _Kind("torchrec.modules.embedding_modules", "EmbeddingCollection", "embeddings", "_embedding_configs"),
)
_SHARDED = (
    _Kind(
        "torchrec.distributed.embeddingbag", "ShardedEmbeddingBagCollection", "embedding_bags", "_embedding_bag_configs"
    ),
    _Kind("torchrec.distributed.embedding", "ShardedEmbeddingCollection", "embeddings", "_embedding_configs"),
)


def _kind_of(module: nn.Module, kinds: Sequence[_Kind]) -> _Kind | None:
    for cls in type(module).__mro__:
        for kind in kinds:
            if (cls.__module__, cls.__name__) == kind[:2]:
                return kind
    return None


# --- what is read of the framework ---------------------------------------------------------------------------------


def _read(owner: object, attribute: str) -> Any:
    return read(PACKAGE, "an embedding collection of TorchRec", owner, attribute)


def _configs_of(module: nn.Module, kind: _Kind) -> list[Any]:
    return _read(module, kind.configs)


def _table_of(module: nn.Module, kind: _Kind, config: Any) -> nn.Module:
    """The module that registers a table's weight."""
    tables = getattr(module, kind.tables, None)
    if tables is None or config.name not in tables:
        raise misfit(
            PACKAGE,
            f"table {config.name!r}",
            f"a {type(module).__name__} must hold it in {kind.tables}, got none (TorchRec registers none on a fake "
            "process group)",
        )
    return tables[config.name]


def _global_shape(config: Any) -> tuple[int, int]:
    return _read(config, "num_embeddings"), _read(config, "embedding_dim")


def _dtype(config: Any) -> torch.dtype:
    return sys.modules["torchrec.modules.embedding_configs"].data_type_to_dtype(config.data_type)


Shard = tuple[Any, tuple[int, ...], tuple[int, ...]]  # (tensor, offset, sizes)


def _size_of(value: Any) -> tuple[int, ...]:
    """The global size of what a state_dict shows; a ShardedTensor warns of its age where it is asked as a tensor."""
    if is_a(value, "torch", "ShardedTensor"):
        return tuple(value.metadata().size)
    return tuple(getattr(value, "shape", ()))


def wrapped_shards(value: Any) -> list[tuple[torch.Tensor, tuple[int, ...]]] | None:
    """(local tensor, offset in the whole) of each shard of a DTensor whose local tensor is a LocalShardsWrapper,
    TorchRec's or torch's copy of it; None for any other value. Placements do not tell where these shards lie."""
    wrapper: Any = getattr(value, "_local_tensor", None)
    if not any(is_a(wrapper, package, "LocalShardsWrapper") for package in (PACKAGE, "torch")):
        return None
    shards = wrapper.local_shards()
    offsets = wrapper.local_offsets() if shards else []  # without shards it has one of size 0
    return [(shard, tuple(offset)) for shard, offset in zip(shards, offsets, strict=True)]


def _shards_of(value: Any, shape: tuple[int, ...]) -> list[Shard]:
    """The shards of a table that a state_dict shows."""
    if is_a(value, "torch", "ShardedTensor"):
        return [
            (shard.tensor, tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
            for shard in value.local_shards()
        ]
    wrapped = wrapped_shards(value)
    if wrapped is not None:
        return [(shard, offset, tuple(shard.shape)) for shard, offset in wrapped]
    return [(value, (0,) * len(shape), shape)]


# --- what follows from it ------------------------------------------------------------------------------------------


def _parts_of(value: Any, owner: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Parts:
    """This rank's boxes of a table; `value` is what the state_dict shows, `owner` the registered slice."""
    if _size_of(value) != shape:
        got = "none" if value is None else f"a {type(value).__name__} of {_size_of(value)}"
        raise misfit(PACKAGE, name, f"the state_dict must show a table of {shape}, got {got}")
    parts: Parts = []
    for tensor, offset, sizes in _shards_of(value, shape):
        if not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise TypeError(
                f"{name}: a shard must be a tensor in memory to be filled, got a {kind} of a key-value store"
            )
        inside = len(sizes) == len(shape) and all(
            0 <= first and first + size <= whole for first, size, whole in zip(offset, sizes, shape, strict=True)
        )
        if tuple(tensor.shape) != sizes or not inside:
            raise misfit(
                PACKAGE,
                name,
                f"a local shard must have the sizes {sizes} of its metadata, at {offset} of {shape}, got "
                f"{tuple(tensor.shape)}",
            )
        if tensor.numel() and tensor.untyped_storage()._cdata != owner.untyped_storage()._cdata:
            raise misfit(PACKAGE, name, "a local shard must be memory of the registered parameter, got a copy of it")
        parts.append((tensor.detach(), offset))
    held = sum(view.numel() for view, _ in parts)
    if held != owner.numel():
        raise misfit(
            PACKAGE, name, f"the local shards must be all of the registered parameter, got {held} of {owner.numel()}"
        )
    # The empty parameter of a rank that holds nothing is fp32, whatever the table is.
    return parts or [(owner.detach().view(-1).to(dtype), 0)]


def _check_shows_no_kernel(module: nn.Module) -> None:
    """Collections keep their kernels out of sight. What else TorchRec shards (nn.EmbeddingBag) registers a kernel's
    block of memory, which looks like one tensor that is the same on every rank."""
    if not is_a(module, PACKAGE, "ShardedModule"):
        return
    if any(type(child).__module__.partition(".")[0] == "fbgemm_gpu" for _, child in walk_modules(module)):
        raise TypeError(
            f"of what TorchRec shards, EmbeddingBagCollection and EmbeddingCollection can be located, got a "
            f"{type(module).__name__} ({package_version(PACKAGE)}): put its table into a collection"
        )


def _check_collections_present(modules: Sequence[nn.Module], owners: Container[int]) -> None:
    for module in modules:
        for attribute, parameter in module._parameters.items():
            if is_a(parameter, PACKAGE, "TableBatchedEmbeddingSlice") and id(parameter) not in owners:
                raise ValueError(
                    f"{type(module).__name__}.{attribute}: a table of TorchRec can only be located from a model that "
                    "contains its sharded collection, got one that lies inside of it"
                )


def collect(modules: Sequence[nn.Module], found: HeldParameters) -> None:
    """Adds what sharded collections hold of their tables to `found`."""
    for module in modules:
        kind = _kind_of(module, _SHARDED)
        if kind is None:
            _check_shows_no_kernel(module)
            continue
        # Tables of indices that it makes in its first forward.
        found.hidden.update(id(buffer) for buffer in module._buffers.values() if buffer is not None)
        state = module.state_dict()
        for config in _configs_of(module, kind):
            table, name, shape = _table_of(module, kind, config), f"table {config.name!r}", _global_shape(config)
            owner, dtype = _read(table, "weight"), _dtype(config)
            parts = _parts_of(state.get(f"{kind.tables}.{config.name}.weight"), owner, shape, dtype, name)
            requires_grad = bool(owner.requires_grad)
            found.tensors.append(Held(owner, ((table, "weight"),), shape, dtype, requires_grad, parts))
    _check_collections_present(modules, {id(one.owner) for one in found.tensors})


# --- recording -----------------------------------------------------------------------------------------------------


class _TableList(list[Any]):
    """The list of a collection's table configurations, with the records of the tables: name -> ModuleRecord. TorchRec
    hands this very list on to the sharded collection. It is copied with the model, and pickled as a plain list."""

    def __init__(self, configs: Iterable[Any], owner: nn.Module | None) -> None:
        super().__init__(configs)
        self.owner = weakref.ref(owner) if owner is not None else None
        self.records: dict[str, Any] = {}

    def belongs_to(self, module: nn.Module) -> bool:
        return self.owner is not None and self.owner() is module

    def __deepcopy__(self, memo: dict[int, Any]) -> _TableList:
        copied = _TableList(copy.deepcopy(list(self), memo), None)
        copied.records = dict(self.records)
        return copied

    def __reduce__(self) -> Any:
        return list, (list(self),)


_noted: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def note_collections(modules: Iterable[nn.Module], record_of: Callable[[nn.Module], Any]) -> None:
    """At the end of a recording: lets the collections among `modules`, and those noted before, carry the records of
    their tables through sharding. record_of: from the module of a table to its record or None."""
    if PACKAGE not in sys.modules:
        return
    for module in modules:
        kind = _kind_of(module, _UNSHARDED)
        if kind is None:
            continue
        configs = _configs_of(module, kind)
        if not (isinstance(configs, _TableList) and configs.belongs_to(module)):
            setattr(module, kind.configs, _TableList(configs, module))
        # An EmbeddingCollection takes the CPU for its device where none was named; sharding it would then copy values
        # from its tables, which the recording put on meta.
        weights = [table.weight for table in _present_tables(module, kind).values()]
        if weights and all(weight.is_meta for weight in weights):  # type: ignore[union-attr]
            _read(module, "_device")
            module._device = torch.device("meta")  # type: ignore[assignment]
        _noted.add(module)
    for module in [*_noted]:
        kind = _kind_of(module, _UNSHARDED)
        assert kind is not None
        configs = _configs_of(module, kind)
        if isinstance(configs, _TableList):
            found = {name: record_of(table) for name, table in _present_tables(module, kind).items()}
            configs.records = {name: record for name, record in found.items() if record is not None}


def _present_tables(module: nn.Module, kind: _Kind) -> dict[str, nn.Module]:
    """Whatever code has done to a collection since: this must not trouble the recording of another model."""
    tables = getattr(module, kind.tables, None)
    found = dict(tables.items()) if isinstance(tables, nn.ModuleDict) else {}
    return {name: table for name, table in found.items() if isinstance(getattr(table, "weight", None), torch.Tensor)}


def carried_records(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, Any]]:
    """(the module of a table, the record that came through sharding for it) of sharded collections."""
    for module in modules if PACKAGE in sys.modules else ():
        kind = _kind_of(module, _SHARDED)
        configs = _configs_of(module, kind) if kind is not None else None
        if kind is not None and isinstance(configs, _TableList):
            for config in configs:
                if config.name in configs.records:
                    yield _table_of(module, kind, config), configs.records[config.name]


class _ResetPatch:
    """reset_parameters of the collections, replaced for as long as any thread records."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.originals: dict[type, Any] = {}

    def enter(self, is_recording: Callable[[], bool]) -> None:
        with self.lock:
            self.users += 1
            self._patch(is_recording)

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                for cls, original in self.originals.items():
                    cls.reset_parameters = original  # type: ignore[attr-defined]
                self.originals.clear()

    def late(self, is_recording: Callable[[], bool]) -> None:
        """TorchRec may be imported while a recording is on."""
        if len(self.originals) < len(_UNSHARDED) and _UNSHARDED[0].module in sys.modules:
            with self.lock:
                self._patch(is_recording)

    def _patch(self, is_recording: Callable[[], bool]) -> None:
        for kind in (*_UNSHARDED, *_SHARDED):
            cls = getattr(sys.modules.get(kind.module), kind.name, None)
            if cls is not None and cls not in self.originals:
                self.originals[cls] = cls.reset_parameters
                cls.reset_parameters = _recordable(cls.reset_parameters, kind, is_recording)


def _recordable(original: Any, kind: _Kind, is_recording: Callable[[], bool]) -> Any:
    """A reset_parameters that under a recording runs the tables' init functions: the original does nothing for tables
    on meta, and a sharded collection's broadcasts data-parallel tables afterwards."""

    @functools.wraps(original)
    def reset_parameters(self: nn.Module) -> None:
        if not is_recording():
            original(self)
            return
        with torch.no_grad():
            for config in _configs_of(self, kind):
                config.init_fn(_table_of(self, kind, config).weight)

    return reset_parameters


_reset_patch = _ResetPatch()


@contextlib.contextmanager
def tables_reset_on_meta(is_recording: Callable[[], bool]) -> Iterator[None]:
    """For as long as this is on, collections initialise their tables under a recording too.

    is_recording: whether the calling thread records; code of other threads gets the original.
    """
    _reset_patch.enter(is_recording)
    # A collection registers the dictionary of its tables before it resets them.
    handle = nn_module.register_module_module_registration_hook(lambda *_: _reset_patch.late(is_recording))
    try:
        yield
    finally:
        handle.remove()
        _reset_patch.leave()
