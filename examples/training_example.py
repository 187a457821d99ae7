"""H-JEPA through the original's names, in five parts that run on a CPU in about a minute.

    python examples/training_example.py            # all five
    python examples/training_example.py resume     # one of: basic resume hierarchical monitoring checkpoints

Data: scikit-learn's digits. For your own, change CONFIG["data"] (docs/originals/hjepa.md), or give any DataLoader of
images, or of tuples that begin with images.
"""

import argparse
import pathlib

import torch

from jaxtrain.systems.hjepa import (
    CheckpointManager,
    CosineScheduler,
    HierarchicalScheduler,
    HJEPATrainer,
    create_hjepa_model,
    create_loss_function,
    create_masking_function,
    create_optimizer,
    create_train_loader,
    create_val_loader,
)

CONFIG = {
    "seed": 0,
    "model": {
        "encoder_type": "vit_tiny_patch16_224",
        "vit": {"patch_size": 2, "embed_dim": 32, "depth": 2, "num_heads": 2, "in_chans": 1},
        "num_hierarchies": 2,
        "predictor": {"depth": 1, "num_heads": 2},
        "ema": {"momentum": 0.99, "momentum_end": 1.0},
    },
    "data": {"dataset": "digits", "image_size": 8, "batch_size": 128, "augmentation": {"color_jitter": 0.0}},
    "training": {
        "epochs": 3,
        "warmup_epochs": 1,
        "lr": 1e-3,
        "weight_decay": 0.05,
        "optimizer": "adamw",
        "clip_grad": 3.0,
    },
    "masking": {"num_masks": 2, "mask_scale": [0.1, 0.3]},
    "loss": {"type": "smoothl1"},
    "logging": {"experiment_name": "digits", "log_frequency": 10, "tensorboard": {"enabled": False}},
}


def parts(folder: pathlib.Path, **training) -> dict:
    """Everything that HJEPATrainer takes, from the config."""
    config = CONFIG | {
        "training": CONFIG["training"] | training,
        "checkpoint": {"checkpoint_dir": str(folder), "save_frequency": 1, "keep_best_n": 2},
    }
    model = create_hjepa_model(config)
    return {
        "model": model,
        "train_loader": create_train_loader(config),
        "val_loader": create_val_loader(config),
        "optimizer": create_optimizer(model, config),
        "loss_fn": create_loss_function(config),
        "masking_fn": create_masking_function(config),
        "config": config,
        "device": "cuda",  # the CPU where there is none
    }


def basic(folder: pathlib.Path) -> HJEPATrainer:
    """1. Basic training: one loop in Python, model and loss compiled."""
    trainer = HJEPATrainer(**parts(folder))
    history = trainer.train()
    print(f"basic: validation loss {history['best_val_loss']:.4f} after {trainer.global_step} steps")
    return trainer


def resume(folder: pathlib.Path) -> HJEPATrainer:
    """2. Go on from a checkpoint: weights, optimizer, place in the schedule, best loss."""
    HJEPATrainer(**parts(folder / "first", epochs=2)).train()
    checkpoint = folder / "first" / "checkpoint_latest.pth"
    trainer = HJEPATrainer(**parts(folder / "second", epochs=4), resume_checkpoint=checkpoint)
    print(f"resume: went on at epoch {trainer.current_epoch}, step {trainer.global_step}")
    trainer.train()
    return trainer


def hierarchical(folder: pathlib.Path) -> HJEPATrainer:
    """3. Learning rates per hierarchy level: one parameter group and one schedule each."""
    given = parts(folder)
    model = given["model"]
    levels = [list(projection.parameters()) for projection in model.hierarchy_projections]
    own = {id(parameter) for level in levels for parameter in level}
    shared = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
    given["optimizer"] = torch.optim.AdamW([{"params": group} for group in (shared, *levels)], weight_decay=0.05)
    trainer = HJEPATrainer(**given)
    shape = {"final_value": 1e-6, "epochs": trainer.epochs, "steps_per_epoch": trainer.steps_per_epoch}
    rates = [CosineScheduler(base_value=base, warmup_epochs=1, **shape) for base in (1e-3, 1e-3, 5e-4)]
    trainer.lr_scheduler = HierarchicalScheduler(rates)
    trainer.train()
    print(f"hierarchical: rates at the end {[round(group['lr'], 7) for group in trainer.optimizer.param_groups]}")
    return trainer


class MonitoringTrainer(HJEPATrainer):
    """4. Your own monitoring: extend a step, an epoch, the metrics."""

    def _train_step(self, batch, epoch, step):
        loss, loss_dict = super()._train_step(batch, epoch, step)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss {loss.item()} at epoch {epoch}, step {step}")
        return loss, {**loss_dict, "images_seen": float(self.global_step * self.train_loader.batch_size)}

    def _compute_collapse_metrics(self, context_features, target_features):
        found = super()._compute_collapse_metrics(context_features, target_features)
        return found | {"target_mean": target_features.mean().item()}

    def _log_epoch_summary(self, epoch, train_metrics, val_metrics):
        super()._log_epoch_summary(epoch, train_metrics, val_metrics)
        print(f"monitoring: images seen {train_metrics['images_seen']:.0f} on average")


def monitoring(folder: pathlib.Path) -> HJEPATrainer:
    trainer = MonitoringTrainer(**parts(folder, epochs=2))
    trainer.train()
    return trainer


def checkpoints(folder: pathlib.Path) -> CheckpointManager:
    """5. Checkpoints: the best N, the latest, the best; loaded into torch objects."""
    given = parts(folder)
    model, optimizer = given["model"], given["optimizer"]
    manager = CheckpointManager(folder, keep_best_n=2, save_frequency=2, metric_name="val_loss", mode="min")
    for epoch, val_loss in enumerate((1.0, 0.8, 0.9, 0.7)):
        is_best = manager.update_best_metric(val_loss)
        if manager.should_save(epoch) or is_best:
            manager.save_checkpoint(epoch, model, optimizer, metrics={"val_loss": val_loss}, is_best=is_best)
    found = manager.load_checkpoint(manager.get_best_checkpoint(), model, optimizer)
    kept = sorted(path.name for path in folder.glob("*.pth"))
    print(f"checkpoints: best of epoch {found['epoch']}, {found['metrics']}; kept {', '.join(kept)}")
    return manager


PARTS = {f.__name__: f for f in (basic, resume, hierarchical, monitoring, checkpoints)}


def main(argv: list[str] | None = None) -> None:
    """Run the parts named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*PARTS, []], help=", ".join(PARTS))
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/training_example"))
    arguments = parser.parse_args(argv)
    for name in arguments.parts or PARTS:
        PARTS[name](arguments.folder / name)


if __name__ == "__main__":
    main()
