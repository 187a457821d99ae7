"""The compiled step against the plain torch twin: `python -m benchmarks.compare --system hjepa --peer torch_eager`.

Both sides start from the same weights (through the bridge), see the same batches in the same precision and use the same
optimizer: AdamW with decay and clipping, fused in torch; DistributedDataParallel where there are several processes,
against `shard.strategy=ddp_local`, which computes the same.
First both train a few steps without dropout and must agree on the losses, else nothing is timed. Then they alternate,
dropout on, batches at hand; with --fed each reads its own training data: jaxtrain as `jaxtrain.run` does, torch from
the original's dataset through a DataLoader without workers. Every process gets its own share of the cores. Writes
medians, spread and the ratio; of several peers a list. Commands with the same --gate prepare beside each other and
measure alone, one after another.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import gc
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import parser, save
from benchmarks.systems import CASES, CONSTANT_RATE
from benchmarks.torch_side import BATCHES, TorchSide

PEERS = ("torch_eager", "torch_compile", "torch_ddp")
CHECKED_STEPS = 3
BEGAN = time.perf_counter()
AGREEMENT = {"fp32": 1e-4, "bf16": 2e-2}  # of the losses, relative


def main(argv=None) -> int:
    p = parser(__doc__)
    p.add_argument("--system", choices=CASES, required=True)
    p.add_argument("--size", choices=("small", "reference"), default="small")
    p.add_argument("--peer", choices=PEERS, nargs="+", default=["torch_eager"])
    p.add_argument("--precision", choices=AGREEMENT, default="fp32")
    p.add_argument("--batch", type=int, help="samples per step over all processes; the case's own if left out")
    p.add_argument("--devices", type=int, default=1, help="processes, each with one GPU or its share of the cores")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--seconds", type=float, default=3.0, help="of each side in each round, about")
    p.add_argument("--fed", action="store_true", help="reading data counts too, each side in its own way")
    p.add_argument("--gate", metavar="F", help="a file that other commands wait at too")
    p.add_argument("--trace", metavar="FOLDER", type=pathlib.Path, help="leave a profile of three steps there")
    p.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that win over the case's")
    arguments = p.parse_intermixed_args(argv)
    if arguments.fed and CASES[arguments.system][arguments.size].feed is None:
        p.error(f"--fed: {arguments.system} ({arguments.size}) names no torch DataLoader in benchmarks/systems.py")
    if arguments.devices > 1 and "RANK" not in os.environ:
        return _spawn(arguments.devices, sys.argv[1:] if argv is None else argv)
    if "torch_ddp" in arguments.peer and len(arguments.peer) > 1:
        p.error("--peer torch_ddp: compared alone, as jaxtrain trains otherwise beside it")
    results = _compare(arguments)
    if results[0]["rank"] == 0:
        print(*map(_told, results), sep="\n")
        save(results[0] if len(results) == 1 else results, arguments.json)
    return 0 if results[0]["ratio"] is not None else 1


def _spawn(processes: int, argv: list[str]) -> int:
    """The same command so many times, with the cores dealt out."""
    with tempfile.TemporaryDirectory() as folder:
        cores = sorted(os.sched_getaffinity(0))
        running = []
        for rank in range(processes):
            share = cores[rank::processes] or cores
            env = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29611, "COMPARE_STORE": f"{folder}/store"}
            env |= {"OMP_NUM_THREADS": len(share)}
            command = ["taskset", "-c", ",".join(map(str, share)), sys.executable, "-m", "benchmarks.compare", *argv]
            running.append(subprocess.Popen(command, env=os.environ | {k: str(v) for k, v in env.items()}))
        return max(process.wait() for process in running)


@contextlib.contextmanager
def _alone(gate: Any) -> Iterator[None]:
    """Wait until every other command that has opened the gate's file stands here or has ended, then hold the file."""
    if gate is not None:
        fcntl.flock(gate, fcntl.LOCK_UN)
        time.sleep(1)  # who waits for all others goes first
        fcntl.flock(gate, fcntl.LOCK_EX)
    yield
    if gate is not None:
        fcntl.flock(gate, fcntl.LOCK_UN)


