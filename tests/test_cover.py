"""A property of every layout at once: for any global shape, mesh, order of its axes, placements, memory order and split
points, the shards together hold each element once a replica, each with the bits that it has unsharded."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from conftest import assert_bitwise_equal, patterns
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from torch_shardinit import region
from torch_shardinit.locate import dtensor_box
from torch_shardinit.locate.fsdp1 import is_row_major, runs_of_entry, view_of_run
from torch_shardinit.plan import Entry, Plan
from torch_shardinit.program import Exact, Step

SEED = 2**63 + 5


@dataclass(frozen=True)
class Layout:
    """dims: for each mesh axis the dimension that it shards, or None. priority: the axes in the order in which they
    shard. memory_order: of a local tensor's dimensions. cuts: where the flattened local tensor is split, in parts of
    its length. lead: elements of other parameters in front of it."""

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    dims: tuple[int | None, ...]
    priority: tuple[int, ...]
    memory_order: tuple[int, ...]
    cuts: tuple[float, ...]
    lead: int
    step_region: region.Box

    @property
    def copies(self) -> int:
        return math.prod(size for size, dim in zip(self.mesh_shape, self.dims, strict=True) if dim is None)

    def indices(self, coordinate: tuple[int, ...]) -> list[list[int]]:
        """Of each dimension, those that the rank there holds: torch.chunk, axis after axis."""
        found = []
        for dim, size in enumerate(self.shape):
            held = torch.arange(size)
            for axis in self.priority:
                if self.dims[axis] == dim:
                    held = [*held.chunk(self.mesh_shape[axis]), *[held[:0]] * self.mesh_shape[axis]][coordinate[axis]]
            found.append(held.tolist())
        return found

    def spec(self) -> DTensorSpec:
        placements: list[Placement] = []
        for axis, dim in enumerate(self.dims):
            before = self.priority[: self.priority.index(axis)]
            later = [other for other in before if other > axis and self.dims[other] == dim]
            factor = math.prod(self.mesh_shape[other] for other in later)
            if dim is None:
                placements.append(Replicate())
            else:
                placements.append(_StridedShard(dim, split_factor=factor) if later else Shard(dim))
        ranks = torch.arange(math.prod(self.mesh_shape)).view(self.mesh_shape)
        mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=0)  # no process group is needed to look at it
        meta = TensorMeta(torch.Size(self.shape), region.row_major_strides(self.shape), torch.float32)
        return DTensorSpec(mesh, tuple(placements), meta)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = tuple(draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh_shape)
    corner = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - first)) for size, first in zip(shape, corner, strict=True)]
    return Layout(
        shape,
        mesh_shape,
        dims,
        tuple(draw(st.permutations(range(len(mesh_shape))))),
        tuple(draw(st.permutations(range(len(shape))))),
        tuple(sorted(draw(st.lists(st.floats(0, 1), max_size=3)))),
        draw(st.integers(0, 5)),
        region.box_at(corner, sizes),
    )


def plan_of(layout: Layout) -> Plan:
    """Normals, then steps on a region that cuts across shards."""
    steps = (
        Step("normal", (0.5, 0.1)),
        Step("mul", (1.7,), layout.step_region),
        Step("clamp", (-0.4, 0.6)),
        Step("add", (0.03125,), layout.step_region),
    )
    return Plan([Entry("w", ("w",), "parameter", layout.shape, torch.float32, Exact(steps))])


class Holdings:
    """What all shards hold of the whole: how often each element, and its bits."""

    def __init__(self, plan: Plan, shape: tuple[int, ...]) -> None:
        self.plan, self.count = plan, np.zeros(shape, np.int64)
        self.want = patterns(plan.fill_("w", torch.empty(shape), seed=SEED))

    def add(self, view: torch.Tensor, offset: int | tuple[int, ...]) -> None:
        """Fills a shard's memory where it lies, and looks at it."""
        self.plan.fill_("w", view, offset=offset, seed=SEED)
        if isinstance(offset, int):
            place: object = slice(offset, offset + view.numel())
            assert_bitwise_equal(patterns(view), self.want.ravel()[place], f"run at {offset}")
            self.count.ravel()[place] += 1
        else:
            place = region.slices(region.box_at(offset, view.shape))
            assert_bitwise_equal(patterns(view), self.want[place], f"box at {offset}")
            self.count[place] += 1


@settings(max_examples=400, deadline=None)
@given(layouts())
def test_shards_cover_each_element_once_with_its_bits(layout: Layout) -> None:
    plan, spec = plan_of(layout), layout.spec()
    boxes, parts = Holdings(plan, layout.shape), Holdings(plan, layout.shape)
    for coordinate in itertools.product(*map(range, layout.mesh_shape)):
        box = dtensor_box(spec, coordinate)
        assert box is not None
        sizes, offset = box
        held_here = [list(range(o, o + n)) for o, n in zip(offset, sizes, strict=True)]
        assert held_here == layout.indices(coordinate)
        # A DTensor's local tensor, in any memory order and with gaps.
        stored = [sizes[dim] for dim in layout.memory_order]
        memory = torch.full([2 * size for size in stored], float("nan"))
        local = memory[tuple(slice(1, None, 2) for _ in stored)].permute(np.argsort(layout.memory_order).tolist())
        boxes.add(local, offset)
        assert int(memory.isnan().sum()) == memory.numel() - math.prod(sizes), "only the shard's memory is written"
        # The same local tensor flattened and split again, as FSDP1 does over tensor parallelism.
        numel = math.prod(sizes)
        ends = [layout.lead + round(cut * numel) for cut in layout.cuts] + [layout.lead + numel + 3]
        whole = layout.copies == math.prod(layout.mesh_shape)
        held = 0
        for low, high in itertools.pairwise([0, *ends]):
            flat, before = torch.full((high - low,), float("nan")), held
            corner = None if whole else offset
            for run in runs_of_entry(layout.lead, sizes, layout.memory_order, low, high - low, corner):
                if run.length:
                    assert isinstance(run.offset, int) == (whole and is_row_major(sizes, layout.memory_order))
                    parts.add(view_of_run(flat, run), run.offset)
                    held += run.length
            assert int((~flat.isnan()).sum()) == held - before, "only the parameter's elements are written"
        assert held == numel
    assert np.all(boxes.count == layout.copies), boxes.count
    assert np.all(parts.count == layout.copies), parts.count
