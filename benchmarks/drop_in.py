"""Run examples/drop_in under the original libraries and under jaxtrain: `python -m benchmarks.drop_in`.

Compares loss curves, metrics, lists of files and the random generators' states after every step, and measures the
median second between two steps. Each run is a process of its own, one after another, with a compilation cache that
begins empty, and waits for its programs: every step but the first is XLA's. `--write` writes a result file and
docs/benchmarks.md.

`--totals 3` measures seconds from a process's start to its end instead, median of three: the original library, here,
and here with JAXTRAIN_WAIT=1.
"""

import datetime
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks import page, parser

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples/drop_in"
TOLERANCE = 1e-4  # relative, of every loss and metric


def scripts() -> list[str]:
    """The names of the examples, each `<library>_<what>`."""
    return sorted(path.stem for path in EXAMPLES.glob("*_*.py"))


def run(name: str, engine: str, folder: pathlib.Path, *more: str, wait: bool = True) -> dict[str, Any]:
    """Run an example in a process of its own; what it has written to --output. wait: for XLA, instead of computing in
    torch meanwhile.

    Raises RuntimeError with the end of its output where it fails.
    """
    output = folder / f"{name}_{engine}.json"
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--engine", engine, "--output", str(output)]
    command += ["--output_dir", str(folder / engine / name), *more]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    environment["JAXTRAIN_WAIT"] = str(int(wait))
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} --engine {engine} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return json.loads(output.read_text())


def totals(name: str, rounds: int, *more: str) -> dict[str, float]:
    """Median seconds of whole processes, in turn: of the original library, here, and here waiting for XLA."""
    library = name.partition("_")[0]
    kinds = {library: (library, False), "jaxtrain": ("jaxtrain", False), "jaxtrain that waits": ("jaxtrain", True)}
    spent: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, (engine, wait) in kinds.items():
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                run(name, engine, pathlib.Path(folder), *more, wait=wait)
                spent[kind].append(time.perf_counter() - began)
    return {kind: statistics.median(seconds) for kind, seconds in spent.items()}


def _both(name: str, engines: tuple[str, str], *more: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return [run(name, engine, pathlib.Path(folder), *more) for engine in engines]


def compare(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Distances of the two runs and their speeds.

    loss, metric: largest relative difference; infinite where one has more. files, random: whether the lists of files
    and the generators' states are equal. seconds: of a step, median, by the clock; processor time would count torch's
    threads while they spin, as if they worked. compile_s: processor seconds of our run beyond its steps, less theirs
    beyond its own.
    """
    runs = (theirs, ours)
    rest = [run["whole_processor_s"] - _median_step(run["processor"]) * len(run["processor"]) for run in runs]
    named = [sorted(x["metrics"]) for x in (theirs, ours)]
    values = [[x["metrics"][name] for name in names] for x, names in zip((theirs, ours), named, strict=True)]
    return {
        "steps": len(theirs["loss"]),
        "loss": _distance(theirs["loss"], ours["loss"]),
        "metric": _distance(*values) if named[0] == named[1] else math.inf,
        "files": theirs["files"] == ours["files"],
        "random": theirs["random"] == ours["random"],
        "seconds": [_median_step(run["seconds"]) for run in runs],
        "compile_s": rest[1] - rest[0],
    }


def _median_step(times: list[float]) -> float:
    return statistics.median(after - before for before, after in zip(times, times[1:], strict=False))


def equal(found: dict[str, Any]) -> bool:
    """Return True where curve and metrics are within the tolerance, and files and random states are the same."""
    return max(found["loss"], found["metric"]) <= TOLERANCE and found["files"] and found["random"]


def _distance(wanted: list[float], got: list[float]) -> float:
    if len(wanted) != len(got):
        return math.inf
    pairs = zip(wanted, got, strict=True)
    return max((abs(a - b) / max(abs(a), 1e-6) if a == a and b == b else math.inf for a, b in pairs), default=0.0)


def write(found: dict[str, dict[str, Any]], machine: str) -> None:
    """Write a result file of today, and the pages that show it. machine: words for the page."""
    path = page.RESULTS / f"{datetime.date.today()}_drop_in.json"
    path.write_text(json.dumps({"machine": machine, "examples": dict(sorted(found.items()))}, indent=1) + "\n")
    page.write()


def main() -> None:
    p = parser(__doc__, figures=False)
    p.add_argument("--only", nargs="+", choices=scripts(), default=scripts(), help="which examples (default: all)")
    p.add_argument("--max-steps", type=int, default=60)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where torch's models lie")
    p.add_argument("--machine", default=f"{os.cpu_count()} cores", help="words for the page")
    p.add_argument("--write", action="store_true", help="write a result file and docs/benchmarks.md")
    p.add_argument("--totals", type=int, metavar="ROUNDS", help="measure whole processes, so many times each")
    p.add_argument("--runs", help="compare what earlier runs have left there, EXAMPLE_ENGINE.json")
    p.add_argument("--json", help="write what was found to this file, and begin with what is there")
    arguments = p.parse_args()
    if arguments.totals:
        for name in arguments.only:
            found = totals(name, arguments.totals, "--max_steps", str(arguments.max_steps))
            print(f"{name}: {', '.join(f'{kind} {seconds:.1f} s' for kind, seconds in found.items())}", flush=True)
        return
    kept = pathlib.Path(arguments.json) if arguments.json else None
    found = json.loads(kept.read_text()) if kept and kept.exists() else {}
    failed = False
    for name in arguments.only:
        engines = (name.partition("_")[0], "jaxtrain")
        try:
            if arguments.runs:
                paths = [pathlib.Path(arguments.runs, f"{name}_{engine}.json") for engine in engines]
                runs = [json.loads(path.read_text()) for path in paths]
            else:
                more = ("--max_steps", str(arguments.max_steps), "--device", arguments.device)
                runs = _both(name, engines, *more)
        except (RuntimeError, FileNotFoundError) as error:
            print(error)
            failed = True
            continue
        found[name] = compare(*runs)
        failed |= not equal(found[name])
        print(f"{name}: {'equal' if equal(found[name]) else 'DIFFERS'} {found[name]}", flush=True)
        if kept:
            kept.write_text(json.dumps(found, indent=1))
    if arguments.write:
        write(found, arguments.machine)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
