"""Every benchmark, one after the other, then the pictures: what `make bench` runs.

    python bench/all.py [--out docs/measurements] [--quick] [--only NAME,...]

Each prints its table, which also goes to OUT/NAME.txt, and writes OUT/NAME.json; the pictures, where matplotlib is
installed, are OUT/*.png. Figures want a machine that does nothing else: the load before each is printed. --quick takes
small sizes, to see that all of it works.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# By name: the options of a --quick run.
BENCHMARKS: dict[str, list[str]] = {
    "fill": ["--quick"],
    "boxes": ["--log2n", "16", "--seconds", "0.02"],
    "digest": ["--log2n", "20", "--seconds", "0.1"],
    "small": ["--tensors", "200", "--repeats", "2"],
    "record": ["--shapes", "8b"],
    "scale": ["--quick", "--shapes", "8b"],
    "broadcast": ["--quick"],
}
LIMIT = 400.0  # seconds for one of them


def run(name: str, folder: Path, quick: bool) -> bool:
    """Runs one; its output goes to the terminal and to a file."""
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(folder / f"{name}.json")]
    command += BENCHMARKS[name] if quick else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"\n{name}{load}", flush=True)
    started = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        with open(folder / f"{name}.txt", "w") as file:
            for line in process.stdout:
                print(line, end="", flush=True)
                file.write(line)
        status = process.wait(max(1.0, LIMIT - (time.monotonic() - started)))
    except subprocess.TimeoutExpired:
        status = -1
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    print(f"({name}: {time.monotonic() - started:.0f} s{'' if status == 0 else f', failed: exit status {status}'})")
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(HERE.parent / "docs" / "measurements"), metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works, not to measure")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="(default: %(default)s)")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"--only must be among {', '.join(BENCHMARKS)}, got {', '.join(unknown)}")
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    done = [name for name in names if run(name, folder, options.quick)]
    failed = [name for name in names if name not in done]
    if importlib.util.find_spec("matplotlib") is None:
        print("no pictures: pip install torch_shardinit[plot] for matplotlib")
    elif done:
        command = [sys.executable, str(HERE / "plots.py"), str(folder), *done]
        if subprocess.run(command, env={**os.environ, "PYTHONPATH": str(HERE.parent)}).returncode:
            failed.append("the pictures")
    print(f"all: {time.monotonic() - started:.0f} s{', failed: ' + ', '.join(failed) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
