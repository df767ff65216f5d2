"""FairScale's FSDP: truth is what it holds itself after flattening and sharding parameters whose elements are numbered.

Its forward and summon_full_params need CUDA, so shards are compared and nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from fake_world import assert_covered, assert_pieces, numbered, run_ranks, run_world
from frameworks import require
from torch.utils._python_dispatch import TorchDispatchMode

import torch_shardinit as shardinit
from torch_shardinit.locate import Located, locate
from torch_shardinit.model import materialise_
from torch_shardinit.verify_meter import InitMeter, check_counter, fill_with_garbage
from torch_shardinit.verify_processes import run_gloo

require("fairscale")
from fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP  # noqa: E402
from fairscale.nn.misc import FlattenParamsWrapper  # noqa: E402

SEED = 9
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 6)
        self.norm = nn.LayerNorm(6)
        self.b = nn.Linear(6, 5, bias=False)
        self.b.weight = nn.Parameter(torch.empty(6, 5).t())  # flattened row-major, unlike its memory
        nn.init.trunc_normal_(self.b.weight, std=0.1)
        self.register_buffer("table", torch.arange(4.0))


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5, padding_idx=3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.trunk.embedding.weight
        self.conv = nn.Conv1d(2, 3, 2)


TABLE_BYTES = 4 * 8  # of Block.table, as torch.arange makes it at first
NUM_TENSORS = 2 * 6 + 1 + 1 + 2  # blocks; scale, the tied embedding, conv


def wrap(module: nn.Module, flatten: bool = True, **options: Any) -> nn.Module:
    return FSDP(module, compute_device=CPU, flatten_parameters=flatten, **options)


def nested(net: Net, flatten: bool) -> nn.Module:
    """Both blocks units of their own, the second of the other kind; the tied embedding in the root."""
    net.trunk.blocks[0] = wrap(net.trunk.blocks[0], flatten)
    net.trunk.blocks[1] = wrap(net.trunk.blocks[1], not flatten)
    return wrap(net, flatten)


def one_unit(net: Net, flatten: bool) -> nn.Module:
    return wrap(net, flatten)


WRAPPINGS: list[tuple[Callable[[Net, bool], nn.Module], bool]] = [
    (wrapping, flatten) for wrapping in (nested, one_unit) for flatten in (True, False)
]


def units_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDP)]


def recorded() -> Net:
    with shardinit.recording():
        return Net()


def unsharded() -> dict[str, torch.Tensor]:
    net = recorded()
    shardinit.init_model_(net, SEED, device="cpu")
    return {name: tensor.detach() for name, tensor in [*net.named_parameters(), *net.named_buffers()]}


def truth_of(located: Located, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the name of the pieces: the least of a tied tensor's, where named_parameters gives the first."""
    aliases = {alias: piece.name for piece in located.pieces for alias in piece.aliases}
    return {aliases[name]: tensor for name, tensor in named.items()}


def assert_equals(model: nn.Module) -> dict[str, np.ndarray]:
    located = locate(model)
    assert all(not bool(padding.any()) for padding in located.padding)
    return assert_pieces(located.pieces, truth_of(located, unsharded()))


def assert_tiles(model: nn.Module, located: Located) -> None:
    """Pieces and padding take each element of each local shard exactly once."""
    for unit in units_of(model):
        for parameter in unit.params:
            views = [piece.local for piece in located.pieces if piece.owner is parameter]
            views += [
                one for one in located.padding if one.untyped_storage()._cdata == parameter.untyped_storage()._cdata
            ]
            taken = np.zeros(parameter.numel(), np.int64)
            for view in views:
                start = view.storage_offset() - parameter.storage_offset()
                if view.dim() == 1:
                    taken[start : start + view.numel()] += 1
                else:
                    taken += 1
            assert np.all(taken == 1), (type(unit.module.module).__name__, taken)


# --- where the elements are ----------------------------------------------------------------------------------------


