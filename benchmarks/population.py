"""Trials per hour of a population against the same trials as runs of their own, and as trials one by one.

    python -m benchmarks.population [--config configs/splat_tiny.yaml] [--members 16] [--json F]

A run of its own is a process, as `jaxtrain.run` starts it; one of them is timed with a filled compilation cache and
taken times the members. Trials one by one share a process, the data and the compiled step, which the run of its own
has left in the cache. Seconds are CPU seconds of
all threads, which other load on the machine hardly changes, and wall seconds.
"""

import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

from benchmarks import parser, save

SPACE = """
study: {{trials: {members}, sampler: {{name: random}}, pruner: {{name: none}}}}
optim.lr: {{type: loguniform, low: 1.0e-3, high: 1.0e-2}}
optim.weight_decay: {{type: loguniform, low: 1.0e-4, high: 1.0e-1}}
"""


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--config", default="configs/splat_tiny.yaml")
    p.add_argument("--members", type=int, default=16)
    arguments = p.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{name}/cache"
        result = compare(arguments.config, arguments.members, pathlib.Path(name))
    print(json.dumps(result, indent=1))
    save(result, arguments.json)


def compare(config: str, members: int, folder: pathlib.Path) -> dict:
    space = folder / "space.yaml"
    space.write_text(SPACE.format(members=members))
    run = ["jaxtrain.run", "--config", config, "run.quiet=true", "tracking.tensorboard=false"]
    tune = ["jaxtrain.tune", "--config", config, "--space", str(space), "--no-plots", "shard.devices=1"]
    timed([*run, f"run.dir={folder / 'warm'}"])
    alone = timed([*run, f"run.dir={folder / 'alone'}"])
    together = timed([*tune, "--output", str(folder / "together"), "--vmap", str(members)])
    again = timed([*tune, "--output", str(folder / "again"), "--vmap", str(members)])
    in_turn = timed([*tune, "--output", str(folder / "in_turn")])
    per_hour = lambda seconds, trials: round(3600 * trials / seconds, 1)
    return {
        "config": config,
        "members": members,
        "seconds": {  # [CPU, wall]
            "one run": alone,
            "population, cold cache": together,
            "population, filled cache": again,
            "trials one by one, filled cache": in_turn,
        },
        "trials per CPU hour": {
            "runs": per_hour(alone[0], 1),
            "population, cold cache": per_hour(together[0], members),
            "population, filled cache": per_hour(again[0], members),
            "trials one by one, filled cache": per_hour(in_turn[0], members),
        },
        "ratio to runs": round(members * alone[0] / together[0], 2),
        "ratio to runs, filled cache": round(members * alone[0] / again[0], 2),
        "ratio to runs by the clock": round(members * alone[1] / together[1], 2),
    }


def timed(arguments: list[str]) -> tuple[float, float]:
    """CPU and wall seconds of `python -m ...`."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return round(cpu, 2), round(time.perf_counter() - began, 2)


if __name__ == "__main__":
    main()
