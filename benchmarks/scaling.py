"""What more devices cost: `python -m benchmarks.scaling --config configs/sherlock_gen1.yaml`.

Planned: the collectives of the real step per device on 8 to 1024 GPUs that are not here, against what the strategy has
to send at least. Measured: samples per second of one and two processes on this machine's CPU, a core each.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from benchmarks import parser, save

PLANNED = ["shard.strategy=fsdp", "data.synthetic=arrays", "data.batch_size=1024"]


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--config", default="configs/sherlock_gen1.yaml", help="what is planned")
    p.add_argument("--devices", type=int, nargs="*", default=[8, 64, 256, 1024])
    p.add_argument("--target", default="h200")
    p.add_argument("--measured-config", default="configs/digits.yaml", help="what is run on the CPU")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("overrides", nargs="*", default=PLANNED)
    arguments = p.parse_args()
    planned = [_plan(arguments, devices) for devices in arguments.devices]
    for plan in planned:
        least = plan["minimum_bytes"]
        told = ", ".join(
            f"{kind} {found['bytes'] / 2**20:,.0f} MiB (at least {least.get(kind, 0) / 2**20:,.0f})"
            for kind, found in plan["collectives"].items()
        )
        print(f"{plan['devices']:5} x {plan['target']}: state {plan['state_bytes'] / 2**20:,.1f} MiB a device; {told}")
    measured: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(arguments.rounds):
        for processes in measured:
            measured[processes].append(_samples_per_s(arguments.measured_config, processes))
    medians = {processes: statistics.median(rates) for processes, rates in measured.items()}
    for processes, rates in measured.items():
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        print(f"{processes} process(es), a core each: {medians[processes]:,.0f} samples/s ({spread})")
    print(f"2 processes / 1: {medians[2] / medians[1]:.2f}")
    save({"planned": planned, "measured": measured}, arguments.json)


def _plan(arguments: argparse.Namespace, devices: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/plan.json"
        command = ["jaxtrain.plan", "--config", arguments.config, "--devices", str(devices), "--no-fit"]
        command += ["--target", arguments.target, "--json", path, *arguments.overrides]
        result = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
        if not pathlib.Path(path).is_file():
            raise SystemExit(result.stderr)
        return json.loads(pathlib.Path(path).read_text())


def _samples_per_s(config: str, processes: int) -> float:
    """Of a run of some hundred steps without evaluation, every process on a core of its own."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"run.dir={folder}/run", "run.quiet=true", "train.steps=200", "evaluation.every_epochs=null"]
        settings += ["shard.strategy=ddp_local"]
        cores, running = sorted(os.sched_getaffinity(0)), []
        for rank in range(processes):
            env = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29621}
            env = os.environ | ({k: str(v) for k, v in env.items()} if processes > 1 else {})
            command = ["taskset", "-c", str(cores[rank % len(cores)]), sys.executable, "-m", "jaxtrain.run"]
            running.append(subprocess.Popen([*command, "--config", config, *settings], env=env, stdout=subprocess.PIPE))
        if sum(process.wait() for process in running):  # waits for all
            raise SystemExit(f"a run of {processes} process(es) failed")
        summary = json.loads(pathlib.Path(folder, "run", "summary.json").read_text())
        return summary["throughput"]["samples_per_s"]


if __name__ == "__main__":
    main()
