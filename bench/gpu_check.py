"""Everything that only a GPU can show, in one run, with no network; steps end where six minutes would be over.

    python bench/gpu_check.py OUT

Builds the extension, runs the GPU tests (SHARDINIT_REQUIRE_CUDA=1), tries the square root for every input, runs
compute-sanitizer where it is installed, and measures fills beside torch's own and beside a plain fill_ (the write
bound). OUT gets gpu_check.md (the tables), gpu_check.json and gpu_check.log (what the steps printed). Exit status 1: a
step failed.

    python bench/gpu_check.py OUT --device cpu --steps bench --log2 10,12     # tries the script itself without a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS = ("build", "test", "sqrt", "bench", "sanitize")
# Seconds that a step may take, and all of them.
LIMITS = {"build": 120, "test": 120, "sqrt": 40, "memcheck": 60, "racecheck": 40, "initcheck": 40}
ALL = 350
# Of the plain fill_'s speed, or times torch's: what issue and design ask for.
TARGETS = {
    ("normal", "fp32"): ("torch", 1.3),
    ("normal", "bf16"): ("torch", 1.6),
    ("trunc_normal", "fp32"): ("torch", 10.0),
    ("uniform", "fp32"): ("fill_", 0.8),
}


class Report:
    """What is printed, and what is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.deadline = time.monotonic() + ALL
        self.lines: list[str] = []
        self.results: dict[str, Any] = {}
        self.failed: list[str] = []

    def say(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)

    def write(self) -> None:
        (self.folder / "gpu_check.md").write_text("\n".join(self.lines) + "\n")
        (self.folder / "gpu_check.json").write_text(json.dumps(self.results, indent=2) + "\n")


def run(report: Report, name: str, command: list[str], limit: float, environment: dict[str, str]) -> str | None:
    """Runs a step in processes of its own; its output goes to a log, of which the end is shown where it fails."""
    started = time.monotonic()
    limit = max(1.0, min(limit, report.deadline - started))
    try:
        pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)
        try:
            output, _ = process.communicate(timeout=limit)
            status = f"exit status {process.returncode}" if process.returncode else "ok"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            status = f"not done in {limit:.0f} s"
    except OSError as error:
        output, status = str(error), "could not be started"
    with open(report.folder / "gpu_check.log", "a") as log:
        log.write(f"$ {' '.join(command)}\n{output}\n")
    report.results[name] = {"status": status, "seconds": round(time.monotonic() - started, 1)}
    last = [line for line in output.splitlines() if line.strip()][-1:] or [""]
    report.say(f"- {name}: {status}, {time.monotonic() - started:.0f} s. {last[0].strip()[:160]}")
    if status != "ok":
        report.failed.append(name)
        print("\n".join(output.splitlines()[-30:]), flush=True)
    report.write()
    return output if status == "ok" else None


# ---- the steps that are not measurements ----------------------------------------------------------------------------


def build(report: Report, environment: dict[str, str]) -> None:
    import pybind11

    folder = ROOT / "build" / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    configure = [
        "cmake", "-S", str(ROOT), "-B", str(folder), "-GNinja", "-DSHARDINIT_CUDA=ON",
        "-DCMAKE_CUDA_ARCHITECTURES=native",
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={ROOT / 'torch_shardinit'}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DPYTHON_EXECUTABLE={sys.executable}", f"-DPython_EXECUTABLE={sys.executable}",
        f"-DPython_INCLUDE_DIR={sysconfig.get_path('include')}",
    ]  # fmt: skip
    if run(report, "configure", configure, 40, environment) is not None:
        run(report, "build", ["cmake", "--build", str(folder)], LIMITS["build"], environment)


