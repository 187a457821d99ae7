"""Train the Sherlock autoencoder from a YAML file."""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

import torch
import yaml

from jaxtrain.systems.fmri_autoencoder import (
    SherlockAutoencoder,
    SherlockDataset,
    Trainer,
    TrainingConfig,
    cleanup_distributed,
    create_autoencoder,
    setup_distributed,
)


def parse_args():
    parser = argparse.ArgumentParser(description="Train Sherlock autoencoder")
    parser.add_argument("--config", type=str, default="examples/train_config.yaml")
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--data_dir", type=str, default=None)
    return parser.parse_args()


def create_training_config(values):
    fields = {field.name for field in dataclasses.fields(TrainingConfig)}
    return TrainingConfig(**{name: value for name, value in values.items() if name in fields})


def create_datasets(values, data_dir):
    data = values.get("data", {})
    options = {
        "data_dir": data_dir or data.get("data_dir", "data/"),
        "subjects": data.get("subjects", "all"),
        "apply_hrf": data.get("apply_hrf", True),
        "mode": data.get("mode", "per_subject"),
    }
    return SherlockDataset(split="train", **options), SherlockDataset(split="val", **options)


def create_model(values):
    model = values.get("model", {})
    common = {
        "video_height": model.get("video_height", 90),
        "video_width": model.get("video_width", 160),
        "audio_mels": model.get("audio_mels", 128),
        "text_dim": model.get("text_dim", 1024),
        "n_voxels": model.get("n_voxels", 85810),
        "bottleneck_dim": model.get("bottleneck_dim", 8000),
        "reconstruction_weight": values.get("reconstruction_weight", 1.0),
        "fmri_weight": values.get("fmri_weight", 1.0),
    }
    if "decoder_hidden_dim" in model:
        return SherlockAutoencoder(**common, decoder_hidden_dim=model["decoder_hidden_dim"])
    return create_autoencoder(**common)


def main():
    args = parse_args()
    if not Path(args.config).exists():
        print(f"Config file not found: {args.config}")
        sys.exit(1)
    with open(args.config) as f:
        values = yaml.safe_load(f)
    local_rank, world_size = args.local_rank, 1
    if args.distributed:
        local_rank = int(os.environ.get("LOCAL_RANK", max(local_rank, 0)))
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        setup_distributed(local_rank, world_size)
    config = create_training_config(values)
    train_dataset, val_dataset = create_datasets(values, args.data_dir)
    print(f"Train samples: {len(train_dataset)}, Val samples: {len(val_dataset)}")
    model = create_model(values)
    counts = model.get_parameter_count()
    print("Parameters:", counts if isinstance(counts, int) else counts.get("total", counts))
    trainer = Trainer(
        model=model,
        train_dataset=train_dataset,
        val_dataset=val_dataset,
        config=config,
        distributed=args.distributed,
        local_rank=max(local_rank, 0),
        world_size=world_size,
    )
    try:
        history = trainer.train()
        print(f"Best validation loss: {history['best_val_loss']:.4f}")
        print(f"Final training loss: {history['train_history'][-1]['total_loss']:.4f}")
        if history["val_history"]:
            last = history["val_history"][-1]
            print(f"Final fMRI correlation: {last['fmri_correlation']:.4f}, R2: {last['fmri_r2']:.4f}")
    except KeyboardInterrupt:
        trainer.save_checkpoint(trainer.current_epoch, is_final=True)
        print("Interrupted; set resume_from in the YAML to go on")
    finally:
        if args.distributed:
            cleanup_distributed()
    print("Device:", trainer.device, "CUDA:", torch.cuda.is_available())


if __name__ == "__main__":
    main()