def _numbered_of_rank(wrapping: Callable[[Net, bool], nn.Module], flatten: bool) -> dict[str, np.ndarray]:
    net, truth = Net(), {}
    with torch.no_grad():
        for place, (name, tensor) in enumerate([*net.named_parameters(), *net.named_buffers()]):
            tensor.copy_(numbered(tuple(tensor.shape), 1000 * place))
            truth[name] = tensor.detach().clone()
    assert len(truth) == NUM_TENSORS and not net.trunk.blocks[0].b.weight.is_contiguous()
    model = wrapping(net, flatten)
    located = locate(model)
    assert_tiles(model, located)
    assert {piece.name for piece in located.pieces if "head.weight" in piece.aliases} == {"head.weight"}
    return assert_pieces(located.pieces, truth_of(located, truth))


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("wrapping, flatten", WRAPPINGS)
def test_pieces_are_what_fairscale_holds(world: int, wrapping: Callable[[Net, bool], nn.Module], flatten: bool) -> None:
    held = run_world(_numbered_of_rank, world, wrapping, flatten)
    buffers = {name: world for name in held[0] if name.endswith("table")}
    for name in held[0]:
        assert_covered([{name: one[name]} for one in held], buffers.get(name, 1))
    assert len(held[0]) == NUM_TENSORS


# --- the values ----------------------------------------------------------------------------------------------------