def _compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    gate = open(arguments.gate, "a") if arguments.gate else None  # noqa: SIM115  held until the process ends
    if gate is not None:
        fcntl.flock(gate, fcntl.LOCK_SH)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # both sides share a GPU's memory
    import jax
    import torch

    from jaxtrain.runtime import host_memory, launch

    host_memory.one_arena()  # before torch's threads have heaps of their own
    started = launch.setup_distributed()
    if started.processes > 1:
        kind = "nccl" if torch.cuda.is_available() else "gloo"
        store = f"file://{os.environ['COMPARE_STORE']}"
        torch.distributed.init_process_group(kind, store, rank=started.process, world_size=started.processes)
    batch = arguments.batch or CASES[arguments.system][arguments.size].batch
    with tempfile.TemporaryDirectory() as folder:
        losses = _losses(arguments, batch, folder)
        gc.collect()  # both sides' states, before there are two more
        agreement = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(*losses.values(), strict=True))
        agree = agreement <= AGREEMENT[arguments.precision]
        result = {
            "system": arguments.system, "size": arguments.size, "peer": arguments.peer[0],
            "precision": arguments.precision, "batch": batch, "processes": started.processes, "rank": started.process,
            "fed": arguments.fed,
            "device": jax.devices()[0].device_kind, "jax": jax.__version__, "torch": torch.__version__,
            "losses": losses, "largest_loss_difference": agreement, "ratio": None,
        }  # fmt: skip
        with host_memory.kept():
            return [result | timed for timed in _timed(arguments, batch, folder, gate)] if agree else [result]


def _progress(text: str) -> None:
    """For a command that is ended by its limit."""
    print(f"{time.perf_counter() - BEGAN:.0f} s: {text}", file=sys.stderr, flush=True)


def _told(result: dict[str, Any]) -> str:
    head = "{system} ({size}, {precision}, batch {batch}, {processes} process(es), {device})".format(**result)
    if result["ratio"] is None:
        return (
            f"{head}: no ratio, the losses differ by {result['largest_loss_difference']:.1e}, more than "
            f"{AGREEMENT[result['precision']]:g}: {result['losses']}"
        )
    lines = [f"{head}: losses agree to {result['largest_loss_difference']:.1e}"]
    for side in ("jaxtrain", result["peer"]):
        told = result[side]
        spread = f"{min(told['samples_per_s']):,.1f} to {max(told['samples_per_s']):,.1f}"
        lines.append(
            f"  {side:14} {told['median']:>10,.1f} samples/s ({spread}), {told['tflops']:.3f} TFLOP/s, "
            f"first step {told['first_step_s']:.1f} s"
        )
    return "\n".join([*lines, f"  ratio {result['ratio']:.2f} ({result['lowest']:.2f} to {result['highest']:.2f})"])


# --- both sides, step by step ----------------------------------------------------------------------------------------


def _trainer(arguments: argparse.Namespace, batch: int, folder: str, steps: int, quiet: bool):
    """quiet: dropout and other noise off, so that losses can be compared."""
    from jaxtrain import config_io
    from jaxtrain.runtime import cpu_threads
    from jaxtrain.train.trainer import Trainer

    case = CASES[arguments.system][arguments.size]
    settings = [*CONSTANT_RATE, f"precision.policy={arguments.precision}", f"data.batch_size={batch}"]
    settings += ["precision.matmul=highest"]  # torch's own float32: no TF32 on either side
    settings += [f"run.dir={folder}", "run.quiet=true", f"train.steps={steps}"]
    settings += ["shard.strategy=ddp_local"] if "torch_ddp" in arguments.peer else []
    fed = arguments.fed and not quiet
    settings += ["data.drop_last=true", *([] if fed else ["data.placement=host"])]
    task, config = config_io.load(case.config, [*case.overrides, *settings, *arguments.overrides])
    if quiet:
        loss = task.loss
        task = dataclasses.replace(task, loss=lambda model, batch, config, rngs: loss(model, batch, config, None))
    split = "train" if fed else case.split
    with cpu_threads.limited(config.shard.threads):  # making the data may start JAX
        data = task.build_data(config, split) if case.data is None else case.data(config, batch * BATCHES)
        return Trainer(train_dataset=data, config=config, task=task)


def _losses(arguments: argparse.Namespace, batch: int, folder: str) -> dict[str, list[float]]:
    import torch

    trainer = _trainer(arguments, batch, folder, CHECKED_STEPS, quiet=True)
    theirs = TorchSide(trainer, training=False)
    _progress("both sides are made")
    twin_losses = [float(theirs.step(batch)) for batch in theirs.batches[:CHECKED_STEPS]]
    _progress("torch's losses")
    if torch.distributed.is_initialized():
        mean = torch.tensor(twin_losses, dtype=torch.float64)
        mean = mean.cuda() if torch.cuda.is_available() else mean
        torch.distributed.all_reduce(mean)
        twin_losses = (mean / torch.distributed.get_world_size()).tolist()
    del theirs
    ours = JaxSide(trainer, steps_per_call=1)
    losses = {"jaxtrain": ours.losses(CHECKED_STEPS), arguments.peer[0]: twin_losses}
    _progress("jaxtrain's losses")
    return losses


