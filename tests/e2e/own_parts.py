"""A run with everything of the user's own: optimizer, scheduler, lengths, metrics, callbacks.

python -m tests.e2e.own_parts FOLDER RESULT.json [STEP at which the process kills itself]
"""

import json
import os
import signal
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from jaxtrain import Trainer, TrainingConfig, WholeSplit
from jaxtrain.runtime import launch
from torch_bridge.torchvision_operators import declare_torchvision


class Sentences(Dataset):
    def __init__(self, count: int, seed: int):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 30, (count,), generator=draw).tolist()
        self.rows = [torch.randint(1, 20, (length,), generator=draw) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"ids": self.rows[index], "label": index % 3}


def collate(samples):
    return {
        "ids": pad_sequence([sample["ids"] for sample in samples], batch_first=True),
        "label": torch.tensor([sample["label"] for sample in samples]),
    }


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.drop, self.head = nn.Embedding(20, 8), nn.Dropout(0.1), nn.Linear(8, 3)

    def forward(self, ids):
        held = (ids > 0).float()[..., None]
        return self.head(self.drop((self.embedding(ids) * held).sum(1) / held.sum(1)))


class Watch:
    """Counts steps over all parts of a run, and ends the process at one."""

    def __init__(self, last: int | None):
        self.seen, self.last = 0, last

    def on_step_end(self, trainer, step, metrics):
        self.seen += 1
        if step == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def torchmetrics_accuracy():
    declare_torchvision()
    import torchmetrics

    return torchmetrics.Accuracy(task="multiclass", num_classes=3)


def main(folder: str, result: str, last: int | None) -> None:
    launch.setup_distributed()
    module, watch = Bag(), Watch(last)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=15)
    order = torch.Generator().manual_seed(5)
    trainer = Trainer(
        module,
        DataLoader(Sentences(40, 0), 8, shuffle=True, collate_fn=collate, generator=order),
        DataLoader(Sentences(20, 1), 8, collate_fn=collate),
        TrainingConfig(
            run={"dir": folder, "quiet": True},
            train={"epochs": 3},
            checkpoint={"every_steps": 2},
            evaluation={"metric": "f1", "mode": "max"},
            tracking={"tensorboard": False},
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=scheduler,
        callbacks=[watch],
        metrics={
            "nll": lambda outputs, batch: F.cross_entropy(outputs, batch["label"], reduction="none"),
            "accuracy": torchmetrics_accuracy(),
            "f1": WholeSplit(lambda outputs, batch: float((outputs.argmax(-1) == batch["label"]).mean())),
        },
    )
    history = trainer.train()
    weights = {name: value.double().sum().item() for name, value in module.state_dict().items()}
    found = {"history": history["val_history"], "weights": weights, "seen": watch.seen, "lr": scheduler.get_last_lr()}
    with open(f"{result}.{os.environ.get('RANK', 0)}", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]) if len(sys.argv) > 3 else None)