class _Forbidden(TorchDispatchMode):
    """No collective, and no tensor with more memory of its own than the largest shard has."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "c10d" not in func.namespace, f"a collective during init: {func}"
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                assert tensor.untyped_storage().nbytes() <= self.limit_bytes, f"{func} made {tuple(tensor.shape)}"
        return result


def init_(model: nn.Module, **options: Any) -> nn.Module:
    """Nothing is gathered: neither by a collective nor by asking the unit to."""
    largest = max(parameter.untyped_storage().nbytes() for unit in units_of(model) for parameter in unit.params)
    with pytest.MonkeyPatch.context() as patch, _Forbidden(max(largest, TABLE_BYTES)):
        for name in ("summon_full_params", "_lazy_init", "_rebuild_full_params", "forward", "apply"):
            patch.setattr(FSDP, name, lambda *args, name=name, **kwargs: pytest.fail(f"{name} must not be called"))
        return shardinit.init_model_(model, SEED, **options)


def _values_of_rank(wrapping: Callable[[Net, bool], nn.Module], flatten: bool) -> None:
    # Over FairScale's own sharding of a real model.
    net = recorded()
    materialise_(net, "cpu")
    model = wrapping(net, flatten)
    fill_with_garbage(model)
    versions = [parameter._version for unit in units_of(model) for parameter in unit.params]
    init_(model)
    assert_equals(model)
    after = [parameter._version for unit in units_of(model) for parameter in unit.params]
    assert all(now > before for now, before in zip(after, versions, strict=True))

    # Wrapped on meta: only shards ever get memory.
    model = wrapping(recorded(), flatten)
    assert all(parameter.is_meta for unit in units_of(model) for parameter in unit.params)
    with pytest.raises(ValueError, match="is on meta and has no memory: pass device="):
        init_(model)
    kinds = [type(parameter).__name__ for unit in units_of(model) for parameter in unit.params]
    init_(model, device="cpu")
    assert_equals(model)
    assert_tiles(model, locate(model))
    assert kinds == [type(parameter).__name__ for unit in units_of(model) for parameter in unit.params]
    registered = {id(parameter) for parameter in model.parameters()}
    assert {id(parameter) for unit in units_of(model) for parameter in unit.params} <= registered
    for module in model.modules():
        if isinstance(module, FlattenParamsWrapper):
            assert {id(flat) for flat in module.flat_params} <= registered

    # Init code given after wrapping, run on stand-ins of the whole parameters.
    model = wrapping(Net(), flatten)
    expected = _programs(shardinit.record(Net(), shardinit.reset_parameters))
    assert _programs(shardinit.record(model, shardinit.reset_parameters)) == expected
    applied = _programs(shardinit.record(model, lambda root: root.apply(_ones)))
    assert applied["trunk.blocks.1.a.weight"] == ((6, 5), "fill(1)")


def _programs(plan: shardinit.Plan) -> dict[str, tuple[tuple[int, ...], str]]:
    entries = [entry for entry in plan.entries.values() if entry.kind == "parameter"]
    return {entry.name: (entry.shape, entry.program.describe()) for entry in entries}


def _ones(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


@pytest.mark.parametrize("wrapping, flatten", WRAPPINGS)
def test_shards_are_slices_of_the_unsharded_model(wrapping: Callable[[Net, bool], nn.Module], flatten: bool) -> None:
    for world, ranks in ((1, [0]), (3, [0, 1, 2]), (64, [0, 5, 63])):
        run_ranks(_values_of_rank, ranks, world, wrapping, flatten)


def _gloo_worker(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    check_counter()
    meter = InitMeter()
    for wrapping, flatten in WRAPPINGS:
        _values_of_rank(wrapping, flatten)
        model = wrapping(recorded(), flatten)
        with meter.around(model):
            shardinit.init_model_(model, SEED, device="cpu")
        assert_equals(model)
    assert meter.collectives.counts == (0, 0) and not meter.moved_generator


def test_on_real_processes() -> None:
    run_gloo(_gloo_worker, 2, limit=100, threads=1)


# --- a trunk that is wrapped and initialised before its head exists -------------------------------------------------


class Whole(nn.Module):
    def __init__(self, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head


def _inner_first_of_rank(flatten: bool, on_meta: bool) -> None:
    def ready(module: nn.Module) -> nn.Module:
        if not on_meta:
            materialise_(module, "cpu")
        return module

    def in_whole(name: str) -> str:
        return f"trunk.{name}"

    with shardinit.recording():
        whole = Whole(Trunk(), nn.Linear(5, 3))
    shardinit.init_model_(whole, SEED, device="cpu")
    truth = {name: tensor.detach() for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]}
    of_trunk = {name.removeprefix("trunk."): tensor for name, tensor in truth.items() if name.startswith("trunk.")}

    with shardinit.recording():
        trunk = Trunk()
    trunk = wrap(ready(trunk), flatten)
    init_(trunk, rename=in_whole, device="cpu")
    assert_pieces(locate(trunk).pieces, of_trunk)
    with shardinit.recording():
        head = nn.Linear(5, 3)
    model = wrap(Whole(trunk, wrap(ready(head), not flatten)), flatten)
    assert_pieces([piece for piece in locate(model).pieces if piece.name.startswith("trunk.")], truth)
    # The head alone, then the root, then the trunk again inside of it.
    init_(model, keep=["trunk.*"], device="cpu")
    assert_pieces(locate(model).pieces, truth)
    fill_with_garbage(model)
    init_(model)
    assert_pieces(locate(model).pieces, truth)
    fill_with_garbage(trunk)
    init_(trunk, rename=in_whole)
    assert_pieces(locate(model).pieces, truth)


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("on_meta", [True, False])
def test_inner_units_first(flatten: bool, on_meta: bool) -> None:
    run_world(_inner_first_of_rank, 3, flatten, on_meta)


def test_a_flatten_params_wrapper_alone() -> None:
    wrapper = FlattenParamsWrapper(materialised := recorded_on_cpu())
    assert [name for name, _ in wrapper.named_parameters()] == ["flat_param_0"]
    shardinit.init_model_(wrapper, SEED)
    located = locate(wrapper)
    assert_pieces(located.pieces, truth_of(located, unsharded()))
    assert not located.padding and len(located.pieces) == NUM_TENSORS
    assert type(materialised.conv.weight) is torch.Tensor  # a view of the flat parameter


def recorded_on_cpu() -> Net:
    net = recorded()
    materialise_(net, "cpu")
    return net


# --- what is refused -----------------------------------------------------------------------------------------------


def _misfits_of_rank() -> None:
    version = r" \(fairscale 0\.4\.13; see the README"

    def refused(message: str, suffix: str = version) -> None:
        for call in (locate, lambda model: shardinit.init_model_(model, SEED)):
            with pytest.raises(ValueError, match=message + suffix):
                call(model)

    model: Any = nested(recorded_on_cpu(), True)
    flat, inner = model.params[0], model.module.module.trunk.blocks[1].params[0]
    name = "the flat parameter of Trunk.scale"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "rank", 4)
        refused(
            rf"{name}.*: the local shard must be 1-D and contiguous with \d+ of \d+ elements, got .* on rank 4 of 4"
        )
        patch.undo()
        patch.setattr(model, "world_size", 3)
        refused(
            rf"{name}.*: the local shard must be 1-D and contiguous with \d+ of \d+ elements, got .* on rank 1 of 3"
        )
        patch.undo()
        patch.setattr(flat, "_orig_size", torch.Size([5]))
        refused(rf"{name}.*: the unsharded size must be of \d+ elements, got \(5,\)")
        patch.undo()
        patch.setattr(flat, "_param_numels", [1, *flat._param_numels[1:]])
        refused(r"Trunk\.scale in a flat parameter: its 1 elements must be those of its shape, got \(3,\)")
        patch.undo()
        patch.delattr(flat, "_param_infos")
        refused("a FlatParameter must have _param_infos, got one without")
        patch.undo()
        patch.delattr(inner, "_orig_size")
        refused("a Parameter must have _orig_size, got one without")
        patch.undo()
        patch.setattr(inner, "_orig_size", torch.Size([6, 6]))
        refused(r"Linear\.weight: the local shard must be 1-D and contiguous with 9 of 36 .*, got shape \(8,\) .* of 4")
        patch.undo()
        stranger = nn.Parameter(inner.detach())
        stranger._is_sharded = True
        patch.setattr(model.module.module.trunk.blocks[1], "params", [stranger])
        refused("FullyShardedDataParallel: each of its parameters must be registered in a module of it")
        patch.undo()
        patch.setattr(flat, "_fp32_shard", flat.detach().clone(), raising=False)
        refused(rf"{name}.*: a FairScale parameter must be its own local shard, got one that is gathered", suffix="")
        patch.undo()
        patch.setattr(flat, "_full_param_padded", torch.ones(8), raising=False)
        refused(rf"{name}.*: a FairScale parameter must be its own local shard, got one that is gathered", suffix="")
    assert len({piece.name for piece in locate(model).pieces}) == NUM_TENSORS


def test_error_what_fairscale_holds_does_not_fit() -> None:
    run_ranks(_misfits_of_rank, [1], 4)


def _inside_of_rank() -> None:
    for flatten, holder in ((True, "the flat parameter of Trunk"), (False, "Linear")):
        model = wrap(recorded_on_cpu(), flatten)
        message = (
            rf"{holder}\.\w+.*: a parameter of a FairScale FullyShardedDataParallel can only be located from a model"
        )
        inside = model._fsdp_wrapped_module if flatten else model.module.module.trunk.blocks[0].a
        for call in (locate, lambda module: shardinit.record(module, shardinit.reset_parameters)):
            with pytest.raises(ValueError, match=message):
                call(inside)
    model = wrap(recorded_on_cpu())
    model.module.module.conv = nn.Conv1d(2, 3, 2)
    with pytest.raises(
        ValueError, match="must still be in the model, got a Conv1d that is not, with parameter 'weight'"
    ):
        locate(model)


def test_error_parameters_without_their_unit_or_module() -> None:
    run_ranks(_inside_of_rank, [1], 2)


def test_unwritten_parameters_are_an_error() -> None:
    run_ranks(_unwritten_of_rank, [0, 1], 2)


def _unwritten_of_rank() -> None:
    net = recorded()
    net.conv.weight = nn.Parameter(torch.empty(3, 2, 5, device="meta"))  # after the recording
    with pytest.raises(shardinit.UninitializedError, match=r"no recorded code initialises 1 tensors: conv\.weight"):
        shardinit.init_model_(wrap(net), SEED, device="cpu")

    def all_but_scale(model: nn.Module) -> None:
        shardinit.reset_parameters(model)

    model = nested(Net(), True)
    with pytest.raises(shardinit.UninitializedError, match=r"no recorded code initialises 3 tensors: .*trunk\.scale"):
        shardinit.init_model_(model, SEED, init_fn=all_but_scale)
