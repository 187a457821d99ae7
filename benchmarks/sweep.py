"""Runs per CPU hour of `jaxtrain.sweep` against the same runs in a torch loop, one after another.

    python -m benchmarks.sweep [--model mlp|cnn] [--runs 64] [--epochs 20] [--json F]

Each side is a process with one thread of torch and of XLA. A torch run is the plain loop (forward, backward, AdamW) in
eager mode; one process trains `--timed` of them, and their mean, without import and start, is taken times the runs.
The sweep counts whole: making modules, recording, compiling and training, without import. CPU seconds are of all
threads, which other load on the machine hardly changes.
"""

import json
import subprocess
import sys
import time

import numpy as np

from benchmarks import parser, save

SAMPLES, BATCH = 2048, 64


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--model", default="mlp", choices=("mlp", "cnn"))
    p.add_argument("--runs", type=int, default=64)
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--timed", type=int, default=3)
    p.add_argument("--side", choices=("torch", "sweep"))
    arguments = p.parse_args()
    if arguments.side:
        print(json.dumps({"torch": in_torch, "sweep": in_sweep}[arguments.side](arguments)))
        return
    result = compare(arguments)
    print(json.dumps(result, indent=1))
    save(result, arguments.json)


def compare(arguments) -> dict:
    found = {side: _process(arguments, side) for side in ("torch", "sweep")}
    per_hour = {side: round(3600 / each["cpu_s_per_run"], 1) for side, each in found.items()}
    return {
        "model": arguments.model,
        "runs": arguments.runs,
        "epochs": arguments.epochs,
        **found,
        "runs per CPU hour": per_hour,
        "ratio": round(per_hour["sweep"] / per_hour["torch"], 2),
    }


def _process(arguments, side: str) -> dict:
    own = [
        "--model",
        arguments.model,
        "--runs",
        arguments.runs,
        "--epochs",
        arguments.epochs,
        "--timed",
        arguments.timed,
    ]
    command = [sys.executable, "-m", "benchmarks.sweep", "--side", side, *map(str, own)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def make_module(model="mlp", dropout=0.1):
    from torch import nn

    if model == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 10))
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 10),
    )  # fmt: skip


def data():
    import torch

    generator = np.random.default_rng(0)
    image = generator.normal(size=(SAMPLES, 1, 8, 8)).astype(np.float32)
    label = (image.reshape(SAMPLES, -1) @ generator.normal(size=(64, 10))).argmax(1)
    return torch.utils.data.TensorDataset(torch.from_numpy(image), torch.from_numpy(label))


def in_torch(arguments) -> dict:
    import torch

    torch.set_num_threads(1)
    image, label = data().tensors
    before = time.process_time()
    for seed in range(arguments.timed):
        torch.manual_seed(seed)
        module = make_module(arguments.model)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        for _ in range(arguments.epochs):
            for rows in torch.randperm(SAMPLES).split(BATCH):
                loss = torch.nn.functional.cross_entropy(module(image[rows]), label[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return {"cpu_s_per_run": (time.process_time() - before) / arguments.timed}


def in_sweep(arguments) -> dict:
    import torch

    import jaxtrain

    torch.set_num_threads(1)
    space = {
        "model": arguments.model,
        "seed": range(arguments.runs),
        "lr": {"type": "loguniform", "low": 1e-4, "high": 1e-2},
        "dropout": {"type": "uniform", "low": 0.05, "high": 0.5},
    }
    config = {
        "train": {"epochs": arguments.epochs, "steps_per_call": SAMPLES // BATCH},
        "data": {"batch_size": BATCH},
        "optim": {"clip_norm": None},
        "shard": {"threads": 1},
    }
    before = time.process_time()
    result = jaxtrain.sweep(make_module, data(), torch.nn.CrossEntropyLoss(), space, arguments.runs, config=config)
    return {"cpu_s_per_run": (time.process_time() - before) / arguments.runs, "programs": result.programs}


if __name__ == "__main__":
    main()
