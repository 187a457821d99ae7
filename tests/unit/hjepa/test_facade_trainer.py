"""HJEPATrainer in a user's hands: its attributes, its steps one by one, overridden, with parts of the user's own."""

import copy
import json
import pathlib
import re
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from jaxtrain.systems import hjepa

pytestmark = pytest.mark.slow

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "hjepa"
VIT = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}


class TinyModel(nn.Module):
    """What a user's test gives: two encoders and a dict of lists."""

    def __init__(self):
        super().__init__()
        self.context_encoder = nn.Linear(12, 8)
        self.target_encoder = nn.Linear(12, 8).requires_grad_(False)
        self.predictor = nn.Linear(8, 8)

    def forward(self, images, mask):
        patches = images.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        context = self.context_encoder(patches * ~mask[..., None])
        with torch.no_grad():
            target = self.target_encoder(patches)
        return {
            "predictions": [self.predictor(context)],
            "targets": [target],
            "context_features": context,
            "target_features": target,
        }


class TinyLoss(nn.Module):
    def forward(self, predictions, targets, context_features=None):
        loss = (predictions[0] - targets[0]).square().mean()
        return {"loss": loss, "loss_h0": loss}


def masks(batch_size, device):
    drawn = torch.zeros(batch_size, 1, 16, dtype=torch.bool, device=device)
    drawn[..., 3:8] = True
    return {"level_0": {"context": ~drawn[:, 0], "targets": drawn}}


def config_of(tmp_path, **training):
    return {
        "model": {"ema": {"momentum": 0.9, "momentum_end": 1.0}},
        "training": {"epochs": 2, "lr": 0.01, "warmup_epochs": 0, "use_amp": True, **training},
        "checkpoint": {"checkpoint_dir": str(tmp_path / "checkpoints"), "save_frequency": 1},
        "logging": {"tensorboard": {"enabled": False}, "log_frequency": 1},
    }


def tiny(tmp_path, kind=None, loss=None, compiled=True, **training):
    """A trainer of TinyModel. compiled=False: torch runs the step, where a test is about the loop around it."""
    torch.manual_seed(0)
    model = TinyModel()
    loader = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    build = kind or hjepa.HJEPATrainer
    loss = loss or TinyLoss()
    trainer = build(model, loader, loader[:1], optimizer, loss, masks, config_of(tmp_path, **training), device="cpu")
    trainer._batch_loss.torch_first = 0 if compiled else 10**9  # no batch in torch before those that are compiled
    trainer._batch_loss.compiled = trainer._batch_loss.compiled if compiled else None
    return trainer


def real(tmp_path, *, batches=2, batch_size=8, **options):
    """The original's own parts, small."""
    torch.manual_seed(0)
    model = hjepa.HJEPA(
        "vit_tiny_patch16_224", 16, 16, 1, 2, 2.0, num_hierarchies=2, vit=VIT, **options.pop("model", {})
    )
    images = torch.utils.data.TensorDataset(torch.randn(batches * batch_size, 3, 16, 16))
    loader = torch.utils.data.DataLoader(images, batch_size)
    config = config_of(tmp_path, **options.pop("training", {})) | {
        "loss": {"type": "mse"},
        "masking": {"mask_scale": [0.1, 0.3]},
    }
    kind = options.pop("kind", hjepa.HJEPATrainer)
    return kind(model, loader, options.pop("val", loader), config=config, device="cpu", **options)


# ---- construct and inspect


def test_everything_that_a_user_touches_is_there(tmp_path):
    trainer = tiny(tmp_path, clip_grad=1.0, accumulation_steps=3, early_stopping={"enabled": True, "patience": 4})
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    assert (trainer.epochs, trainer.steps_per_epoch, trainer.accumulation_steps, trainer.clip_grad) == (2, 1, 3, 1.0)
    assert (trainer.current_epoch, trainer.global_step, trainer.best_val_loss) == (0, 0, float("inf"))
    assert (trainer.use_amp, trainer.scaler, trainer.device) == (False, None, "cpu")
    assert trainer.lr_scheduler(0) == 0.01
    assert trainer.ema_scheduler(0) == 0.9
    assert trainer.early_stopping.patience == 4
    assert trainer.checkpoint_manager.checkpoint_dir == tmp_path / "checkpoints"
    assert trainer.progress_tracker.total_epochs == 2
    assert trainer.metrics_logger.tb_writer is None
    assert (len(trainer.train_loader), len(trainer.val_loader)) == (3, 1)


# ---- its steps, one by one


def test_a_step_gives_a_tensor_with_its_graph_and_moves_the_target(tmp_path):
    trainer = tiny(tmp_path)
    start = copy.deepcopy(trainer.model)
    loss, terms = trainer._train_step(trainer.train_loader[0], epoch=0, step=0)
    assert loss.requires_grad
    assert {"loss", "loss_h0", "context_std", "target_eff_rank"} <= set(terms)
    assert trainer._batch_loss.compiled is not None
    moved = 0.9 * start.target_encoder.weight + 0.1 * start.context_encoder.weight
    torch.testing.assert_close(trainer.model.target_encoder.weight, moved.detach())
    out = start(trainer.train_loader[0], trainer._mask(4))
    wanted = TinyLoss()(out["predictions"], out["targets"])
    torch.testing.assert_close(loss, wanted["loss"])
    loss.backward()
    (grad,) = torch.autograd.grad(wanted["loss"], start.predictor.weight)
    torch.testing.assert_close(trainer.model.predictor.weight.grad, grad)


