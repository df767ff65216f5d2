"""explain --plot and verify --plot: what is drawn is what the Plan, the real layouts and the report say."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from fake_world import run_world
from matplotlib.image import imread
from test_cli import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_shardinit.cli import main
from torch_shardinit.demo_model import Block, tiny
from torch_shardinit.locate import boxes_of_piece, locate
from torch_shardinit.plan import Entry, Plan
from torch_shardinit.plot import plan_figure, report_figure
from torch_shardinit.plot_ownership import Part, bytes_by_rank, groups, layout, matrix_shape
from torch_shardinit.program import Exact, Step
from torch_shardinit.record import record, recording
from torch_shardinit.region import Span
from torch_shardinit.verify import TODAY, Report, Row
from torch_shardinit.verify_reference import ValueChecks


def plan_of(build: Callable[[], nn.Module]) -> tuple[Plan, list[str]]:
    with recording():
        model = build()
    return record(model), [name for name, _ in model.named_parameters()]


class Mixed(nn.Module):
    """Every kind of panel: layers alike, a scalar, a padding row, played and narrow tensors, one that nothing wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(30, 20) for _ in range(3))
        self.conv = nn.Conv2d(6, 13, 3)
        self.scalar = nn.Parameter(torch.zeros(()))
        self.padded = nn.Embedding(50, 8, padding_idx=2)
        self.narrow = nn.Parameter(torch.empty(40, 30, dtype=torch.bfloat16).normal_(0, 0.02))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(20, 20)))
        self.register_buffer("coins", torch.empty(15, 10).bernoulli_(0.25))
        self.nothing = nn.Parameter(torch.empty(7))


def labelled(figure: Any, label: str) -> list[Any]:
    return [axes for axes in figure.axes if axes.get_label() == label]


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.texts]


# --- owners ------------------------------------------------------------------------------------------------------


def elements(parts: list[Part], entry: Entry, rank: int) -> np.ndarray:
    """Row-major indices that a rank holds, sorted."""
    index = np.arange(math.prod(entry.shape)).reshape(matrix_shape(entry.shape))
    held = [
        index[rows.start : rows.start + rows.size, columns.start : columns.start + columns.size].ravel()
        for part in parts
        if rank in part.ranks
        for rows, columns in [part.box]
    ]
    return np.sort(np.concatenate([np.zeros(0, int), *held]))


def located(kind: str) -> dict[str, np.ndarray]:
    """The same as the framework shards it, on this rank."""
    model: nn.Module = tiny()
    if kind == "fsdp1":
        policy = ModuleWrapPolicy({Block})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replica", "shard"))
        fully_shard(model, mesh=mesh)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    held: dict[str, np.ndarray] = {}
    for piece in locate(model).pieces:
        index = np.arange(math.prod(piece.global_shape)).reshape(piece.global_shape)
        found = [
            index[np.ix_(*(range(s.start, s.start + s.size) for s in box))].ravel() for box in boxes_of_piece(piece)
        ]
        held[piece.name] = np.sort(np.concatenate([held.get(piece.name, np.zeros(0, int)), *found]))
    return held


@pytest.mark.parametrize(("kind", "world"), [("fsdp1", 3), ("fsdp2", 3), ("hsdp", 4)])
def test_owners_are_those_of_the_framework(kind: str, world: int) -> None:
    plan, parameters = plan_of(tiny)
    parts_of = layout(kind, world, plan, parameters)
    ranks = run_world(located, world, kind)
    for rank, held in enumerate(ranks):
        for name, entry in plan.entries.items():
            expected = held.get(name, np.zeros(0, int))
            assert np.array_equal(elements(parts_of(entry), entry, rank), expected), (rank, name)
    assert len({len(held["embedding.weight"]) for held in ranks}) <= 2 and set(plan.entries) == set(ranks[0])