def test(report: Report, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_cuda.py"]
    run(report, "test", command, LIMITS["test"], {**environment, "SHARDINIT_REQUIRE_CUDA": "1"})


def sqrt(report: Report, environment: dict[str, str]) -> None:
    binary = report.folder / "check_sqrt"
    command = [
        environment["CUDACXX"],
        "-std=c++17",
        "--fmad=false",
        "-O3",
        "-arch=native",
        f"-I{ROOT / 'csrc'}",
        "-o",
        str(binary),
    ]
    if run(report, "sqrt-build", [*command, str(ROOT / "bench" / "check_sqrt.cu")], 40, environment) is not None:
        run(report, "sqrt", [str(binary)], LIMITS["sqrt"], environment)
        binary.unlink()


def exercise() -> None:
    """A little of every kernel, for compute-sanitizer."""
    import torch

    import torch_shardinit as shardinit
    from torch_shardinit import native

    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64)
    draws = (
        lambda t, **k: shardinit.normal_(t, 0.5, **k),
        lambda t, **k: shardinit.uniform_(t, -0.3, 0.7, **k),
        lambda t, **k: shardinit.trunc_normal_(t, **k),
        lambda t, **k: shardinit.trunc_normal_(t, a=5.0, b=7.0, **k),
        lambda t, **k: shardinit.trunc_normal_(t, a=0.0, b=0.1, **k),
        lambda t, **k: shardinit.exponential_(t, **k),
        lambda t, **k: shardinit.log_normal_(t, **k),
        lambda t, **k: shardinit.cauchy_(t, **k),
        lambda t, **k: shardinit.geometric_(t, 0.3, **k),
        lambda t, **k: shardinit.bernoulli_(t, 0.3, **k),
        lambda t, **k: shardinit.random_(t, -5, 100, **k),
    )
    for dtype in dtypes:
        for number, draw in enumerate(draws):
            flat = torch.empty(10_007, dtype=dtype, device="cuda")
            draw(flat[3:], seed=1, tensor_id=number, offset=2**34 - 5001)
            box = torch.empty(37, 64, dtype=dtype, device="cuda")
            draw(box[:, 5:48], seed=1, tensor_id=number, offset=(3, 9), global_shape=(50, 1000))
            draw(box.t()[:41], seed=1, tensor_id=number, offset=(3, 9), global_shape=(1000, 50))
    where: dict[str, Any] = dict(seed=1, tensor_id=9, start=9)
    for dtype in (*dtypes, torch.float8_e5m2):
        flat = torch.empty(10_007, dtype=dtype, device="cuda")
        box = torch.empty(37, 64, dtype=dtype, device="cuda")[:, 5:48]
        functions = [("erfinv", ()), ("exp", ()), ("log", ()), ("neg", ()), ("sqrt", ())]
        unary = native.unary_codes([("mul", (0.5,)), ("clamp", (-0.2, 0.2)), *functions])
        native.fill([native.piece(flat[3:], "fill", (0.7,), steps=(1,), **where)], flat.device)
        native.fill([native.piece(box, "fill", (0.7,), steps=(1000, 1), **where)], flat.device)
        native.fill([native.piece(box, "normal", (1.0, 0.0), steps=(1000, 1), unary=unary, **where)], flat.device)
    for dtype in (torch.bool, torch.int16, torch.int32, torch.int64):
        shardinit.bernoulli_(torch.empty(64, 37, dtype=dtype, device="cuda").t(), seed=1, tensor_id=9)
        shardinit.random_(torch.empty(10_007, dtype=dtype, device="cuda"), 0, 2, seed=1, tensor_id=9)
    for dtype in (torch.int32, torch.int64):
        shardinit.random_bits_(torch.empty(10_007, dtype=dtype, device="cuda"), seed=1, tensor_id=99)
        shardinit.random_bits_(torch.empty(64, 37, dtype=dtype, device="cuda").t(), seed=1, tensor_id=9)
    torch.cuda.synchronize()
    print("done")


def sanitize(report: Report, environment: dict[str, str]) -> None:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        report.say("- compute-sanitizer: not installed, so nothing was checked with it")
        return
    # Each tensor an allocation of its own, or an overrun would lie inside torch's pool. Only our kernels: torch's own
    # would take minutes.
    environment = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for check in ("memcheck", "racecheck", "initcheck"):
        command = [tool, "--tool", check, "--kernel-regex", "kns=shardinit", "--error-exitcode", "9"]
        run(report, check, [*command, sys.executable, __file__, "--exercise", "-"], LIMITS[check], environment)


# ---- measurements ---------------------------------------------------------------------------------------------------