def test_an_epoch_counts_steps_and_follows_the_schedule(tmp_path):
    trainer = tiny(tmp_path, compiled=False, accumulation_steps=2)
    found = trainer._train_epoch(0)
    assert (trainer.global_step, len(trainer.progress_tracker.step_times)) == (1, 1)
    assert found["loss"] == pytest.approx(found["loss_h0"])
    assert trainer._validate_epoch(0) == trainer._validate_epoch(0)
    assert trainer._validate_epoch()["loss"] > 0
    trainer._set_lr(trainer.lr_scheduler(1))
    assert trainer.optimizer.param_groups[0]["lr"] == trainer.lr_scheduler(1)


def test_the_target_moves_by_a_momentum_or_a_steps(tmp_path):
    trainer = tiny(tmp_path)
    assert trainer._update_target_encoder(0.5) == 0.5
    assert trainer._update_target_encoder(6) == trainer.ema_scheduler(6) == 1.0
    del trainer.model.target_encoder
    assert trainer._update_target_encoder() == 1.0


@pytest.mark.parametrize("name", ["model_smoothl1_ragged", "model_tier2_end_to_end"])
def test_the_originals_procedure_gives_its_weights_after_three_steps(name, tmp_path):
    case = json.loads((GOLDEN / f"{name}.json").read_text())
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    model = hjepa.HJEPA(encoder_type="vit_tiny_patch16_224", **case["hjepa_kwargs"], vit=case["encoder"]["vit_kwargs"])
    model.load_state_dict({key.removeprefix("param/"): x for key, x in tensors.items() if key.startswith("param/")})
    steps = sorted({int(found.group(1)) for key in tensors if (found := re.match(r"in/step(\d+)/", key))})
    drawn = iter([tensors[f"in/step{step}/mask"] > 0.5 for step in steps])
    config = config_of(tmp_path) | {"compat": "original", "training": case["training_config"]}
    config["loss"], config["model"] = case["loss_config"], {"num_hierarchies": model.num_hierarchies}
    loader = [tensors[f"in/step{step}/images"] for step in steps]
    trainer = hjepa.HJEPATrainer(
        model, loader, masking_fn=lambda batch_size, device: next(drawn), config=config, device="cpu"
    )
    if "in/sigreg_slices" in tensors:
        trainer.loss_fn.sigreg_loss.slices = lambda width: tensors["in/sigreg_slices"]
    trainer._batch_loss.torch_first = 0
    trainer._train_epoch(0)
    loose = case["float64_check"].get("after3_parameters_off_by_more_than_5e-6", {})
    for key, value in model.state_dict().items():
        if key not in loose and not key.endswith("running_mean"):
            np.testing.assert_allclose(value, tensors[f"after3/{key}"], atol=3e-5, err_msg=key)


# ---- overridden


class CustomTrainer(hjepa.HJEPATrainer):
    def _train_step(self, batch, epoch, step):
        loss, loss_dict = super()._train_step(batch, epoch, step)
        self.seen = [*getattr(self, "seen", []), (epoch, step)]
        return loss + 0.01 * self.model.predictor.weight.square().sum(), {**loss_dict, "penalty": 1.0}


def test_an_overridden_step_is_the_one_that_trains(tmp_path, capsys):
    trainer = tiny(tmp_path, CustomTrainer)
    history = trainer.train()
    assert trainer.seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert history["train_history"][0]["penalty"] == 1.0
    assert history["train_history"][1]["loss"] < history["train_history"][0]["loss"]
    assert len(history["val_history"]) == 2
    assert trainer.best_val_loss == min(entry["loss"] for entry in history["val_history"])
    assert "epoch 2/2, train loss" in capsys.readouterr().out


def test_an_overridden_step_is_recorded_once_for_training_and_once_for_validation(tmp_path):
    trainer = tiny(tmp_path, CustomTrainer, warmup_epochs=1)  # rates and counters change at every step
    trainer.train()
    assert len(trainer._batch_loss.compiled.capture.graphs) == 2


def test_an_instances_own_method_counts_too(tmp_path):
    trainer = real(tmp_path)
    trainer._validate_epoch = lambda epoch: {"loss": 1.0}
    assert trainer.train()["val_history"] == [{"loss": 1.0}] * 2


class ReadmeLoss(nn.Module):
    def forward(self, predictions, targets):
        loss = (predictions[0] - targets[0]).abs().mean()
        return loss, {"loss": loss.item()}


class Branching(nn.Module):
    def forward(self, predictions, targets):
        loss = (predictions[0] - targets[0]).square().mean()
        if loss > 1e3:
            loss = loss / 2
        return loss


