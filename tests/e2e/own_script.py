"""A user's script without a word about processes: `python -m tests.e2e.own_script FOLDER [raise]`."""

import os
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from jaxtrain import Trainer, TrainingConfig


def main(folder: str, what: str = "") -> None:
    rank = next(
        (int(os.environ[name]) for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK") if name in os.environ), 0
    )
    torch.manual_seed(100 + rank)  # every process draws its own first weights
    net = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.GELU(), torch.nn.Linear(16, 2))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 20, generator=generator), torch.randint(0, 2, (64,), generator=generator)
    data = TensorDataset(x, y)
    config = TrainingConfig(learning_rate=1e-2, num_epochs=3, batch_size=8, run={"dir": folder})
    trainer = Trainer(net, DataLoader(data, 8, shuffle=True), data, config, loss=torch.nn.CrossEntropyLoss())
    history = trainer.train()
    best = trainer.load_best()
    total = sum(float(value.double().sum()) for value in net.state_dict().values())
    print(f"trained: {best.step} {history['best_metric']:.6f} {total:.5f}", flush=True)
    if what == "raise" and rank == 1:
        raise ValueError("rank 1 is broken")
    if what == "raise":
        trainer.train(resume="never")


if __name__ == "__main__":
    main(*sys.argv[1:])
