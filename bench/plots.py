"""The pictures of the measurements: DIR/*.json, which the benchmarks wrote, to DIR/*.png.

    python bench/plots.py DIR [BENCHMARK ...]

Without names: of all benchmarks. One whose JSON is missing has no picture. Needs matplotlib
(pip install torch_shardinit[plot]).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_shardinit.plot import OURS, PEER, new_figure

OTHER, FOURTH, GREY = "#e9a03b", "#7a5195", "#666666"
WHO = {"ours": ("torch_shardinit", OURS), "torch": ("torch", PEER), "numpy": ("NumPy Philox", OTHER)}
WHO["jax"] = ("JAX threefry", FOURTH)
Results = list[dict[str, Any]]


def _finish(axes: Any, title: str, xlabel: str, ylabel: str, *, legend: bool = True) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="both", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    if legend:
        axes.legend(fontsize=8, frameon=False)


def _machine(figure: Any, data: dict[str, Any], more: str = "") -> None:
    info = data["machine"]
    text = f"{info['processor']}, {info['cpus']} CPUs, {info['isa']}, torch {info['torch']}, {info['date']}{more}"
    figure.text(0.995, 0.005, text, ha="right", va="bottom", fontsize=6.5, color=GREY)


def draw_fill(data: dict[str, Any]) -> Any:
    """Bars: each distribution at the largest size, one thread, fp32 and bf16."""
    figure = new_figure(9.5, 4.2)
    for number, dtype in enumerate(("fp32", "bf16")):
        axes = figure.add_subplot(1, 2, number + 1)
        ones = [one for one in data["results"] if one["dtype"] == dtype and one["threads"] == 1]
        measured = [one["log2n"] for one in ones if one.get("jax")] or [one["log2n"] for one in ones]
        ones = [one for one in ones if one["log2n"] == max(measured)]
        for position, one in enumerate(ones):
            for place, (key, (label, color)) in enumerate(WHO.items()):
                if not one.get(key):
                    continue
                rate, where = one[key] / 1e9, position + (place - 1.5) * 0.2
                axes.bar(where, rate, 0.19, color=color, label=label)
                if key != "ours":
                    ratio = f" {one['ours'] / one[key]:.0f}x"
                    axes.text(where, rate, ratio, rotation=90, ha="center", va="bottom", fontsize=8)
        axes.set_xticks(range(len(ones)), [f"{one['distribution']}_" for one in ones])
        handles, labels = axes.get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
        axes.legend(named.values(), named.keys(), fontsize=8, frameon=False)
        title = f"{dtype}, 2^{ones[0]['log2n']} elements, 1 thread; numbers: ours over theirs"
        _finish(axes, title, "distribution", "speed, 10^9 elements a second", legend=False)
        axes.grid(False, axis="x")
    _machine(figure, data)
    return figure


def draw_fill_sizes(data: dict[str, Any]) -> Any:
    """Speed by size: normal_ and uniform_ in fp32, ours and peers, and the write bound."""
    figure = new_figure(9.5, 4.6)
    threads = sorted({one["threads"] for one in data["results"]})
    for number, distribution in enumerate(("normal", "uniform")):
        axes = figure.add_subplot(1, 2, number + 1)
        ones = [one for one in data["results"] if (one["distribution"], one["dtype"]) == (distribution, "fp32")]
        for count in threads:
            of_count = [one for one in ones if one["threads"] == count]
            style = "-" if count == 1 else "--"
            plural = "thread" if count == 1 else "threads"
            for key, (label, color) in {"fill_": ("torch fill_ (zeros)", GREY), **WHO}.items():
                points = [
                    (2 ** one["log2n"], one[key] / 1e9)
                    for one in of_count
                    if one.get(key) and one["log2n"] <= one.get(f"{key}_log2n", one["log2n"])
                ]
                if points:
                    name = f"{label}, {count} {plural}"
                    axes.plot(*zip(*points, strict=True), style, color=color, marker="o", markersize=3, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _finish(axes, f"{distribution}_, fp32", "elements", "speed, 10^9 elements a second", legend=False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, fontsize=7, frameon=False, bbox_to_anchor=(0.5, 0.03))
    figure.subplots_adjust(bottom=0.26, top=0.92, left=0.07, right=0.98, wspace=0.2)
    _machine(figure, data)
    return figure


_METHODS = ["ours", "rank 0, broadcast", "full init, slice", "seed checkpoint"]


def draw_broadcast(data: dict[str, Any]) -> Any:
    """Seconds and rank 0's memory of each method at the largest world and model; grey: wrapping alone."""
    results: Results = data["results"]
    model = max(results, key=lambda one: one["num_parameters"] * one["world"])["model"]
    world = max(one["world"] for one in results if one["model"] == model)
    chosen = [one for one in results if (one["model"], one["world"]) == (model, world)]
    wrapping = {one["layout"]: one for one in chosen if one["method"] == "wrapping alone"}
    ones = [one for one in chosen if one["method"] in _METHODS]
    figure = new_figure(9.5, 4.4)
    names = [f"{one['layout']}: {one['method']}" for one in ones]
    colors = [OURS if one["method"] == "ours" else PEER for one in ones]
    places = range(len(ones), 0, -1)
    seconds, memory = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    seconds.barh(places, [one["seconds"] for one in ones], color=colors)
    for label, color in (("torch_shardinit", OURS), ("torch", PEER)):
        seconds.barh([0], [0], color=color, label=label)
    wrap = [min(wrapping[one["layout"]]["seconds"], one["seconds"]) for one in ones]
    seconds.barh(places, wrap, 0.35, color="#bbbbbb", label="wrapping alone")
    for place, one in zip(places, ones, strict=True):
        sent = f"{one['sent_bytes'] / 1e6:,.0f} MB sent" + (
            f", {one['disk_bytes'] / 1e6:,.0f} MB saved" if one["disk_bytes"] else ""
        )
        seconds.text(one["seconds"], place, f" {one['seconds']:.2f} s, {sent}", va="center", fontsize=7)
    seconds.set_yticks(places, names, fontsize=8)
    seconds.set_ylim(0.4, len(ones) + 0.6)
    seconds.set_xlim(0, 1.75 * max(one["seconds"] for one in ones))
    parameters = max(one["num_parameters"] for one in chosen) / 1e6
    title = f"{parameters:,.0f} M parameters, {world} {chosen[0]['backend']} ranks"
    _finish(seconds, title, "seconds from nothing to a sharded, initialised model", "layout: method")
    peaks = [(one["peak_bytes"] or 0) / 2**20 for one in ones]
    memory.barh(places, peaks, color=colors)
    for place, peak in zip(places, peaks, strict=True):
        memory.text(peak, place, f" {peak:,.0f}", va="center", fontsize=7)
    memory.set_yticks(places, [""] * len(ones))
    memory.set_ylim(0.4, len(ones) + 0.6)
    memory.set_xlim(0, 1.2 * max(peaks))
    _finish(memory, "memory of rank 0, its shard included", "peak resident memory, MiB", "", legend=False)
    for axes in (seconds, memory):
        axes.grid(False, axis="y")
    _machine(figure, data)
    return figure