def _timed(arguments: argparse.Namespace, batch: int, folder: str, gate: Any) -> list[dict[str, Any]]:
    trainer = _trainer(arguments, batch, folder, 1000, quiet=False)
    feed = CASES[arguments.system][arguments.size].feed if arguments.fed else None
    theirs = TorchSide(trainer, training=True, feed=feed and feed(trainer.config, batch))
    ours = JaxSide(trainer, trainer.config.train.steps_per_call, arguments.fed)
    sides = {"jaxtrain": ours}
    sides |= {peer: theirs.compiled() if peer == "torch_compile" else theirs for peer in arguments.peer}
    told: dict[str, Any] = {}
    for name, side in sides.items():
        told[name] = {"first_step_s": side.run(ours.count), "samples_per_s": []}  # compiles
        side.run(3 * ours.count)  # torch.compile does so again when a Python number changes
        _progress(f"{name} compiled in {told[name]['first_step_s']:.1f} s")
    with _alone(gate):
        per_step = {}
        for name, side in sides.items():
            side.forget_peak()
            per_step[name] = _agreed(side.run(ours.count) / ours.count)
            told[name]["peak_bytes"] = side.peak_bytes()
        steps = {n: max(1, round(arguments.seconds / s / ours.count)) * ours.count for n, s in per_step.items()}
        for _ in range(arguments.rounds):
            for name, side in sides.items():
                _barrier()
                told[name]["samples_per_s"].append(steps[name] * batch / side.run(steps[name]))
        if arguments.trace:
            ours.trace(arguments.trace / arguments.system)
    for side in told.values():
        side["median"] = statistics.median(side["samples_per_s"])
        side["tflops"] = ours.flops * side["median"] / batch / 1e12
        side["ms"] = 1e3 * batch / side["median"]
    peak = trainer.program.work().peak
    mfu = told["jaxtrain"]["tflops"] * 1e12 / peak / trainer.layout.mesh.size if peak else None
    return [{"mfu": mfu} | _ratio(told, peer) for peer in arguments.peer]


def _ratio(told: dict[str, Any], peer: str) -> dict[str, Any]:
    ours, theirs = told["jaxtrain"], told[peer]
    ratios = [a / b for a, b in zip(ours["samples_per_s"], theirs["samples_per_s"], strict=True)]
    ratio = ours["median"] / theirs["median"]
    return {"peer": peer, "jaxtrain": ours, peer: theirs, "ratio": ratio, "lowest": min(ratios), "highest": max(ratios)}


def _barrier() -> None:
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _agreed(seconds: float) -> float:
    """The same number on every process, so that all run as many steps."""
    import torch

    if not torch.distributed.is_initialized():
        return seconds
    told = torch.tensor([seconds], device="cuda" if torch.cuda.is_available() else "cpu")
    torch.distributed.broadcast(told, 0)
    return float(told)


class JaxSide:
    """The step as the loop calls it, on batches that lie on the device, or, `fed`, as the loader brings them."""

    def __init__(self, trainer, steps_per_call: int, fed: bool = False):
        self.count, self.trainer = steps_per_call, trainer
        self.program, self.hyper = trainer.program.train_step(steps_per_call), trainer.program.hyper()
        self.columns = trainer.program.columns(trainer.train_loader)
        self.batches = None if fed else list(self._read(0, max(1, BATCHES // self.count)))
        self.state, self.calls = trainer.state, 0

    def _read(self, first: int, calls: int) -> Iterator[Any]:
        wanted = [((first + i) * self.count, self.count) for i in range(calls)]
        return (batch for _, _, batch in self.trainer.train_loader.batches(wanted))

    def _batches(self, calls: int) -> Iterator[Any]:
        first, self.calls = self.calls, self.calls + calls
        if self.batches is None:
            return self._read(first, calls)
        return (self.batches[(first + i) % len(self.batches)] for i in range(calls))

    def step(self, batch: Any) -> Any:
        self.state, metrics = self.program(self.state, batch, self.hyper, self.columns)
        return metrics

    def losses(self, calls: int) -> list[float]:
        return [float(self.step(batch)["loss"]) for batch in self._batches(calls)]

    def run(self, steps: int) -> float:
        """Seconds of so many steps."""
        import jax

        started = time.perf_counter()
        for batch in self._batches(steps // self.count):
            self.step(batch)
        jax.block_until_ready(self.state)
        return time.perf_counter() - started

    def trace(self, folder: pathlib.Path) -> None:
        """Leave a profile of three calls, and the compiled program's text."""
        import jax

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "program.hlo").write_text(self.program.programs[0].as_text())
        with jax.profiler.trace(str(folder)):
            self.run(3 * self.count)

    @property
    def flops(self) -> float:
        """Of one step, over all devices."""
        from jaxtrain.train.compilation.flops import model_flops

        return model_flops(self.program.flops or 0.0, self.trainer.config.train.remat) / self.count

    def forget_peak(self) -> None:
        """The compiler knows it."""

    def peak_bytes(self) -> int:
        """Of one device: what the compiled step needs, arguments included."""
        memory = self.program.programs[0].memory_analysis()
        new = memory.output_size_in_bytes - memory.alias_size_in_bytes  # the others take over arguments' memory
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes + new


if __name__ == "__main__":
    sys.exit(main())
