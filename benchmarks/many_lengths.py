"""Batches of many lengths: data.shapes auto beside exact and torch: `python -m benchmarks.many_lengths --epochs 3`.

A small transformer on sentences of random lengths, collated to the longest of each batch. Prints the tokens computed
over those that the collate function made, programs compiled, seconds until the second epoch, and steps per second from
there on; each way in one run, after another.
"""

import tempfile
import time

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from benchmarks import parser
from jaxtrain import Trainer, TrainingConfig
from jaxtrain.data import row_keys

WAYS = ("auto", "exact", "torch")


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count: int, longest: int):
        draw = torch.Generator().manual_seed(0)
        lengths = torch.randint(4, longest + 1, (count,), generator=draw).tolist()
        self.rows = [torch.randint(1, 1000, (length,), generator=draw) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], index % 2


def collate(samples: list) -> dict[str, torch.Tensor]:
    ids = pad_sequence([ids for ids, _ in samples], batch_first=True)
    return {"ids": ids, "label": torch.tensor([label for _, label in samples])}


class Classifier(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(1000, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        absent = ids == 0
        hidden = self.encoder(self.embedding(ids), src_key_padding_mask=absent)
        held = (~absent).to(hidden.dtype)[..., None]
        return self.head((hidden * held).sum(1) / held.sum(1))


def loss(output: torch.Tensor, batch: dict) -> torch.Tensor:
    return F.cross_entropy(output, batch["label"])


class Clock:
    """When each epoch ended; the device is waited for."""

    def __init__(self):
        self.times = [time.perf_counter()]

    def on_step_end(self, trainer, step, metrics) -> None:
        if step % trainer.steps_per_epoch == 0:
            float(metrics["loss"])
            self.times.append(time.perf_counter())


def main() -> None:
    p = parser(__doc__, figures=False)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--samples", type=int, default=480)
    p.add_argument("--longest", type=int, default=128)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--width", type=int, default=64)
    p.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="which to measure (default: all)")
    arguments = p.parse_args()
    dataset = Sentences(arguments.samples, arguments.longest)
    loader = lambda: DataLoader(dataset, arguments.batch_size, shuffle=True, collate_fn=collate, drop_last=True)

    def show(name: str, times: list[float], tokens: float, programs: int) -> None:
        steps = len(loader()) * (arguments.epochs - 1)
        rate = steps / (times[-1] - times[1])
        told = f"tokens x {tokens:.2f}, {programs:2} programs, first epoch {times[1] - times[0]:6.1f} s"
        print(f"{name:6} {told}, then {rate:6.1f} steps/s")

    for shapes in (way for way in arguments.ways if way != "torch"):
        with tempfile.TemporaryDirectory() as folder:
            config = TrainingConfig(
                run={"dir": folder, "quiet": True},
                data={"shapes": shapes},
                train={"epochs": arguments.epochs, "log_every_steps": 1000},
                tracking={"tensorboard": False},
            )
            module = Classifier(arguments.width)
            optimizer, clock = torch.optim.AdamW(module.parameters(), 1e-3), Clock()
            trainer = Trainer(module, loader(), config=config, loss=loss, optimizer=optimizer, callbacks=[clock])
            clock.times = [time.perf_counter()]
            trainer.train()
            fitted, made = _tokens(trainer)
            show(shapes, clock.times, fitted / made, trainer.program.compilations)
    if "torch" not in arguments.ways:
        return
    module = Classifier(arguments.width)
    optimizer, times = torch.optim.AdamW(module.parameters(), 1e-3), [time.perf_counter()]
    for _ in range(arguments.epochs):
        for batch in loader():
            optimizer.zero_grad()
            loss(module(batch["ids"]), batch).backward()
            optimizer.step()
        times.append(time.perf_counter())
    show("torch", times, 1.0, 0)


def _tokens(trainer: Trainer) -> tuple[int, int]:
    """Tokens of the last epoch as they were computed, and as the collate function made them."""
    shapes, first = trainer.train_loader.batch_shapes, trainer.total_steps - trainer.steps_per_epoch
    fitted = made = 0
    for step in range(first, trainer.total_steps):
        batch = trainer.train_loader.host_batch(step)
        made += batch["ids"].size
        fitted += shapes.fit(step, row_keys.without(batch))["ids"].size
    return fitted, made


if __name__ == "__main__":
    main()
