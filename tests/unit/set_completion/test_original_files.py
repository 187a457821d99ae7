"""`checkpoint.torch: original`: the files that the original's users wait for, and the way back."""

import json

import pytest
import torch

from jaxtrain import Trainer
from jaxtrain.systems.set_completion import SetCompletionModel
from tests.unit.set_completion.golden import config

OWN = ("checkpoint.torch=original", "checkpoint.every_epochs=1", "tracking.tensorboard=false", "run.quiet=true")
OWN += ("evaluation.every_epochs=1",)


@pytest.mark.slow
def test_a_run_writes_them_and_goes_on_from_any(tmp_path):
    def run(name, *overrides):
        own = ("shard.devices=1", "train.epochs=2", f"run.dir={tmp_path / name}", *overrides)
        trainer = Trainer(config=config("splat_tiny", *OWN, *own))
        return trainer, trainer.train()

    trainer, history = run("run")
    folder = tmp_path / "run"
    assert {path.name for path in folder.glob("*.pth")} == {"epoch_001.pth", "epoch_002.pth", "model.pth"}
    saved = torch.load(folder / "epoch_001.pth", weights_only=True)
    losses = [entry["loss"] for entry in history["val_history"]]
    assert (saved["epoch"], saved["best_val_loss"]) == (1, losses[0])
    model = SetCompletionModel(**json.loads((folder / "model_params.json").read_text()))
    model.load_state_dict(saved["model_state_dict"], strict=True)
    torch.optim.AdamW(model.parameters()).load_state_dict(saved["optimizer_state_dict"])
    assert json.loads((folder / "metrics_history.json").read_text())["val"]["loss"] == losses
    assert json.loads((folder / "training_args.json").read_text())["train"]["epochs"] == 2
    best = 1 + losses.index(min(losses))
    of_best = torch.load(folder / f"epoch_{best:03d}.pth", weights_only=True)["model_state_dict"]
    bare = torch.load(folder / "model.pth", weights_only=True)
    assert all(torch.equal(value, of_best[key]) for key, value in bare.items())
    resumed, _ = run("more", f"init_from={folder / 'epoch_001.pth'}")
    state = resumed.state_dict()
    assert all((value == state[key]).all() for key, value in trainer.state_dict().items())
