"""Names through every wrapper, ties, and what ordinary tensors locate takes and refuses."""

from __future__ import annotations

import subprocess
import sys
import types
import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn
from fake_world import run_ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor

from torch_shardinit.locate import Piece, boxes_of_piece, locate
from torch_shardinit.locate.names import walk_modules

NAMES = ["b.a.bias", "b.a.weight", "b.module.bias", "b.module.weight", "c.bias", "c.running_mean", "c.weight"]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.module = nn.Linear(3, 3)  # a name that authors use as well

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(self.a(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = Inner()
        self.c = nn.Linear(3, 3)
        self.c.register_buffer("running_mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(x))


def names_of(model: nn.Module) -> list[str]:
    return sorted({piece.name for piece in locate(model).pieces})


def piece_of(model: nn.Module, name: str) -> Piece:
    (piece,) = [piece for piece in locate(model).pieces if piece.name == name]
    return piece


def net_with(**wrappers: object) -> nn.Module:
    """A Net with its inner module wrapped by `inner` and itself by `outer`."""
    net = Net()
    net.b = wrappers.get("inner", lambda module: module)(net.b)  # type: ignore[operator]
    return wrappers.get("outer", lambda module: module)(net)  # type: ignore[operator]


@pytest.mark.parametrize(
    "wrappers",
    [
        {},
        {"outer": torch.compile},
        {"inner": torch.compile},
        {"inner": checkpoint_wrapper},
        {"outer": DataParallel},
        {
            "outer": lambda net: torch.compile(DataParallel(net)),
            "inner": lambda inner: checkpoint_wrapper(torch.compile(inner)),
        },
    ],
)
def test_wrappers(wrappers: dict) -> None:
    model = net_with(**wrappers)
    assert names_of(model) == NAMES
    assert sum(name != "" for name, _ in walk_modules(model)) >= 4


def wrapped_for_a_world() -> int:
    def fsdp1(module: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return FSDP(module, device_id=torch.device("cpu"), use_orig_params=len(checked) % 2 == 0)

    def checkpointed_inside(inner: nn.Module) -> nn.Module:
        inner.a = checkpoint_wrapper(inner.a)
        return fsdp1(inner)

    checked: list[list[str]] = []
    for wrappers in [
        {"outer": DistributedDataParallel},
        {"outer": lambda net: DistributedDataParallel(torch.compile(net))},
        {"outer": lambda net: torch.compile(DistributedDataParallel(net))},
        {"outer": fsdp1},
        {"outer": fsdp1},
        {"outer": lambda net: torch.compile(fsdp1(net)), "inner": lambda inner: checkpoint_wrapper(fsdp1(inner))},
        {"outer": fsdp1, "inner": lambda inner: fsdp1(checkpoint_wrapper(inner))},
        {"outer": fsdp1, "inner": checkpointed_inside},
        {"outer": fsdp1, "inner": lambda inner: torch.compile(checkpoint_wrapper(inner))},
        {"outer": fully_shard},
        {
            "outer": lambda net: torch.compile(fully_shard(net)),
            "inner": lambda inner: fully_shard(checkpoint_wrapper(inner)),
        },
    ]:
        checked.append(names_of(net_with(**wrappers)))
    assert all(names == NAMES for names in checked), checked
    return len(checked)


def test_wrappers_of_a_world() -> None:
    assert run_ranks(wrapped_for_a_world, [1], 2) == [11]


def test_module_is_a_wrapper_only_in_a_wrapper() -> None:
    user = nn.Module()
    user.module = nn.Linear(2, 2)
    assert names_of(user) == ["module.bias", "module.weight"]
    assert names_of(DataParallel(user)) == ["module.bias", "module.weight"]
    # A subclass is a wrapper too; an author's class that only shares the name is not.
    assert names_of(type("MyParallel", (DataParallel,), {})(user)) == ["module.bias", "module.weight"]
    mine = type("DistributedDataParallel", (nn.Module,), {"__module__": "models.parallel"})()
    mine.module = nn.Linear(2, 2)
    assert names_of(mine) == ["module.bias", "module.weight"]
    for package, class_name in [
        ("deepspeed.runtime.engine", "DeepSpeedEngine"),
        ("megatron.core.ddp", "Float16Module"),
    ]:
        theirs = type(class_name, (nn.Module,), {"__module__": package})()
        theirs.module = nn.Linear(2, 2)
        assert names_of(theirs) == ["bias", "weight"]


def test_two_views_of_one_module_by_a_wrapper() -> None:
    """Lightning Fabric registers the module before and after its strategy wrapped it."""
    fabric, net = nn.Module(), Net()
    fabric._forward_module, fabric._original_module = DataParallel(net), net
    assert names_of(fabric) == NAMES
    assert all(piece.aliases == (piece.name,) for piece in locate(fabric).pieces)


def test_a_parameter_named_like_a_prefix_keeps_its_name() -> None:
    model = nn.Module()
    model._orig_mod = nn.Parameter(torch.zeros(1))
    model.module = nn.Parameter(torch.zeros(2))
    assert names_of(model) == ["_orig_mod", "module"]
    assert names_of(DataParallel(model)) == ["_orig_mod", "module"]


def test_parametrizations_keep_their_names() -> None:
    model = parametrizations.weight_norm(nn.Linear(3, 2))
    assert names_of(model) == ["bias", "parametrizations.weight.original0", "parametrizations.weight.original1"]


def test_cycles_and_shared_modules() -> None:
    model = nn.Module()
    model.child, model.shared = nn.Linear(2, 2), nn.ModuleList([])
    model.shared.append(model.child)
    object.__setattr__(model.child, "parent", model)
    model.child._modules["up"] = model
    assert [piece.aliases for piece in locate(model).pieces] == [
        ("child.weight", "shared.0.weight"),
        ("child.bias", "shared.0.bias"),
    ]


def test_ties() -> None:
    model = nn.Module()
    model.z = nn.Linear(3, 4, bias=False)
    model.B, model.a = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
    model.B.weight = model.z.weight  # by identity
    model.a.weight = nn.Parameter(model.z.weight.data)  # by memory: another Parameter of the same elements
    model.first_rows = nn.Parameter(model.z.weight.data[:2])  # the same memory, but not the same tensor
    model.register_buffer("A", model.z.weight.data)
    located = {piece.name: piece for piece in locate(model).pieces}
    assert located["A"].aliases == ("A", "B.weight", "a.weight", "z.weight")  # in code-point order
    assert located["A"].kind == "parameter" and located["A"].owner is model.z.weight
    assert located["first_rows"].aliases == ("first_rows",) and len(located) == 2


def test_same_memory_is_no_tie_unless_element_for_element() -> None:
    model, square = nn.Module(), torch.zeros(4, 4)
    model.whole, model.transposed = nn.Parameter(square), nn.Parameter(square.t())
    model.top, model.bottom = nn.Parameter(square[:2]), nn.Parameter(square[2:])
    model.bits = nn.Buffer(square.view(torch.int32))
    assert [piece.aliases for piece in locate(model).pieces] == [
        ("whole",), ("transposed",), ("top",), ("bottom",), ("bits",)
    ]  # fmt: skip


def test_meta_ties_and_devices() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.a, model.b, model.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        model.b.weight = nn.Parameter(model.a.weight.data)
    assert [p.aliases for p in locate(model).pieces if "weight" in p.name] == [("a.weight", "b.weight"), ("c.weight",)]
    assert all(piece.owner.is_meta and piece.local.is_meta for piece in locate(model).pieces)


def test_ordinary_tensors_of_any_strides() -> None:
    model = nn.Module()
    model.t = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
    model.scalar = nn.Parameter(torch.tensor(2.0))
    model.none = nn.Parameter(torch.empty(0, 5))
    model.register_buffer("gaps", torch.arange(12).reshape(3, 4)[:, ::2])
    model.register_buffer("steps", torch.tensor(0), persistent=False)
    pieces = {piece.name: piece for piece in locate(model).pieces}
    assert {name: (piece.global_shape, piece.offset, piece.local.stride()) for name, piece in pieces.items()} == {
        "t": ((4, 3), (0, 0), (1, 4)),
        "scalar": ((), (), ()),
        "none": ((0, 5), (0, 0), (5, 1)),
        "gaps": ((3, 2), (0, 0), (4, 2)),
        "steps": ((), (), ()),
    }
    assert all(torch.equal(piece.local, piece.owner) and not piece.local.requires_grad for piece in pieces.values())
    assert boxes_of_piece(pieces["scalar"]) == [()]
    pieces["t"].local.zero_()
    assert model.t.sum() == 0, "local is the tensor's own memory"
    assert sorted(piece.name for piece in locate(model, buffers=False).pieces) == ["none", "scalar", "t"]


class Quiet(nn.Parameter):
    """Adds attributes, leaves every operation alone: as good as a Parameter."""


class Loud(torch.Tensor):
    """What it holds is for its own functions to say."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_without_behaviour_is_ordinary() -> None:
    model = nn.Module()
    model.w = Quiet(torch.zeros(3))
    assert type(model.w) is Quiet and piece_of(model, "w").owner is model.w


@pytest.mark.parametrize(
    ("tensor", "type_name"),
    [
        (nn.UninitializedParameter(), "UninitializedParameter"),
        (nn.Parameter(torch.zeros(3).as_subclass(Loud)), "Loud"),
        (nn.Parameter(TwoTensor(torch.zeros(3), torch.zeros(3))), "TwoTensor"),
    ],
)
def test_error_unknown_tensor_types(tensor: nn.Parameter, type_name: str) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Module())
    model[1].w = tensor
    with pytest.raises(TypeError, match=rf"1\.w: a parameter must be an ordinary tensor, .* got a {type_name}"):
        locate(model)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, 3).to_sparse(), "must be dense .torch.strided., got layout torch.sparse_coo"),
        (torch.zeros(1).expand(4), r"must have memory of its own, got shape \(4,\) with strides \(0,\)"),
        (torch.zeros(9).as_strided((3, 3), (1, 1)), r"must have memory of its own, got shape \(3, 3\)"),
        (torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "must be dense, got a quantized one"),
    ],
)
def test_error_tensors_that_cannot_be_filled(tensor: torch.Tensor, message: str) -> None:
    model = nn.Module()
    model.register_buffer("w", tensor)
    with pytest.raises(ValueError, match="^w: .*" + message):
        locate(model)


def test_error_two_tensors_with_one_name() -> None:
    model = nn.Module()
    model.a = nn.Module()
    model.a._orig_mod, model.a.weight = nn.Linear(2, 3), nn.Parameter(torch.zeros(7))
    with pytest.raises(ValueError, match=r"a\.weight: each tensor must have a name of its own .* \(7,\) and \(3, 2\)"):
        locate(model)


def test_no_framework_is_imported() -> None:
    """locate knows frameworks by name: it must not pay for, or fail on, what the model does not use."""
    before = "import sys, torch.nn as nn;"
    locating = "from torch_shardinit.locate import locate; locate(nn.Linear(2, 2));"
    after = "print([m for m in sys.modules if m.startswith(('torch.distributed', 'torch._dynamo'))])"
    loaded = [
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        for code in (before + after, before + locating + after)
    ]
    assert loaded[0] == loaded[1] and loaded[0].startswith("[")


def test_fsdp_attribute_of_another_class_is_not_a_unit() -> None:
    model = nn.Linear(2, 2)
    model._handle = types.SimpleNamespace(flat_param=None)
    assert names_of(model) == ["bias", "weight"]
