"""Short runs of the digits network in processes of their own, to be killed, and what is left of them compared."""

import argparse
import json
import pathlib
import random
import signal
import time
import warnings
from collections.abc import Callable

import numpy as np
import orbax.checkpoint as ocp

from tests.processes import ROOT, Process

CONFIG = ROOT / "configs/digits_tiny.yaml"
PREEMPTED = 75
SHORT = (
    "tracking.tensorboard=false",
    "data.source=numpy",
    "train.steps=60",
    "train.log_every_steps=5",
    "evaluation.every_steps=12",
    "checkpoint.every_steps=5",
)


def attempts(description: str, what: str, count: int) -> argparse.ArgumentParser:
    """Of a script that tries one thing so often, each time by chance: --<what>, --seed."""
    p = argparse.ArgumentParser(description=description.splitlines()[0])
    p.add_argument(f"--{what}", type=int, default=count)
    p.add_argument("--seed", type=int, default=0)
    return p


def start(
    folder: pathlib.Path,
    *overrides: str,
    cache: pathlib.Path | None = None,
    prefix: tuple[str, ...] = (),
    **environment: str,
) -> Process:
    """Start a run on one device; its output goes to <folder>.log. prefix: a command that starts the interpreter."""
    own = {"OMP_NUM_THREADS": "1", **environment}
    if cache is not None:
        own["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    arguments = ["jaxtrain.run", "--config", str(CONFIG), f"run.dir={folder}", *overrides]
    return Process(arguments, own, log_of(folder), prefix=prefix)


def log_of(folder: pathlib.Path) -> pathlib.Path:
    return folder.with_name(folder.name + ".log")


def to_the_end(folder: pathlib.Path, *overrides: str, limit_s: float = 600, **options) -> int:
    """Run until it ends by itself; its exit code."""
    return start(folder, *overrides, **options).wait(limit_s)


def wait_for(ready: Callable[[], bool], process: Process, limit_s: float = 300, every_s: float = 0.002) -> bool:
    """Whether `ready` came true while the process lived."""
    deadline = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < deadline:
        if ready():
            return True
        time.sleep(every_s)
    return False


def phases(folder: pathlib.Path, chance: random.Random) -> dict[str, Callable[[], bool]]:
    """Moments of a running process, seen from outside; each is to happen anew."""
    log, metrics = log_of(folder), folder / "metrics.jsonl"
    said, written = _size(log), _size(metrics)
    evaluated, due = _evaluations(metrics), chance.randint(1, 3)
    return {
        "start": lambda: True,
        "compile": lambda: b" steps of " in _new(log, said),
        "step": lambda: _size(metrics) > written,
        "evaluation": lambda: _evaluations(metrics) >= evaluated + due,
        "commit": lambda: any((folder / "checkpoints").glob("*.part")),
    }


def kill(process: Process, number: int = signal.SIGKILL) -> bool:
    """Whether the process was still there to be killed."""
    if process.poll() is not None:
        return False
    process.send_signal(number)
    return True


def final_state(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Every array of the last checkpoint: weights, moments, step, random key."""
    warnings.filterwarnings("ignore", message="Sharding info not provided")
    steps = sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())
    tree = ocp.PyTreeCheckpointer().restore(folder / "checkpoints" / str(steps[-1]) / "state")
    return dict(_leaves(tree))


def same_state(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    """Bit for bit."""
    same = lambda a, b: a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)


def points(folder: pathlib.Path) -> list[tuple]:
    """Logged points but for what measures time."""
    timed = ("samples_per_s", "input_stall_ratio")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["step"], line["split"], {k: v for k, v in line["values"].items() if k not in timed and "/" not in k})
        for line in lines
    ]


def _leaves(tree, prefix: str = ""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", np.asarray(value)


def _size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _new(path: pathlib.Path, begin: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(begin)
        return file.read()


def _evaluations(path: pathlib.Path) -> int:
    return _new(path, 0).count(b'"validation"')
