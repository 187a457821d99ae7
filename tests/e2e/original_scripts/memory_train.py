"""Train a memory-augmented transformer from a YAML file."""

import argparse
import logging
import os

import torch

from jaxtrain.systems.memory_lm import MemoryAdapter, MemoryTransformer, Trainer, load_config

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


def main():
    parser = argparse.ArgumentParser(description="Train memory-augmented transformer")
    parser.add_argument("--config", type=str, required=True)
    parser.add_argument("--resume", type=str, default=None)
    parser.add_argument("--init_from", type=str, default=None)
    parser.add_argument("--find_lr", action="store_true")
    args = parser.parse_args()
    if not os.path.exists(args.config):
        raise FileNotFoundError(args.config)
    config = load_config(args.config)
    if args.resume:
        config.training.resume_from_checkpoint = args.resume
    if args.init_from:
        config.training.init_from_checkpoint = args.init_from

    print("=" * 60)
    print(f"base model: {config.model.base_model_name or 'from scratch'}")
    print(f"memory tokens: {config.memory.num_memory_tokens}, chapters: {config.memory.use_chapters}")
    print(f"device: {'cuda' if torch.cuda.is_available() else 'cpu'}")
    print("=" * 60)
    if args.find_lr:
        curve = Trainer.find_lr(config, min_lr=1e-6, max_lr=1e-1, num_steps=5)
        for point in curve:
            print(f"lr {point['lr']:.2e} loss {point['loss']:.4f}")
        return
    trainer = Trainer(config)
    model = trainer.model
    assert isinstance(model, (MemoryAdapter, MemoryTransformer))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{trainable:,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained")
    for group in trainer.optimizer.param_groups:
        print(group.get("name"), group["lr"], sum(p.numel() for p in group["params"]))
    trainer.train()
    print(f"step {trainer.global_step}, best loss {trainer.best_loss:.4f}, {trainer.evaluate()}")


if __name__ == "__main__":
    main()