def draw_scale(data: dict[str, Any]) -> Any:
    """Cost of one rank by world size."""
    results = [one for one in data["results"] if "skipped" not in one]
    shape = results[0]["shape"]
    figure = new_figure(9.5, 4.2)
    layouts = list(dict.fromkeys(one["layout"] for one in results))
    for number, layout in enumerate(layouts):
        axes = figure.add_subplot(1, len(layouts), number + 1)
        ones = [one for one in results if (one["shape"], one["layout"]) == (shape, layout)]
        lines = {
            "first_seconds": ("locate and fill, new memory", OURS),
            "again_seconds": ("locate and fill, again", PEER),
            "locate_seconds": ("of which locate", OTHER),
        }
        whole = [one for one in ones if one["num_layers"] == one["all_layers"]]
        part = [one for one in ones if one["num_layers"] < one["all_layers"]]
        for key, (label, color) in lines.items():
            axes.plot([one["world"] for one in whole], [one[key] for one in whole], "-o", color=color, label=label)
            axes.plot([one["world"] for one in part], [one[key] for one in part], "o", color=color, mfc="white")
        if whole:
            first = whole[0]
            ideal = [first["again_seconds"] * first["world"] / one["world"] for one in whole]
            axes.plot([one["world"] for one in whole], ideal, ":", color=GREY, label="1 / world")
        if part:
            label = f"hollow: {part[0]['num_layers']} to {part[-1]['num_layers']} of its layers, for memory"
            axes.plot([], [], "o", color=GREY, mfc="white", label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([one["world"] for one in ones], [str(one["world"]) for one in ones], fontsize=7)
        _finish(axes, f"Llama 3 {shape.upper()} shape, {layout}, fp32", "ranks in the world", "seconds of one rank")
    _machine(figure, data, f", {data['machine']['threads']} threads a rank")
    return figure


def draw_small(data: dict[str, Any]) -> Any:
    figure = new_figure(9.5, 4.4)
    for number, kind in enumerate(("batch", "call")):
        axes = figure.add_subplot(1, 2, number + 1)
        ones = [one for one in data["results"] if one["kind"] == kind]
        places = range(len(ones), 0, -1)
        colors = [PEER if one["what"].startswith("torch") else OURS for one in ones]
        axes.barh(places, [one["microseconds"] for one in ones], color=colors)
        for place, one in zip(places, ones, strict=True):
            axes.text(one["microseconds"], place, f" {one['microseconds']:.2f}", va="center", fontsize=7)
        axes.set_yticks(places, [one["what"] for one in ones], fontsize=7)
        axes.set_xlim(0, 1.15 * max(one["microseconds"] for one in ones))
        what = f"{data['tensors']:,} tensors in a batch" if kind == "batch" else "one tensor, one call"
        title = f"{what}; {data['elements']} elements, fp32"
        _finish(axes, title, "microseconds a tensor", "how it is filled" if number == 0 else "call", legend=False)
        axes.grid(False, axis="y")
    _machine(figure, data)
    return figure


def draw_record(data: dict[str, Any]) -> Any:
    figure = new_figure(6.5, 3.8)
    axes = figure.add_subplot(1, 1, 1)
    bars = {
        "meta_seconds": ("torch's meta device alone", GREY),
        "recording_seconds": ("recording()", OURS),
        "record_seconds": ("record(): tape to Plan", PEER),
        "locate_fsdp2_seconds": ("locate, FSDP2", OTHER),
        "locate_fsdp1_seconds": ("locate, FSDP1", FOURTH),
    }
    for place, (key, (label, color)) in enumerate(bars.items()):
        values = [one[key] for one in data["results"]]
        positions = [number + (place - 2) * 0.17 for number in range(len(values))]
        axes.bar(positions, values, 0.16, color=color, label=label)
    labels = [f"{one['shape'].upper()}\n{one['tensors']:,} tensors" for one in data["results"]]
    axes.set_xticks(range(len(labels)), labels)
    world = data["results"][0]["world"]
    _finish(axes, f"a Llama 3 shape, one rank of {world}", "shape", "seconds")
    axes.grid(False, axis="x")
    _machine(figure, data)
    return figure


def draw_boxes(data: dict[str, Any]) -> Any:
    figure = new_figure(6.5, 3.8)
    axes = figure.add_subplot(1, 1, 1)
    for dtype, color in (("fp32", OURS), ("bf16", PEER)):
        ones = [one for one in data["results"] if one["dtype"] == dtype and one["box"].startswith("rows of")]
        rows = [one["shape"][1] for one in ones]
        axes.plot(rows, [one["of_contiguous"] for one in ones], "-o", color=color, label=dtype)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.1)
    _finish(axes, "normal_ of a box, 1 thread", "elements in a row of the box", "speed over that of a contiguous fill")
    _machine(figure, data)
    return figure


PICTURES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "fill": ("fill", draw_fill),
    "fill_sizes": ("fill", draw_fill_sizes),
    "boxes": ("boxes", draw_boxes),
    "broadcast": ("broadcast", draw_broadcast),
    "scale": ("scale", draw_scale),
    "small": ("small", draw_small),
    "record": ("record", draw_record),
}


def draw_all(folder: Path, sources: list[str]) -> list[Path]:
    """Every picture of these benchmarks whose JSON is there; the files written."""
    written = []
    for name, (source, draw) in PICTURES.items():
        path = folder / f"{source}.json"
        if (sources and source not in sources) or not path.exists():
            continue
        figure = draw(json.loads(path.read_text()))
        if not figure.legends:
            figure.tight_layout(rect=(0, 0.02, 1, 1))
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=130)
    return written


def main() -> int:
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    for path in draw_all(Path(sys.argv[1]), sys.argv[2:]):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