def median_seconds(call: Callable[[], object], device: str, *, repeats: int = 9, budget: float = 0.5) -> float:
    """The median of up to ``repeats`` calls after two, by device events on a GPU."""
    import torch

    call()
    call()
    seconds: list[float] = []
    while len(seconds) < repeats and (sum(seconds) < budget or len(seconds) < 3):
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(2_000_000)  # a millisecond, in which the host queues what follows
            begin.record()
            call()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1000)
        else:
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def table(report: Report, header: list[str], rows: list[list[str]]) -> None:
    report.say("| " + " | ".join(header) + " |")
    report.say("|" + "---|" * len(header))
    for row in rows:
        report.say("| " + " | ".join(row) + " |")
    report.say()


def measure_fills(report: Report, device: str, sizes: list[int]) -> None:
    import torch

    import torch_shardinit as shardinit

    pairs = {
        "normal": (lambda t: shardinit.normal_(t, 0.02, seed=1, tensor_id=1), lambda t: t.normal_(0.0, 0.02)),
        "uniform": (lambda t: shardinit.uniform_(t, -0.1, 0.1, seed=1, tensor_id=1), lambda t: t.uniform_(-0.1, 0.1)),
        "trunc_normal": (
            lambda t: shardinit.trunc_normal_(t, seed=1, tensor_id=1),
            lambda t: torch.nn.init.trunc_normal_(t),
        ),
    }
    rows, results = [], []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for log2 in sizes:
            tensor = torch.empty(2**log2, dtype=dtype, device=device)
            bound = median_seconds(lambda t=tensor: t.fill_(1.0), device)
            for draw, (ours, torchs) in pairs.items():
                mine = median_seconds(lambda t=tensor, f=ours: f(t), device)
                theirs = median_seconds(lambda t=tensor, f=torchs: f(t), device)
                results.append(
                    {"draw": draw, "dtype": name, "log2": log2, "ours": mine, "torch": theirs, "fill_": bound}
                )
                rates = [f"{tensor.numel() / seconds / 1e9:.1f}" for seconds in (mine, theirs, bound)]
                rows.append([draw, name, f"2^{log2}", *rates, f"{theirs / mine:.2f}", f"{bound / mine:.2f}"])
            del tensor
    report.results["fills"] = results
    header = ["draw", "dtype", "elements", "ours, G/s", "torch, G/s", "fill_, G/s", "ours / torch", "ours / fill_"]
    report.say("\n## Fills\n")
    table(report, header, rows)
    rows = []
    for (draw, dtype), (peer, target) in TARGETS.items():
        best = max(one[peer] / one["ours"] for one in results if (one["draw"], one["dtype"]) == (draw, dtype))
        largest = [one[peer] / one["ours"] for one in results if (one["draw"], one["dtype"]) == (draw, dtype)][-1]
        rows.append([f"{draw} {dtype} / {peer}", f"{target}", f"{largest:.2f}", f"{best:.2f}"])
    report.say("\n## Ratios to reach\n")
    table(report, ["ratio", "to reach", "at the largest size", "best of all sizes"], rows)


