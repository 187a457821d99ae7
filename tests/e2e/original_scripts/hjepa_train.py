"""Train H-JEPA from a YAML file."""

import argparse
import logging
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import yaml

from jaxtrain.systems.hjepa import (
    HierarchicalMaskGenerator,
    HJEPATrainer,
    build_dataloader,
    build_dataset,
    build_multi_dataset,
    create_hjepa_from_config,
    create_loss_from_config,
    create_optimizer,
    setup_logging,
)

logger = logging.getLogger(__name__)


def parse_args():
    parser = argparse.ArgumentParser(description="Train H-JEPA")
    parser.add_argument("--config", type=str, required=True)
    parser.add_argument("--resume", type=str, default=None)
    parser.add_argument("--device", type=str, default=None)
    parser.add_argument("--output_dir", type=str, default=None)
    parser.add_argument("--batch_size", type=int, default=None)
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--lr", type=float, default=None)
    parser.add_argument("--weight_decay", type=float, default=None)
    parser.add_argument("--warmup_epochs", type=int, default=None)
    parser.add_argument("--data_path", type=str, default=None)
    parser.add_argument("--num_workers", type=int, default=None)
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--world_size", type=int, default=1)
    parser.add_argument("--no_wandb", action="store_true")
    parser.add_argument("--debug", action="store_true")
    return parser.parse_args()


def load_config(path):
    with open(path) as f:
        return yaml.safe_load(f)


def override_config(config, args):
    for flag, section, key in (
        ("batch_size", "data", "batch_size"),
        ("data_path", "data", "data_path"),
        ("num_workers", "data", "num_workers"),
        ("epochs", "training", "epochs"),
        ("lr", "training", "lr"),
        ("weight_decay", "training", "weight_decay"),
        ("warmup_epochs", "training", "warmup_epochs"),
    ):
        value = getattr(args, flag)
        if value is not None:
            config[section][key] = value
    if args.output_dir is not None:
        config["checkpoint"]["checkpoint_dir"] = os.path.join(args.output_dir, "checkpoints")
        config["logging"]["log_dir"] = os.path.join(args.output_dir, "logs")
    if args.no_wandb:
        config["logging"].setdefault("wandb", {})["enabled"] = False
    return config


def validate_config(config):
    for section in ("model", "data", "training", "masking", "loss", "checkpoint", "logging"):
        if section not in config:
            raise ValueError(f"Missing required config section: {section}")
    weights = config["loss"].get("hierarchy_weights")
    if weights is not None and len(weights) != config["model"]["num_hierarchies"]:
        raise ValueError("hierarchy_weights must match num_hierarchies")


def set_seed(seed):
    np.random.seed(seed)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def build_loaders(config):
    data = config["data"]
    common = {"image_size": data["image_size"], "color_jitter": data.get("augmentation", {}).get("color_jitter", 0.4)}
    if data.get("use_multi_dataset", False):
        train_dataset = build_multi_dataset(
            data["datasets"],
            data["data_path"],
            split="train",
            sampling_strategy=data.get("sampling_strategy", "weighted"),
            **common,
        )
    else:
        train_dataset = build_dataset(data["dataset"], data["data_path"], split="train", download=True, **common)
    options = {
        "batch_size": data["batch_size"],
        "num_workers": data["num_workers"],
        "pin_memory": data.get("pin_memory", True),
    }
    train_loader = build_dataloader(train_dataset, shuffle=True, drop_last=True, **options)
    val_loader = None
    if config.get("evaluation", {}).get("eval_frequency", 0) > 0:
        name = data["datasets"][0]["name"] if data.get("use_multi_dataset") else data["dataset"]
        val_dataset = build_dataset(name, data["data_path"], split="val", image_size=data["image_size"])
        val_loader = build_dataloader(val_dataset, shuffle=False, drop_last=True, **options)
    return train_loader, val_loader


def main():
    args = parse_args()
    config = override_config(load_config(args.config), args)
    log_dir = Path(config["logging"]["log_dir"])
    log_dir.mkdir(parents=True, exist_ok=True)
    setup_logging(log_file=str(log_dir / "train.log"), level=logging.DEBUG if args.debug else logging.INFO)
    try:
        validate_config(config)
        set_seed(config.get("seed", 42))
        device = args.device or config.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        if args.distributed:
            dist.init_process_group("nccl", rank=args.local_rank, world_size=args.world_size)

        train_loader, val_loader = build_loaders(config)
        logger.info("train batches: %d, val batches: %s", len(train_loader), val_loader and len(val_loader))

        model = create_hjepa_from_config(config).to(device)
        total = sum(p.numel() for p in model.parameters())
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        logger.info("parameters: %s total, %s trainable", f"{total:,}", f"{trainable:,}")

        size = config["data"]["image_size"]
        masking = config["masking"]
        masking_fn = HierarchicalMaskGenerator(
            input_size=(size, size),
            patch_size=16,
            num_hierarchies=config["model"]["num_hierarchies"],
            num_target_masks=masking.get("num_masks", 4),
            base_scale=tuple(masking.get("mask_scale", (0.05, 0.15))),
            aspect_ratio_range=tuple(masking.get("aspect_ratio", (0.75, 1.5))),
        )
        loss_fn = create_loss_from_config(config)
        if isinstance(loss_fn, torch.nn.Module):
            loss_fn = loss_fn.to(device)
        optimizer = create_optimizer(model, config)
        trainer = HJEPATrainer(
            model=model,
            train_loader=train_loader,
            val_loader=val_loader,
            optimizer=optimizer,
            loss_fn=loss_fn,
            masking_fn=masking_fn,
            config=config,
            device=device,
            resume_checkpoint=args.resume,
        )
        trainer.train()
        logger.info("best val loss: %.4f", trainer.best_val_loss)
    except KeyboardInterrupt:
        logger.info("interrupted")
    except Exception:
        logger.exception("training failed")
        sys.exit(1)
    finally:
        if args.distributed and dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
