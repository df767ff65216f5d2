"""DTensor: truth is what the framework itself holds after sharding a tensor whose elements are their own indices."""

from __future__ import annotations

import itertools
import random
import types

import numpy as np
import pytest
import torch
import torch.nn as nn
from fake_world import assert_covered, assert_pieces, numbered, run_ranks, run_world
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from torch_shardinit.locate import dtensor_box, locate, locate_dtensor
from torch_shardinit.locate.dtensor import box_of_shard_order, chunk, shard_order

# --- integers: no process group ------------------------------------------------------------------------------------


def test_chunk_is_torch_chunk() -> None:
    for size, num_chunks in itertools.product(range(1, 14), range(1, 10)):
        parts = [part.tolist() for part in torch.arange(5, 5 + size).chunk(num_chunks)]
        parts += [[]] * (num_chunks - len(parts))
        for index, part in enumerate(parts):
            start, length = chunk(5, size, num_chunks, index)
            assert list(range(start, start + length)) == part
    assert chunk(5, 0, 3, 1) == (5, 0)


@pytest.mark.parametrize("shape", [(9,), (1,), (0, 3), (7, 5), (3, 8, 5)])
@pytest.mark.parametrize("mesh_shape", [(3,), (4, 2), (3, 2), (2, 2, 3)])
def test_every_coordinate_together_tiles_the_tensor(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> None:
    axes = range(len(mesh_shape))
    for dims in itertools.product([None, *range(len(shape))], repeat=len(mesh_shape)):
        for priority in itertools.permutations(axes):
            order = [
                (dim, tuple(axis for axis in priority if dims[axis] == dim)) for dim in range(len(shape)) if dim in dims
            ]
            held = np.zeros(shape, np.int64)
            for coordinate in itertools.product(*map(range, mesh_shape)):
                sizes, offset = box_of_shard_order(shape, order, mesh_shape, coordinate)
                held[tuple(slice(o, o + s) for o, s in zip(offset, sizes, strict=True))] += 1
            copies = np.prod([size for size, dim in zip(mesh_shape, dims, strict=True) if dim is None], dtype=int)
            assert np.all(held == copies)


def test_box_where_torch_is_wrong() -> None:
    """9 rows over dp 4 x tp 2, tp first: 5 and 4 rows, each over dp in chunks of 2, 2, 1, 0 and 1, 1, 1, 1."""
    order = shard_order([(0, 2), (0, 1)], (4, 2))
    assert order == [(0, (1, 0))]
    rows = [[box_of_shard_order((9,), order, (4, 2), (dp, tp)) for tp in range(2)] for dp in range(4)]
    assert [(s[0], o[0]) for s, o in (row[0] for row in rows)] == [(2, 0), (2, 2), (1, 4), (0, 5)]
    assert [(s[0], o[0]) for s, o in (row[1] for row in rows)] == [(1, 5), (1, 6), (1, 7), (1, 8)]


def test_shard_order_is_torch_shard_order() -> None:
    """Every order of up to four axes over two dimensions, through the split factors and back, and as torch reads it."""
    rng, cases = random.Random(0), 0
    for mesh_shape in [(2, 3), (2, 2, 2), (3, 2, 2), (2, 3, 2, 2)]:
        fake_mesh = types.SimpleNamespace(size=lambda axis, shape=mesh_shape: shape[axis])
        for dims in itertools.product([None, 0, 1], repeat=len(mesh_shape)):
            priority = rng.sample(range(len(mesh_shape)), len(mesh_shape))
            order = [(dim, tuple(axis for axis in priority if dims[axis] == dim)) for dim in range(2) if dim in dims]
            shards: list[tuple[int, int] | None] = [None] * len(mesh_shape)
            for dim, axes in order:
                for i, axis in enumerate(axes):
                    factor = int(np.prod([mesh_shape[other] for other in axes[:i] if other > axis], dtype=int))
                    shards[axis] = (dim, factor)
            got = shard_order(shards, mesh_shape)
            placements = tuple(
                Replicate() if s is None else Shard(s[0]) if s[1] == 1 else _StridedShard(s[0], split_factor=s[1])
                for s in shards
            )
            theirs = DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, fake_mesh)  # type: ignore[arg-type]
            assert got == [(entry.tensor_dim, tuple(entry.mesh_dims)) for entry in theirs or ()]
            assert got == order
            cases += 1
    assert cases == 9 + 27 + 27 + 81