def shapes_of_7b(world: int) -> list[tuple[int, ...]]:
    """One rank's shards of a Llama-7B shape under FSDP2 (dimension 0)."""
    hidden, inner, vocabulary, layers = 4096, 11008, 32000, 32
    layer = [*[(hidden, hidden)] * 4, (inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,)]
    whole = [(vocabulary, hidden), *layer * layers, (hidden,), (vocabulary, hidden)]
    return [(-(-shape[0] // world), *shape[1:]) for shape in whole]


def measure_batches(report: Report, device: str, worlds: list[int]) -> None:
    import torch

    from torch_shardinit import native

    rows, results = [], []
    for world in worlds:
        tensors = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes_of_7b(world)]
        steps = [tensor.stride() for tensor in tensors]

        def ours(tensors: list[Any] = tensors, steps: list[Any] = steps) -> None:
            pieces = [
                native.piece(tensor, "normal", (0.02, 0.0), seed=1, tensor_id=number, start=0, steps=step)
                for number, (tensor, step) in enumerate(zip(tensors, steps, strict=True))
            ]
            native.fill(pieces, tensors[0].device)

        def torchs(tensors: list[Any] = tensors) -> None:
            for tensor in tensors:
                tensor.normal_(0.0, 0.02)

        def bound(tensors: list[Any] = tensors) -> None:
            for tensor in tensors:
                tensor.fill_(0.0)

        ours()
        started = time.perf_counter()
        ours()
        queued = time.perf_counter() - started
        seconds = [median_seconds(call, device, repeats=5) for call in (ours, torchs, bound)]
        numel = sum(tensor.numel() for tensor in tensors)
        results.append(
            {"world": world, "tensors": len(tensors), "elements": numel, "seconds": seconds, "queued": queued}
        )
        rows.append([str(world), f"{len(tensors)}", f"{numel / 1e6:.0f}", *(f"{1e3 * one:.2f}" for one in seconds)])
    report.results["batches"] = results
    report.say("\n## One rank's shard of a 7B shape, bf16, in one batch\n")
    table(report, ["world", "tensors", "M elements", "ours, ms", "torch normal_, ms", "fill_, ms"], rows)


def _broadcast_rank(rank: int, world: int, log2: int, results: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    tensor = torch.empty(2**log2, device="cuda")
    seconds = median_seconds(lambda: dist.broadcast(tensor, 0), "cuda")
    if rank == 0:
        results["seconds"] = seconds
    dist.destroy_process_group()


def measure_broadcast(report: Report, log2: int) -> None:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    report.say("\n## NCCL broadcast of the same bytes\n")
    if count < 2:
        report.say(f"Not measured: needs several GPUs, there {'is 1' if count == 1 else 'are none'}.\n")
        return
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_broadcast_rank, (count, log2, results), nprocs=count)
        report.results["broadcast"] = {"ranks": count, "log2": log2, "seconds": results["seconds"]}
        report.say(f"2^{log2} fp32 to {count} ranks: {1e3 * results['seconds']:.2f} ms\n")


def measure(report: Report, device: str, sizes: list[int]) -> None:
    import torch

    report.say()
    describe(report, device)
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
        sizes = [log2 for log2 in sizes if 2**log2 * 4 < 0.8 * free]
    measure_fills(report, device, sizes)
    measure_batches(report, device, [8, 64] if device == "cuda" else [1024])
    measure_broadcast(report, min(28, sizes[-1]))


def describe(report: Report, device: str) -> None:
    import torch

    import torch_shardinit

    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    info = torch_shardinit.build_info()
    report.results["device"], report.results["build"] = name, info
    report.results["date"] = time.strftime("%Y-%m-%d")
    versions = f"torch {torch.__version__} (CUDA {torch.version.cuda}), kernels built by nvcc {info['cuda']}"
    report.say(f"{report.results['date']}, {name}, {versions}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", help="folder for the tables and logs")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", default=",".join(STEPS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--log2", default="20,22,24,26,28,30,31", help="sizes to measure (default: %(default)s)")
    parser.add_argument("--exercise", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.exercise:
        exercise()
        return 0
    chosen = options.steps.split(",")
    if unknown := sorted(set(chosen) - set(STEPS)):
        parser.error(f"--steps must be among {', '.join(STEPS)}, got {', '.join(unknown)}")
    sizes = [int(size) for size in options.log2.split(",")]
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu_check: torch must see a GPU; it sees none (--help tells how to try it without)",
            file=sys.stderr,
        )
        return 1
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(folder)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    environment.setdefault("CUDACXX", shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    report.say("# GPU check\n")
    try:
        steps: dict[str, Callable[[], None]] = {
            "build": lambda: build(report, environment),
            "test": lambda: test(report, environment),
            "sqrt": lambda: sqrt(report, environment),
            "bench": lambda: measure(report, options.device, sizes),
            "sanitize": lambda: sanitize(report, environment),
        }
        for name, step in steps.items():
            if name in chosen and not {"configure", "build"} & set(report.failed):
                step()
    finally:
        report.results["failed"] = report.failed
        report.say(f"failed: {', '.join(report.failed)}" if report.failed else "every step passed")
        report.write()
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
