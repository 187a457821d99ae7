"""Scripts written for the original run after changing their imports."""

import numpy as np
import pytest
import torch

from jaxtrain.systems import hjepa
from jaxtrain.systems.hjepa.original.legacy_config import convert
from jaxtrain.systems.hjepa.original.schedules import (
    CosineScheduler,
    EMAScheduler,
    HierarchicalScheduler,
    LinearScheduler,
)
from jaxtrain.systems.hjepa.original.torch_checkpoint import read_checkpoint

README = {
    "model": {
        "encoder_type": "vit_tiny_patch16_224",
        "vit": {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2},
        "embed_dim": 16,
        "num_hierarchies": 2,
        "predictor": {"depth": 1, "num_heads": 2},
        "ema": {"momentum": 0.99, "momentum_end": 1.0, "momentum_warmup_epochs": 1},
    },
    "training": {
        "epochs": 1,
        "warmup_epochs": 0,
        "lr": 1.0e-3,
        "min_lr": 1.0e-6,
        "weight_decay": 0.05,
        "optimizer": "adamw",
        "betas": [0.9, 0.95],
        "lr_schedule": "cosine",
        "clip_grad": 3.0,
        "use_amp": True,
        "accumulation_steps": 1,
    },
    "data": {"image_size": 16},
    "masking": {"num_masks": 3, "mask_scale": [0.1, 0.3]},
    "loss": {"type": "smoothl1"},
    "logging": {"experiment_name": "readme", "tensorboard": {"enabled": False}},
}


@pytest.mark.slow
def test_the_readmes_script_trains_a_torch_module_in_place(tmp_path):
    config = README | {"checkpoint": {"checkpoint_dir": str(tmp_path)}}
    model = hjepa.create_model(config)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    images = torch.utils.data.TensorDataset(torch.randn(16, 3, 16, 16), torch.zeros(16, dtype=torch.long))
    loader = torch.utils.data.DataLoader(images, batch_size=8)
    trainer = hjepa.HJEPATrainer(
        model=model,
        train_loader=loader,
        val_loader=loader,
        optimizer=hjepa.create_optimizer(model, config),
        loss_fn=hjepa.create_loss_from_config(config),
        masking_fn=None,
        config=config,
        device="cuda",
    )
    history = trainer.train()
    assert np.isfinite(history["train_history"][0]["loss"])
    moved = [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]
    assert "context_encoder.vit.blocks.0.attn.qkv.weight" in moved
    saved = read_checkpoint(tmp_path / "checkpoint_latest.pth")
    assert saved["global_step"] == 2
    np.testing.assert_array_equal(
        saved["model_state_dict"]["predictor.head.weight"], model.state_dict()["predictor.head.weight"].numpy()
    )


def test_a_checkpoint_of_the_original_goes_on_with_its_optimizer_at_its_step(tmp_path):
    config = README | {"checkpoint": {"checkpoint_dir": str(tmp_path / "new")}}
    config["training"] = config["training"] | {"epochs": 2}
    model = hjepa.create_model(config)
    optimizer = hjepa.create_optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    manager = hjepa.CheckpointManager(tmp_path / "old")
    path = manager.save_checkpoint(0, model, optimizer, extra_state={"global_step": 2})
    images = torch.utils.data.TensorDataset(torch.randn(16, 3, 16, 16), torch.zeros(16, dtype=torch.long))
    loader = torch.utils.data.DataLoader(images, batch_size=8)
    trainer = hjepa.HJEPATrainer(model, loader, optimizer=optimizer, config=config, resume_checkpoint=path)
    assert trainer.train()["val_history"] == []
    assert (trainer.current_epoch, trainer.global_step) == (1, 4)
    assert optimizer.state[model.predictor.head.weight]["step"] == 3
    assert optimizer.param_groups[0]["lr"] == trainer.lr_scheduler(3)


def test_keys_that_the_original_ignores_take_effect():
    original = {
        "model": {"use_fpn": True, "fpn_feature_dim": 32, "use_rope": True, "ema": {"momentum": 0.98}},
        "training": {"epochs": 3, "min_lr": 1e-5, "accumulation_steps": 4},
        "data": {"batch_size": 8},
        "masking": {"num_target_masks": 6},
    }
    got = convert(original)
    assert got["model"]["fpn"] == {"use_fpn": True, "feature_dim": 32}
    assert got["model"]["rope"] == {"use_rope": True}
    assert got["model"]["ema"] == {"momentum": 0.98}
    assert got["optim"]["schedule"]["min_lr"] == 1e-5
    assert (got["data"]["batch_size"], got["train"]["accumulate_steps"]) == (32, 4)
    assert got["masking"]["num_masks"] == 6


@pytest.mark.parametrize(("name", "kind"), [("adamw", "AdamW"), ("adam", "Adam"), ("SGD", "SGD")])
def test_create_optimizer_takes_the_originals_names(name, kind):
    made = hjepa.create_optimizer(
        torch.nn.Linear(1, 1), {"training": {"optimizer": name, "lr": 0.5, "weight_decay": 0.1}}
    )
    assert type(made).__name__ == kind
    assert (made.param_groups[0]["lr"], made.param_groups[0]["weight_decay"]) == (0.5, 0.1)


def test_schedulers_by_name():
    cosine = hjepa.create_lr_scheduler("adamw", 1.5e-4, 1e-6, 300, 1000, 40, "cosine")
    assert isinstance(cosine, CosineScheduler)
    assert cosine(20_000) == pytest.approx(0.75e-4)
    assert cosine.get_epoch_value(300) == pytest.approx(1e-6)
    linear = hjepa.create_lr_scheduler(base_lr=1.0, min_lr=0.0, epochs=2, steps_per_epoch=10, schedule_type="linear")
    assert isinstance(linear, LinearScheduler)
    assert linear(5) == pytest.approx(0.75)
    ema = hjepa.create_ema_scheduler(0.996, 1.0, 300, 1000, 30)
    assert isinstance(ema, EMAScheduler)
    assert (ema(0), ema.step(165_000), ema(10**6)) == pytest.approx((0.996, 0.998, 1.0))
    levels = HierarchicalScheduler([cosine, linear])
    assert levels.get_level_value(5, 1) == levels(5)[1] == pytest.approx(0.75)


def test_the_metrics_logger_averages_what_it_accumulates(tmp_path):
    with hjepa.MetricsLogger("x", tmp_path, use_wandb=False) as logger:
        logger.accumulate_metrics({"loss": torch.tensor(1.0)})
        logger.accumulate_metrics({"loss": 3.0})
        assert logger.log_accumulated_metrics(prefix="train/") == {"loss": 2.0}
        logger.log_images("pictures", torch.rand(5, 3, 4, 4), step=1)
        logger.log_model_weights(torch.nn.Linear(2, 2), step=1)
    assert list((tmp_path / "tensorboard").iterdir())