LAYOUTS = ["ddp", "fsdp1", "fsdp2", "hsdp", "tp:layers.*.weight=0,conv.weight=1,padded*=1", "tp:conv.weight=2"]


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("world", [2, 6, 40])
def test_parts_hold_every_element_once(text: str, world: int) -> None:
    plan, parameters = plan_of(Mixed)
    parts_of = layout(text, world, plan, parameters)
    copies = {"ddp": world, "hsdp": 2}.get(text, 1)
    total = 0
    for entry in plan.entries.values():
        parts = parts_of(entry)
        counts = np.zeros(matrix_shape(entry.shape), int)
        for part in parts:
            (first, _, height), (left, _, width) = part.box
            counts[first : first + height, left : left + width] += 1
            total += len(part.ranks) * part.num_elements * entry.dtype.itemsize
        assert (counts == 1).all(), entry.name
        if len(parts) > 1:
            assert {len(part.ranks) for part in parts} == {copies}
    assert sum(bytes_by_rank(plan, parts_of, world)) == total


def test_tensor_parallel_dimensions() -> None:
    plan, parameters = plan_of(Mixed)
    parts_of = layout("tp:conv.weight=2,layers.1.*=0,layers.*.weight=1", 2, plan, parameters)
    boxes = {name: [(part.ranks, part.box) for part in parts_of(plan.entries[name])] for name in plan.entries}
    rows = [((0,), (Span(0, 1, 10), Span(0, 1, 30))), ((1,), (Span(10, 1, 10), Span(0, 1, 30)))]
    assert boxes["layers.1.weight"] == rows
    assert boxes["layers.0.weight"] == [
        ((0,), (Span(0, 1, 20), Span(0, 1, 15))),
        ((1,), (Span(0, 1, 20), Span(15, 1, 15))),
    ]
    assert boxes["layers.0.bias"] == [((0, 1), (Span(0, 1, 20), Span(0, 1, 1)))]
    index = np.arange(13 * 6 * 3 * 3).reshape(13, 6, 3, 3)
    for rank, part in enumerate((index[:, :, :2], index[:, :, 2:])):
        assert np.array_equal(elements(parts_of(plan.entries["conv.weight"]), plan.entries["conv.weight"], rank),
                              np.sort(part.ravel()))  # fmt: skip


def test_error_layout() -> None:
    plan, parameters = plan_of(Mixed)
    for text, world, message in (
        ("fsdp3", 8, "--layout must be ddp, fsdp1, fsdp2, hsdp or tp:PATTERN=DIM,..., got 'fsdp3'"),
        ("fsdp2", 0, r"--world must be in \[1, 1024\], got 0"),
        ("hsdp", 3, "--world must be even for the two replicas of hsdp, got 3"),
        ("tp:layers", 2, "--layout tp: must be followed by PATTERN=DIM,..., got 'layers'"),
        ("tp:layers=-1", 2, "--layout tp: must be followed by PATTERN=DIM,..., got 'layers=-1'"),
    ):
        with pytest.raises(ValueError, match=message):
            layout(text, world, plan, parameters)
    with pytest.raises(ValueError, match=r"conv.bias=1 must name a dimension of conv.bias, got one of shape \[13\]"):
        layout("tp:conv.bias=1", 2, plan, parameters)(plan.entries["conv.bias"])


def test_tensors_alike_are_one_group() -> None:
    plan, _ = plan_of(Mixed)
    found = groups(plan)
    assert {group.label: len(group.entries) for group in found}["layers.*.weight x 3"] == 3
    assert sorted(entry.name for group in found for entry in group.entries) == sorted(plan.entries)
    assert found[0].label == "layers.*.weight x 3" and found[0].num_elements == 1800
    # A step or a shape of its own makes a group of its own, which stands behind all others.
    steps = [Step("normal", (std, 0.0)) for std in (1.0, 1.0, 2.0)]
    entries = [Entry(f"l.{n}.w", (f"l.{n}.w",), "parameter", (9, 9), torch.float32, Exact((step,)))
               for n, step in enumerate(steps)]  # fmt: skip
    small = Entry("small", ("small",), "parameter", (1,), torch.float32, Exact((steps[0],)))
    assert [group.label for group in groups(Plan([*entries, small]))] == ["l.*.w x 2", "small", "l.2.w"]