def test_shard_order_that_no_order_explains() -> None:
    assert shard_order([(0, 3), (0, 1)], (2, 2)) is None
    assert shard_order([(0, 2)], (2,)) is None


# --- what the framework holds --------------------------------------------------------------------------------------


class OneParameter(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.w = nn.Parameter(numbered(shape))


def shard_with_torch(case: tuple) -> dict[str, np.ndarray]:
    """One case: (mesh shape, axis names, tensor shape, tp dimension or None, FSDP dimension or None)."""
    mesh_shape, names, shape, tp_dim, fsdp_dim = case
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = OneParameter(shape)
    if "tp" in names:  # over the tp axis alone: distribute_tensor with _StridedShard would hold other rows
        placement = Replicate() if tp_dim is None else Shard(tp_dim)
        model.w = nn.Parameter(distribute_tensor(model.w.data, mesh["tp"], [placement], src_data_rank=None))
    data_mesh = mesh["rep", "dp"] if "rep" in names else mesh["dp"]
    fully_shard(model, mesh=data_mesh, shard_placement_fn=None if fsdp_dim is None else lambda _: Shard(fsdp_dim))
    located = locate(model)
    assert len(located.pieces) == 1 and located.padding == [] and located.pieces[0].owner is model.w
    assert located.pieces[0].local.untyped_storage()._cdata == model.w._local_tensor.untyped_storage()._cdata
    box = dtensor_box(model.w._spec)  # an empty shard may come in another shape
    assert box is not None and (located.pieces[0].local.shape, located.pieces[0].offset) == box
    return assert_pieces(located.pieces, {"w": numbered(shape)})


def shard_cases(cases: list[tuple]) -> list[dict[str, np.ndarray]]:
    return [shard_with_torch(case) for case in cases]


def check_cases(world: int, cases: list[tuple]) -> int:
    held_of_ranks = run_world(shard_cases, world, cases)
    for index, (mesh_shape, names, _, tp_dim, _) in enumerate(cases):
        copies = mesh_shape[names.index("rep")] if "rep" in names else 1
        copies *= mesh_shape[names.index("tp")] if "tp" in names and tp_dim is None else 1
        assert_covered([held[index] for held in held_of_ranks], copies)
    return len(cases) * len(held_of_ranks)


def test_fsdp2_every_world() -> None:
    checked = 0
    for world in range(1, 9):
        cases: list[tuple] = [
            ((world,), ("dp",), shape, None, None) for shape in [(8, 3), (7, 3), (3, 5, 2), (1,), (5,), (13, 1)]
        ]
        checked += check_cases(world, [*cases, ((world,), ("dp",), (3, 2 * world), None, 1)])
    assert checked == 7 * sum(range(1, 9))


def test_hsdp() -> None:
    names = ("rep", "dp")
    assert check_cases(4, [((2, 2), names, (7, 3), None, None), ((2, 2), names, (1, 3), None, None)]) == 8
    assert check_cases(6, [((2, 3), names, (7, 3), None, None), ((3, 2), names, (2, 6), None, 1)]) == 12


STRIDED = [(8, 8), (7, 6), (5, 4), (9, 4), (3, 4), (10, 4), (1, 4)]


@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 2), (2, 3), (4, 2), (2, 4)])
def test_fsdp2_over_tensor_parallelism(mesh_shape: tuple[int, int]) -> None:
    """Both shard dimension 0 (strided shards), or tp shards dimension 1, replicates, or both shard dimension 1."""
    names, world = ("dp", "tp"), mesh_shape[0] * mesh_shape[1]
    cases: list[tuple] = [(mesh_shape, names, shape, 0, None) for shape in STRIDED]
    cases += [(mesh_shape, names, shape, 1, None) for shape in [(7, 6), (7, 5), (1, 1), (4, 3, 2)]]
    cases += [(mesh_shape, names, (7, 6), None, None), (mesh_shape, names, (5, 4 * world), 1, 1)]
    assert check_cases(world, cases) == 13 * world


