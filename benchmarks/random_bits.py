"""Dropout on a CPU, with jax's loop of random bits and with ours: `python -m benchmarks.random_bits`.

Milliseconds of `where(bernoulli(key, 0.9, x.shape), x / 0.9, 0)` over float32 vectors, and the seconds that 40 draws of
different shapes take to compile. Each round asks two processes in turns, one with each lowering of the generator.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

from benchmarks import parser, save
from jaxtrain.runtime import threefry

SIZES = (1_000, 100_000, 4_000_000)
LOWERINGS = ("loop", "straight")


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--lowering", choices=LOWERINGS, help=argparse.SUPPRESS)
    arguments = p.parse_args()
    if arguments.lowering:
        if arguments.lowering == "straight":
            threefry.install()
        print(json.dumps(measure()))
        return
    rounds = {name: [] for name in LOWERINGS}
    for number in range(arguments.rounds):
        for name in LOWERINGS[:: 1 if number % 2 else -1]:
            command = [sys.executable, "-m", "benchmarks.random_bits", "--lowering", name]
            rounds[name].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    found = {}
    for what in rounds["loop"][0]:
        loop, straight = ([figures[what] for figures in rounds[name]] for name in LOWERINGS)
        ratios = [a / b for a, b in zip(loop, straight, strict=True)]
        found[what] = {"loop": loop, "straight": straight, "ratio": ratios}
        medians = [statistics.median(values) for values in (loop, straight, ratios)]
        print(
            f"{what:24s} loop {medians[0]:8.3f}  straight {medians[1]:8.3f}  "
            f"ratio {medians[2]:.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
        )
    save(found, arguments.json)


def measure() -> dict[str, float]:
    """In this process, with the lowering that it has."""
    key, found = jax.random.key(0), {}
    for size in SIZES:
        x, drop = jnp.ones(size), jax.jit(lambda k, x: jnp.where(jax.random.bernoulli(k, 0.9, x.shape), x / 0.9, 0))
        drop(key, x).block_until_ready()
        found[f"{size} numbers, ms"] = 1e3 * statistics.median(_seconds(lambda: drop(key, x)) for _ in range(21))
    draws = lambda key: [jax.random.uniform(jax.random.fold_in(key, i), (3 + i, 7)) for i in range(40)]
    lowered = jax.jit(draws).lower(key)
    found["compiling 40 draws, s"] = _seconds(lambda: lowered.compile())
    return found


def _seconds(work) -> float:
    started = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