# --- pictures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["fsdp2", "fsdp1", "tp:layers.*.weight=1"])
def test_plan_figure(text: str) -> None:
    plan, parameters = plan_of(Mixed)
    figure = plan_figure(plan, layout=text, world=4, seed=5, parameters=parameters, max_panels=20)
    parts_of = layout(text, 4, plan, parameters)
    found = groups(plan, parts_of)
    owners, values, (held,) = (labelled(figure, label) for label in ("owners", "values", "held"))
    assert len(owners) == len(values) == len(found) >= 9
    for axes, group in zip(owners, found, strict=True):
        rows, columns = matrix_shape(group.first.shape)
        assert sum(patch.get_width() * patch.get_height() for patch in axes.patches) == rows * columns
        parts = parts_of(group.first)
        assert len(axes.patches) == len(parts)
        assert axes.get_xlim() == (0, columns) and axes.get_ylim() == (rows, 0)
        assert axes.get_ylabel() == ("dim 0" if group.first.shape else "scalar")
        alone = [part for part in parts if len(part.ranks) == 1]
        colours = {part.ranks[0]: patch.get_facecolor() for part, patch in zip(parts, axes.patches, strict=True)}
        for part in alone:  # the bars below are the key to the colours
            assert colours[part.ranks[0]] == held.patches[part.ranks[0]].get_facecolor()
        assert group.label in texts(figure)
    by_label = {group.label: axes for group, axes in zip(found, values, strict=True)}
    assert not by_label["nothing"].axison and by_label["nothing"].texts[0].get_text() == "no values: nothing wrote it"
    assert not by_label["scalar"].axison and by_label["scalar"].texts[0].get_text() == "no random numbers"
    (curve,) = by_label["layers.*.weight x 3"].lines if "layers.*.weight x 3" in by_label else by_label["narrow"].lines
    assert curve.get_ydata().max() > 0 and by_label["narrow"].get_ylabel() == "density per unit"
    assert (
        by_label["orthogonal"].get_xlabel() == "value (intended density not known)" and not by_label["orthogonal"].lines
    )
    assert [bar.get_height() for bar in by_label["coins"].patches] == pytest.approx([0.75, 0.25], abs=0.12)
    assert [list(line.get_ydata()) for line in by_label["coins"].lines] == [[0.75] * 2, [0.25] * 2]
    assert [text.get_text().split(":")[0] for text in by_label["padded.weight"].texts] == ["at 0"]
    assert "intended 2.00%" in by_label["padded.weight"].texts[0].get_text()
    sizes = bytes_by_rank(plan, parts_of, 4)
    assert [bar.get_height() * 1024 for bar in held.patches] == pytest.approx(sizes)
    assert (held.get_xlabel(), held.get_ylabel()) == ("rank", "KiB")


def test_histogram_has_the_area_of_its_elements() -> None:
    plan, parameters = plan_of(Mixed)
    figure = plan_figure(plan, parameters=parameters, max_panels=20)
    for axes, group in zip(labelled(figure, "values"), groups(plan), strict=True):
        stairs = [patch for patch in axes.patches if hasattr(patch, "get_data")]
        if not stairs:
            continue
        heights, edges, _ = stairs[0].get_data()
        zeros = 0.02 if group.label == "padded.weight" else 0
        assert (heights * np.diff(edges)).sum() == pytest.approx(1 - zeros)
        for line in axes.lines[-1:] if group.num_elements > 300 else []:
            inside = (line.get_xdata() >= edges[0]) & (line.get_xdata() <= edges[-1])
            area = np.trapezoid(line.get_ydata()[inside], line.get_xdata()[inside])
            assert area == pytest.approx(1 - zeros, abs=0.03), group.label


def test_panels_are_limited() -> None:
    plan, parameters = plan_of(Mixed)
    figure = plan_figure(plan, parameters=parameters, max_panels=2)
    assert len(labelled(figure, "owners")) == 2
    assert any(text.endswith(f"; 2 of {len(groups(plan))} groups of tensors drawn") for text in texts(figure))
    with pytest.raises(ValueError, match="max_panels must be at least 1, got 0"):
        plan_figure(plan, max_panels=0)


def report(today: Row | None) -> Report:
    rows = [Row("ddp", "init_model_", 1000, 0, 0, 0.25, 10), Row("fsdp2", "init_model_", 1000, 30, 2, 0.5, 10)]
    return Report("package:model", 500, 2, 7, rows, ValueChecks(), today)