def test_three_axes() -> None:
    names = ("rep", "dp", "tp")
    shapes = [(9, 6), (5, 3), (3, 4)]
    assert check_cases(8, [((2, 2, 2), names, shape, dim, None) for shape in shapes for dim in (0, 1)]) == 48


def plain_shards() -> list[dict[str, np.ndarray]]:
    """distribute_tensor without fully_shard: several dimensions, uneven, replicated, 0-dim."""
    mesh, held = init_device_mesh("cpu", (2, 3)), []
    cases = [((), [Replicate(), Replicate()]), ((7, 5, 4), [Shard(2), Shard(0)]), ((5, 4), [Shard(0), Shard(0)])]
    for shape, placements in [*cases, ((4, 4), [Shard(-1), Replicate()]), ((1, 7), [Replicate(), Shard(1)])]:
        model = nn.Module()
        model.register_buffer("w", distribute_tensor(numbered(shape), mesh, placements, src_data_rank=None))
        (piece,) = locate(model).pieces
        assert piece.kind == "buffer" and locate(model, buffers=False).pieces == []
        held.append(assert_pieces([piece], {"w": numbered(shape)}))
    return held


def test_distribute_tensor() -> None:
    held_of_ranks = run_world(plain_shards, 6)
    assert len(held_of_ranks) == 6
    for index, copies in enumerate([6, 1, 1, 3, 2]):
        assert_covered([held[index] for held in held_of_ranks], copies)


# --- one rank is enough for the rest -------------------------------------------------------------------------------


def from_local_with_odd_strides() -> tuple:
    mesh = init_device_mesh("cpu", (3,))
    whole = numbered((7, 4))
    rows = whole.chunk(3)[mesh.get_local_rank()]
    memory = torch.full((4, 2 * rows.shape[0] + 1), -1.0, dtype=torch.float64)
    local = memory.t()[1::2]
    local.copy_(rows)
    dtensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    model = nn.Module()
    model.w = nn.Parameter(dtensor)
    (piece,) = locate(model).pieces
    assert_pieces([piece], {"w": whole})
    piece.local.fill_(-2.0)
    assert (memory == -2).sum() == local.numel(), "local is the tensor's own memory"
    got = locate_dtensor(dtensor)
    assert got is not None and got[1:] == (piece.local.shape, piece.offset)
    return piece.local.stride()


def test_from_local_with_odd_strides() -> None:
    strides = run_world(from_local_with_odd_strides, 3)
    assert strides[:2] == [(2, 7), (2, 7)] and strides[2][1] == 3  # one row: its own stride means nothing


