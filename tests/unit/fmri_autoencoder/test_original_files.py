"""`checkpoint.torch: original`: the files that the original's users wait for, and the way back."""

import dataclasses

import pytest
import torch

from jaxtrain import Trainer, config_io
from jaxtrain.systems.fmri_autoencoder.original.legacy_config import TrainingConfig, convert, of_config
from jaxtrain.systems.fmri_autoencoder.torch_gen1 import SherlockAutoencoder
from tests.unit.fmri_autoencoder import tiny

OWN = ("checkpoint.torch=original", "checkpoint.every_epochs=1", "tracking.tensorboard=false", "run.quiet=true")
OWN += ("evaluation.metric=loss", "evaluation.mode=min", "evaluation.every_epochs=1")


def run(folder, *overrides):
    config = tiny.config("gen1", *OWN, "shard.devices=1", "train.epochs=3", f"run.dir={folder}", *overrides)
    trainer = Trainer(config=config)
    return trainer, trainer.train()


@pytest.mark.slow
def test_a_run_writes_them_and_goes_on_from_any(tmp_path):
    trainer, history = run(tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").glob("*.pt")}
    assert names == {*(f"checkpoint_epoch_{n}.pt" for n in (1, 2, 3)), "best_checkpoint.pt", "final_checkpoint.pt"}
    saved = torch.load(tmp_path / "run" / "checkpoint_epoch_2.pt", weights_only=True)
    steps = trainer.steps_per_epoch
    assert (saved["epoch"], saved["global_step"], saved["val_loss"]) == (
        2,
        2 * steps,
        history["val_history"][1]["loss"],
    )
    assert [entry["total_loss"] for entry in saved["val_history"]] == [e["loss"] for e in history["val_history"][:2]]
    assert set(saved["config"]) == {field.name for field in dataclasses.fields(TrainingConfig)}
    model = SherlockAutoencoder.of(trainer.config.model)
    model.load_state_dict(saved["model_state_dict"], strict=True)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(saved["optimizer_state_dict"])
    assert optimizer.state[next(model.parameters())]["step"] == 2 * steps
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1)
    cosine.load_state_dict(saved["scheduler_state_dict"])
    assert cosine.last_epoch == 2 * steps
    best = torch.load(tmp_path / "run" / "best_checkpoint.pt", weights_only=True)
    assert best["val_loss"] == min(entry["loss"] for entry in history["val_history"])
    resumed, _ = run(tmp_path / "more", f"init_from={tmp_path / 'run' / 'checkpoint_epoch_2.pt'}")
    state = resumed.state_dict()
    assert all((value == state[key]).all() for key, value in trainer.state_dict().items())


def test_the_originals_settings_go_through_a_run_and_back():
    original = {"learning_rate": 3e-4, "num_epochs": 7, "warmup_epochs": 2, "scheduler_type": "step", "save_every": 3}
    original |= {"gradient_clip_val": 0.5, "fmri_loss_type": "mae", "fmri_weight": 2.0, "early_stopping_patience": 4}
    config = config_io.check(convert(original))[1]
    found = dataclasses.asdict(of_config(config))
    assert {name: found[name] for name in original if name != "warmup_epochs"} == {
        name: value for name, value in original.items() if name != "warmup_epochs"
    }
