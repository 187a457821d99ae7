"""One training in torch and in a Trainer, on 20 samples in batches of 8."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader

from jaxtrain import Trainer, TrainingConfig

STEPS, SAMPLES, BATCH = 20, 20, 8
DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(SAMPLES, 6, generator=DRAW), torch.randn(SAMPLES, 3, generator=DRAW)
LABELS = torch.randint(0, 3, (SAMPLES,), generator=DRAW)
TOKENS = torch.randint(1, 30, (SAMPLES, 10), generator=DRAW)
IMAGES = torch.randn(SAMPLES, 1, 8, 8, generator=DRAW)


def mlp(out: int = 3, *middle: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, out))


def config(folder, **more) -> TrainingConfig:
    given = {
        "run": {"dir": str(folder), "quiet": True},
        "data": {"batch_size": BATCH, "shuffle": False},
        "optim": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.0, "clip_norm": None}
        | {"schedule": {"name": "constant"}},
        "train": {"steps": STEPS},
        "evaluation": {"every_epochs": None},
        "shard": {"devices": 1},
        "tracking": {"tensorboard": False},
        "precision": {"matmul": "highest"},
    }
    return TrainingConfig(**{**given, **more})


def train_in_torch(module: nn.Module, dataset, loss_of, collate=None, parameters=None) -> None:
    """loss_of: (module, batch) -> scalar tensor."""
    trained = [p for p in (parameters or module.parameters()) if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.05, momentum=0.9)
    module.train()
    step = 0
    while step < STEPS:
        for batch in DataLoader(dataset, BATCH, collate_fn=collate):
            if step == STEPS:
                return
            optimizer.zero_grad()
            loss_of(module, batch).backward()
            optimizer.step()
            step += 1


def assert_torchs(theirs: nn.Module, ours: nn.Module) -> None:
    for (key, want), got in zip(theirs.state_dict().items(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


def check(folder, module, dataset, loss, loss_of, **more) -> None:
    theirs = copy.deepcopy(module)
    Trainer(module, dataset, None, config(folder, **more), loss=loss).train()
    train_in_torch(theirs, dataset, loss_of)
    assert_torchs(theirs, module)
