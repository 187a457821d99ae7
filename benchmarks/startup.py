"""Seconds from starting Python to the first optimizer step, cold and warm: `python -m benchmarks.startup`.

Cold: an empty compile cache. Warm: the same command again. Also `import jaxtrain` and `jaxtrain.run --help`. Wall time
and processor time, as a busy machine stretches the former only.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time

from benchmarks import parser, save

FIRST_STEP = """
import os, sys, time, resource
from jaxtrain import config_io
from jaxtrain.train.trainer import Trainer
task, config = config_io.load(sys.argv[1], [f"run.dir={sys.argv[2]}/run", *sys.argv[3:]])
import jax
trainer = Trainer(config=config, task=task)
batch = next(trainer.train_loader.batches([(0, 1)]))[2]
step = trainer.program.train_step()
hyper, columns = trainer.program.hyper(), trainer.program.columns(trainer.train_loader)
jax.block_until_ready(step(trainer.state, batch, hyper, columns))
usage = resource.getrusage(resource.RUSAGE_SELF)
wall = time.time() - float(os.environ["STARTED"])
count = trainer.program.compile_count
print(wall, usage.ru_utime + usage.ru_stime, count.requests, count.hits)
"""


def first_step(config: str, cache: str, overrides: list[str]) -> dict[str, float]:
    environ = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache, "STARTED": str(time.time())}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", FIRST_STEP, config, folder, *overrides]
        output = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    wall, processor, programs, hits = (float(word) for word in output.split()[-4:])
    return {"wall_s": wall, "processor_s": processor, "programs": programs, "hits": hits}


def command_seconds(*arguments: str) -> dict[str, float]:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": wall, "processor_s": processor}


def measure(config: str, overrides: list[str], repeats: int = 3) -> dict[str, dict[str, float]]:
    best = lambda results: min(results, key=lambda result: result["processor_s"])
    with tempfile.TemporaryDirectory() as cache:
        cold = first_step(config, cache, overrides)
        warm = best([first_step(config, cache, overrides) for _ in range(repeats)])
    return {
        "cold start": cold,
        "warm start": warm,
        "import jaxtrain": best([command_seconds("-c", "import jaxtrain") for _ in range(repeats)]),
        "jaxtrain.run --help": best([command_seconds("-m", "jaxtrain.run", "--help") for _ in range(repeats)]),
    }


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--config", default="configs/digits.yaml")
    p.add_argument("overrides", nargs="*", default=["shard.devices=1"])
    arguments = p.parse_args()
    found = measure(arguments.config, arguments.overrides)
    for name, values in found.items():
        print(f"{name:<22}" + "  ".join(f"{key} {value:.2f}" for key, value in values.items()))
    for clock in ("wall_s", "processor_s"):
        print(f"warm / cold, {clock}: {found['warm start'][clock] / found['cold start'][clock]:.2f}")
    save(found, arguments.json)


if __name__ == "__main__":
    main()
