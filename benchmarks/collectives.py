"""What it costs two processes on a CPU to add their gradients: `python -m benchmarks.collectives`.

The same arrays added by XLA's CPU backend in one compiled program, and by torch over the same library (gloo), one array
after another as XLA hands them over, and joined into one as DistributedDataParallel does. Each process on its own core.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

from benchmarks import parser, save

COUNTS, SIZES = (1, 10, 50), (64, 65536)


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--rounds", type=int, default=30, help="programs timed, each once per round")
    p.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = p.parse_args()
    if arguments.rank is None:
        sys.exit(_spawn(sys.argv[1:]))
    found = measure(arguments.rounds)
    if arguments.rank == 0:
        print("arrays  numbers each  XLA ms (min to max)      torch, each ms  torch, joined ms")
        for row in found:
            spread = "{:7.2f} ({:.2f} to {:.2f})".format(*row["xla_ms"])
            each, joined = row["torch_each_ms"][0], row["torch_joined_ms"][0]
            print(f"{row['arrays']:6}  {row['numbers']:12,}  {spread:24} {each:14.2f}  {joined:16.2f}")
        save(found, arguments.json)


def _spawn(argv: list[str]) -> int:
    cores = sorted(os.sched_getaffinity(0))
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29631"}
    running = []
    for rank in (0, 1):
        core = str(cores[rank % len(cores)])
        command = ["taskset", "-c", core, sys.executable, "-m", "benchmarks.collectives", "--rank", str(rank), *argv]
        own = world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
        running.append(subprocess.Popen(command, env=os.environ | own))
    return max(process.wait() for process in running)


def measure(rounds: int) -> list[dict]:
    """Median, smallest and largest milliseconds for every number and size of arrays."""
    import jax
    import torch
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxtrain.runtime import launch

    launch.setup_distributed()
    store = torch.distributed.TCPStore("127.0.0.1", 29641, 2, jax.process_index() == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=jax.process_index(), world_size=2)
    torch.set_num_threads(1)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    add = jax.jit(lambda arrays: [array.sum(0) for array in arrays], out_shardings=whole)
    found = []
    for count in COUNTS:
        for size in SIZES:
            make = jax.jit(lambda c=count, s=size: [jax.numpy.ones((2, s)) for _ in range(c)], out_shardings=split)
            arrays, tensors = make(), [torch.ones(size) for _ in range(count)]
            joined = torch.ones(size * count)
            ways = {
                "xla_ms": lambda a=arrays: jax.block_until_ready(add(a)),
                "torch_each_ms": lambda t=tensors: [torch.distributed.all_reduce(one) for one in t],
                "torch_joined_ms": lambda j=joined: torch.distributed.all_reduce(j),
            }
            times: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(rounds + 3):
                for name, way in ways.items():
                    torch.distributed.barrier()
                    began = time.perf_counter()
                    way()
                    if turn >= 3:  # the first ones compile and connect
                        times[name].append(1e3 * (time.perf_counter() - began))
            summary = {name: (statistics.median(t), min(t), max(t)) for name, t in times.items()}
            found.append({"arrays": count, "numbers": size, **summary})
    return found


if __name__ == "__main__":
    main()