def test_a_loss_that_cannot_be_compiled_runs_in_torch_and_the_line_is_named(tmp_path, capsys):
    trainer = tiny(tmp_path, loss=Branching(), epochs=1)
    assert np.isfinite(trainer.train()["train_history"][0]["loss"])
    printed = capsys.readouterr().out
    assert "model and loss run in torch, uncompiled" in printed
    assert "if loss > 1e3" in printed


@pytest.mark.parametrize("loss", [ReadmeLoss(), pytest.param(lambda p, t: (p[0] - t[0]).square().mean(), id="lambda")])
def test_losses_of_the_users_own_train(loss, tmp_path):
    history = tiny(tmp_path, loss=loss).train()["train_history"]
    assert history[1]["loss"] < history[0]["loss"]


def test_a_mock_is_called_and_not_recorded(tmp_path):
    weight = torch.ones((), requires_grad=True)
    loss = mock.MagicMock(side_effect=lambda **given: {"loss": weight * 2})
    trainer = tiny(tmp_path, loss=loss)
    got, _ = trainer._train_step(trainer.train_loader[0], 0, 0)
    assert (got.item(), set(loss.call_args.kwargs)) == (2.0, {"predictions", "targets", "context_features"})


def test_a_loss_with_a_leaf_of_its_own_has_its_gradient(tmp_path, capsys):
    trainer = tiny(tmp_path, loss=lambda predictions, targets: torch.tensor(2.0, requires_grad=True))
    trainer._backward(trainer._train_step(trainer.train_loader[0], 0, 0)[0])
    assert "has no gradient to the model's parameters" in capsys.readouterr().out


def test_another_model_or_loss_set_later_is_the_one_that_counts(tmp_path):
    trainer = tiny(tmp_path)
    trainer.ema_scheduler = lambda step: 1.0
    before = trainer._train_step(trainer.train_loader[0], 0, 0)[0]
    trainer.loss_fn = lambda predictions, targets: 3 * TinyLoss()(predictions, targets)["loss"]
    torch.testing.assert_close(trainer._train_step(trainer.train_loader[0], 0, 0)[0], 3 * before)


def test_a_number_from_an_overridden_epoch_is_its_loss(tmp_path):
    trainer = tiny(tmp_path, compiled=False)
    trainer._train_epoch, trainer._validate_epoch = lambda epoch: 0.5, lambda epoch: 0.25
    assert trainer.train()["train_history"] == [{"loss": 0.5}] * 2
    assert trainer.best_val_loss == 0.25


def test_rates_per_level(tmp_path):
    trainer = tiny(tmp_path, compiled=False)
    model = trainer.model
    parts = (model.context_encoder, model.predictor)
    trainer.optimizer = torch.optim.AdamW([{"params": part.parameters()} for part in parts])
    levels = [hjepa.CosineScheduler(base, 0.0, epochs=2, steps_per_epoch=3) for base in (0.1, 0.01)]
    trainer.lr_scheduler = hjepa.HierarchicalScheduler(levels)
    trainer.train()
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [level(5) for level in levels]


# ---- saved and resumed


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path):
    whole = tiny(tmp_path / "whole", CustomTrainer, compiled=False)
    whole.train()
    tiny(tmp_path / "half", CustomTrainer, compiled=False).train()
    first = tmp_path / "half" / "checkpoints" / "checkpoint_epoch_0000.pth"
    again = tiny(tmp_path / "again", CustomTrainer, compiled=False)
    again._load_checkpoint(first)
    assert (again.current_epoch, again.global_step) == (1, 3)
    again.train()
    assert torch.equal(again.model.predictor.weight, whole.model.predictor.weight)
    assert again.best_val_loss == whole.best_val_loss
    assert again.optimizer.state_dict()["state"][0]["step"] == 6


def test_early_stopping_ends_a_run(tmp_path, capsys):
    stopping = {"enabled": True, "patience": 1, "min_delta": 1e9}
    trainer = tiny(tmp_path, CustomTrainer, compiled=False, epochs=9, early_stopping=stopping)
    assert len(trainer.train()["train_history"]) == 2
    assert "early stop at epoch 2" in capsys.readouterr().out


# ---- the original's own parts


def test_a_run_leaves_true_objects_and_the_originals_files(tmp_path):
    trainer = real(tmp_path)
    before = trainer.model.predictor.head.weight.clone()
    history = trainer.train()
    assert not torch.equal(trainer.model.predictor.head.weight, before)
    assert (trainer.current_epoch, trainer.global_step) == (1, 4)
    assert trainer.best_val_loss == pytest.approx(min(entry["loss"] for entry in history["val_history"]))
    parameters = dict(trainer.model.named_parameters())
    state = trainer.optimizer.state[parameters["predictor.head.weight"]]
    assert state["step"] == 4
    assert state["exp_avg"].abs().sum() > 0
    folder = tmp_path / "checkpoints"
    assert {"checkpoint_epoch_0000.pth", "checkpoint_epoch_0001.pth", "checkpoint_latest.pth"} <= {
        path.name for path in folder.iterdir()
    }
    saved = torch.load(folder / "checkpoint_epoch_0000.pth", weights_only=True)
    assert (saved["epoch"], saved["global_step"]) == (0, 2)
    assert saved["optimizer_state_dict"]["state"]
