"""Sherlock's Trainer on several processes: `python -m tests.e2e.originals.two_trainers FOLDER`."""

import contextlib
import pathlib
import sys

import torch

from jaxtrain.errors import UserError
from jaxtrain.systems import fmri_autoencoder as giblet
from tests.unit.fmri_autoencoder.test_facade_trainer import CALM, Dataset


def main(folder: str) -> None:
    giblet.setup_distributed()
    sharded = giblet.TrainingConfig(checkpoint_dir=folder, log_dir=folder, overrides={"shard": {"strategy": "fsdp"}})
    with contextlib.suppress(UserError):
        giblet.Trainer(giblet.create_autoencoder(**CALM), Dataset(16), None, sharded)
        raise AssertionError("weights divided over processes are refused")
    torch.manual_seed(0)
    config = giblet.TrainingConfig(
        checkpoint_dir=f"{folder}/run",
        log_dir=f"{folder}/logs",
        batch_size=8,
        num_epochs=2,
        num_workers=0,
        save_every=1,
    )
    trainer = giblet.Trainer(giblet.create_autoencoder(**CALM), Dataset(16), Dataset(8), config, distributed=True)
    history = trainer.train()
    files = sorted(path.name for path in pathlib.Path(f"{folder}/run").glob("*.pt"))
    total = sum(float(value.double().sum()) for value in trainer.model.state_dict().values())
    print(f"trained: {history['best_val_loss']:.6f} {total:.6f} {files}")
    giblet.cleanup_distributed()


if __name__ == "__main__":
    main(sys.argv[1])