def message_of(fn: object, *args: object, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as caught:
        fn(*args)  # type: ignore[operator]
    return str(caught.value)


def wrong_dtensors() -> dict[str, str]:
    mesh, flat = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    messages = {}

    def holding(dtensor: DTensor) -> nn.Module:
        model = nn.Module()
        model.w = nn.Parameter(dtensor)
        return model

    partial = DTensor.from_local(torch.ones(3), mesh, [Partial(), Replicate()], run_check=False)
    messages["partial"] = message_of(locate, holding(partial))
    meta = TensorMeta(torch.Size((8,)), (1,), torch.float32)
    strided = DTensorSpec(mesh, (_StridedShard(0, split_factor=3), Shard(0)), meta)
    messages["order"] = message_of(dtensor_box, strided)
    expanded = DTensor.from_local(torch.ones(1).expand(3, 2), flat, [Shard(0)], run_check=False)
    messages["expanded"] = message_of(locate, holding(expanded))
    return messages


def test_error_dtensor_without_a_box() -> None:
    (messages,) = run_ranks(wrong_dtensors, [1], 4)
    assert "w: a DTensor must be sharded or replicated" in messages["partial"] and "Partial" in messages["partial"]
    assert messages["order"].startswith("the split factors must follow from an order of the mesh axes, got (")
    assert "w: each element must have memory of its own" in messages["expanded"]


def wrong_shape_at(rows: int) -> str:
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Module()
    model.w = nn.Parameter(
        DTensor.from_local(
            torch.ones(rows, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size((10, 2)), stride=(2, 1)
        )
    )
    return message_of(locate, model)


def test_error_local_shape_does_not_fit() -> None:
    assert run_ranks(wrong_shape_at, [3], 4, 2) == [
        "w: the local shard must have the shape (1, 2) that the placements give at mesh coordinate (3,), got (2, 2); "
        f"global shape (10, 2), placements (Shard(dim=0),), mesh (4,) (torch {torch.__version__})"
    ]


def outside_the_mesh() -> tuple[int, object]:
    mesh = DeviceMesh("cpu", [0, 1])
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh, [Shard(0)], src_data_rank=None))
    return [piece.name for piece in locate(model).pieces], dtensor_box(model.weight._spec)  # type: ignore[return-value]


def test_rank_outside_the_mesh_has_no_piece() -> None:
    inside, outside = run_ranks(outside_the_mesh, [1, 3], 4)
    assert inside == (["weight", "bias"], ((1, 3), (1, 0))) and outside == (["bias"], None)


def explicit_coordinate_and_order() -> list:
    mesh = init_device_mesh("cpu", (4, 2))
    meta = TensorMeta(torch.Size((9, 4)), (4, 1), torch.float32)
    strided = DTensorSpec(mesh, (_StridedShard(0, split_factor=2), Shard(0)), meta)
    _, order = DTensorSpec._normalize_placements_into_shard_order(strided.placements, mesh)
    ordered = DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=order)
    boxes = [dtensor_box(strided, (dp, tp)) for dp in range(4) for tp in range(2)]
    assert boxes == [dtensor_box(ordered, (dp, tp)) for dp in range(4) for tp in range(2)]
    return boxes


def test_box_at_any_coordinate_and_shard_order_of_the_spec() -> None:
    (boxes,) = run_ranks(explicit_coordinate_and_order, [0], 8)
    assert boxes[6:] == [((0, 4), (5, 0)), ((1, 4), (8, 0))] and len(boxes) == 8


def nested_and_tied() -> list[str]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(7, 4)
            self.blocks = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 4)])
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.emb.weight
            self.norm = nn.BatchNorm1d(4)

    model = Net().double()
    truth = {}
    with torch.no_grad():
        for start, (name, tensor) in enumerate([*model.named_parameters(), *model.named_buffers()]):
            if tensor.is_floating_point():
                tensor.copy_(numbered(tuple(tensor.shape), 1000 * start))
            truth[name] = tensor.detach().clone()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=False)
    pieces = locate(model).pieces
    assert_pieces(pieces, truth)
    assert pieces[0].aliases == ("emb.weight", "head.weight")
    model.unshard()
    assert "must be in its sharded state" in message_of(locate, model)
    model.reshard()
    assert_pieces(locate(model).pieces, truth)
    return [piece.name for piece in pieces]


def test_nested_units_ties_and_buffers() -> None:
    names = run_ranks(nested_and_tied, [0, 4], 5)
    assert names[0] == names[1] and len(set(names[0])) == len(names[0]) == 10
    assert {"norm.running_mean", "norm.num_batches_tracked", "blocks.1.bias"} <= set(names[0])
