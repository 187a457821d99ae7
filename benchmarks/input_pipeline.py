"""Samples per second of the data bridge beside a bare torch DataLoader: `python -m benchmarks.input_pipeline`.

Both read the same Dataset of images (flip, crop, normalise: about 0.1 ms of CPU a sample) with the same number of
persistent workers, epoch by epoch in turns, so that what else the machine does hits both. The bridge's batches arrive
as numpy arrays, ready for the device; the DataLoader's as tensors.

With --config F: the input pipeline of a task instead, alone and under its training step.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np
import torch

from benchmarks import parser, save
from jaxtrain import config_io
from jaxtrain.data.loader import Loader, make_pool, make_reader, make_stream
from jaxtrain.data.sources import as_source
from jaxtrain.runtime import host_memory
from jaxtrain.train.trainer import Trainer

TARGET = 0.95  # of the bare DataLoader's rate


class Images(torch.utils.data.Dataset):
    """uint8 pictures in memory -> augmented float32 [3, size, size], int label."""

    def __init__(self, samples: int, size: int):
        self.pixels = torch.randint(0, 256, (samples, 3, size + 8, size + 8), dtype=torch.uint8)
        self.size = size

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        top, left = torch.randint(0, 9, (2,)).tolist()
        image = self.pixels[index, :, top : top + self.size, left : left + self.size].float().div_(255)
        image = image.flip(-1) if torch.rand(()) < 0.5 else image
        return image.sub_(0.5).div_(0.25), index


def bridge_epochs(dataset, batch_size: int, workers: int) -> Iterator[int]:
    """Every `next` reads one epoch; gives the samples read."""
    source = as_source(dataset)
    stream = make_stream(source, batch_size, 0, True, True, False)
    pool = make_pool(make_reader(source, None, batch_size, 0), workers, 600, "forkserver")
    loader = Loader(source, stream, lambda batches: batches[0], np.arange(batch_size), pool=pool)
    steps, epoch = stream.steps_per_epoch, 0
    try:
        while True:
            calls = ((epoch * steps + i, 1) for i in range(steps))
            yield sum(int(batch["valid"].sum()) for _, _, batch in loader.batches(calls))
            epoch += 1
    finally:
        loader.close()


def torch_epochs(dataset, batch_size: int, workers: int) -> Iterator[int]:
    """As `bridge_epochs`, by a bare DataLoader."""
    more = {"persistent_workers": True, "multiprocessing_context": "forkserver"} if workers else {}
    loader = torch.utils.data.DataLoader(dataset, batch_size, shuffle=True, num_workers=workers, **more)
    while True:
        yield sum(len(labels) for _, labels in loader)


def side_by_side(dataset, batch_size: int, workers: int, rounds: int) -> dict:
    """Rates of both in turns, after one epoch each to warm up."""
    readers = {
        "bridge": bridge_epochs(dataset, batch_size, workers),
        "torch": torch_epochs(dataset, batch_size, workers),
    }
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for number in range(rounds + 1):
        for name in list(readers)[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            samples = next(readers[name])
            if number:
                rates[name].append(samples / (time.perf_counter() - started))
    for reader in readers.values():
        reader.close()
    ratios = [ours / theirs for ours, theirs in zip(rates["bridge"], rates["torch"], strict=True)]
    return {name: spread(values) for name, values in {**rates, "ratio": ratios}.items()}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


@host_memory.kept()
def of_config(config: str, overrides: list[str], rounds: int) -> dict:
    """samples/s of a task's own pipeline up to the device, without the training step, and with it: the share of the
    time that the step waits for data."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"run.dir={folder}", "run.quiet=true", "tracking.tensorboard=false", *overrides]
        task, resolved = config_io.load(config, settings)
        trainer = Trainer(config=resolved, task=task)
        loader, size = trainer.train_loader, resolved.data.batch_size
        steps = min(trainer.total_steps, max(rounds * trainer.steps_per_epoch, 20))
        alone = []
        for _ in range(rounds):
            started = time.perf_counter()
            for _, _, batch in loader.batches([(i, 1) for i in range(steps)]):
                jax.block_until_ready(batch)
            alone.append(steps * size / (time.perf_counter() - started))
        program, hyper, columns = trainer.program.train_step(), trainer.program.hyper(), trainer.program.columns(loader)
        state, busy, stalled = trainer.state, [], []
        for number in range(rounds + 1):
            before, started = loader.stall_s, time.perf_counter()
            for _, _, batch in loader.batches([(i, 1) for i in range(steps)]):
                state, metrics = program(state, batch, hyper, columns)
                jax.block_until_ready(metrics)
            seconds = time.perf_counter() - started
            if number:  # the first compiles
                busy.append(steps * size / seconds)
                stalled.append((loader.stall_s - before) / seconds)
        loader.close()
        placement = "device" if loader.on_device else "host"
    figures = {"pipeline_samples_per_s": alone, "training_samples_per_s": busy, "stall_ratio": stalled}
    return {"task": resolved.task, "placement": placement} | {name: spread(v) for name, v in figures.items()}


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    p.add_argument("--samples", type=int, default=4096)
    p.add_argument("--size", type=int, default=64, metavar="PIXELS")
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--config", metavar="F", help="measure this task's own pipeline")
    p.add_argument("overrides", nargs="*", metavar="a.b=c")
    arguments = p.parse_intermixed_args()
    if arguments.config:
        found = of_config(arguments.config, arguments.overrides, arguments.rounds)
        for name in ("pipeline_samples_per_s", "training_samples_per_s", "stall_ratio"):
            print(f"{name:24s} {found[name]['median']:12.3f} ({found[name]['least']:.3f} to {found[name]['most']:.3f})")
    else:
        dataset = Images(arguments.samples, arguments.size)
        found = {"cpus": os.cpu_count(), "workers": {}}
        for workers in arguments.workers:
            figures = side_by_side(dataset, arguments.batch_size, workers, arguments.rounds)
            found["workers"][workers] = figures
            rates = ", ".join(f"{name} {figures[name]['median']:8.0f} samples/s" for name in ("bridge", "torch"))
            ratio = figures["ratio"]
            print(
                f"{workers} workers: {rates}, "
                f"ratio {ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f}), wanted {TARGET}"
            )
    save(found, arguments.json)


if __name__ == "__main__":
    main()