def test_report_figure() -> None:
    figure = report_figure(report(Row(TODAY, "init_weights", 1000, 920, None, 0.75, None)))
    share, seconds, collectives = figure.axes
    assert [label.get_text() for label in share.get_yticklabels()] == ["ddp", "fsdp2", f"{TODAY} (peer)"]
    assert [bar.get_width() for bar in share.patches] == [0, 3, 92]
    assert [text.get_text() for text in share.texts] == ["0", "30", "920"]
    assert [bar.get_width() for bar in seconds.patches] == [0.25, 0.5, 0.75]
    assert [bar.get_width() for bar in collectives.patches] == [0, 2, 0]
    assert [text.get_text() for text in collectives.texts] == ["0", "2", "not counted"]
    assert share.get_xlabel() == "share of the elements compared, %"
    assert seconds.get_xlabel() == "seconds, slowest rank" and collectives.get_xlabel() == "number, highest rank"
    colours = [bar.get_facecolor() for bar in share.patches]
    assert colours[0] == colours[1] != colours[2]
    assert texts(figure) == [
        "package:model",
        "500 parameters, 2 gloo processes with different torch seeds, seed 7: FAILED",
    ]


def test_report_figure_without_a_peer_or_one_that_did_not_run() -> None:
    figure = report_figure(report(None))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["ddp", "fsdp2"]
    figure = report_figure(report(Row(TODAY, "init_weights", 0, 0, None, 0.0, None, ["RuntimeError: no"])))
    assert figure.axes[0].texts[-1].get_text() == "did not run"


# --- commands ----------------------------------------------------------------------------------------------------


def assert_picture(path: Path, width: int, least_height: int) -> None:
    """Right size, and much of it neither blank nor all ink."""
    pixels = imread(path)
    assert pixels.shape[1] == width and pixels.shape[0] >= least_height
    ink = (pixels[..., :3].min(axis=2) < 0.9).mean()
    assert 0.02 < ink < 0.7, ink


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        status = main(["explain", "--model", "torch_shardinit.demo_model:tiny", *arguments])
    except SystemExit as exit:
        status = int(exit.code or 0)
    return status, capsys.readouterr().err


def test_explain_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    options = ("--layout", "fsdp1", "--world", "3", "--seed", "-1", "--panels", "4")
    assert explain(capsys, "--plot", str(file), *options) == (0, "")
    assert_picture(file, 1380, 500)
    drawing = tmp_path / "plan.svg"
    assert explain(capsys, "--plot", str(drawing))[0] == 0
    assert "<svg" in drawing.read_text()[:2000]


def test_verify_plot(tmp_path: Path) -> None:
    file = tmp_path / "report.png"
    result = run("verify", "--model", "torch_shardinit.demo_model:tiny", "--nproc", "2", "--layouts", "ddp,fsdp2",
                 "--plot", str(file))  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert_picture(file, 1200, 250)


def test_error_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(tmp_path / "plan.png")
    for arguments, message in (
        (("--plot", file, "--layout", "fsdp3"), "--layout must be ddp,"),
        (("--plot", file, "--world", "0"), "--world must be in [1, 1024], got 0"),
        (("--plot", file, "--panels", "0"), "--panels must be at least 1, got 0"),
        (("--plot", file, "--seed", str(2**64)), "--seed must be in [-2^63, 2^64)"),
        (("--plot", str(tmp_path / "no" / "plan.png")), "--plot must lie in a directory that is there, got"),
        (("--plot", str(tmp_path / "plan.txt")), "--plot must end in one of ."),
        (("--world", "4"), "--layout, --world, --seed and --panels must come with --plot, got none"),
    ):
        status, error = explain(capsys, *arguments)
        assert status == 2 and message in error, arguments
    status, error = explain(capsys, "--plot", file, "--layout", "tp:*norm.weight=1")
    assert status == 1 and error.startswith("explain: --layout: *norm.weight=1 must name a dimension of ")
    assert list(tmp_path.iterdir()) == []


def test_error_without_matplotlib(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)  # as import has it where there is no such module
    missing = "pictures need matplotlib, which is missing: pip install torch_shardinit[plot]\n"
    assert explain(capsys, "--plot", str(tmp_path / "plan.png")) == (1, f"explain: {missing}")
    assert main(["verify", "--plot", str(tmp_path / "plan.png")]) == 1
    assert capsys.readouterr().err == f"verify: {missing}"
    assert explain(capsys) == (0, "")  # nothing else needs it
