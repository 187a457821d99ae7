"""Train SplatNLP's set completion model from tokenized.csv."""

import argparse
import json
import os
import random
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from jaxtrain.systems.set_completion import (
    NULL,
    PAD,
    SetCompletionModel,
    TrainingConfig,
    generate_dataloaders,
    generate_tokenized_datasets,
    load_json,
    test_model,
    train_model,
)


def parse_args():
    parser = argparse.ArgumentParser(description="Train SetCompletionModel")
    for name in ("data_path", "vocab_path", "weapon_vocab_path", "output_dir"):
        parser.add_argument(f"--{name}", type=str, required=True)
    parser.add_argument("--embedding_dim", type=int, default=32)
    parser.add_argument("--hidden_dim", type=int, default=256)
    parser.add_argument("--num_layers", type=int, default=3)
    parser.add_argument("--num_heads", type=int, default=8)
    parser.add_argument("--num_inducing_points", type=int, default=32)
    parser.add_argument("--use_layer_norm", type=bool, default=False)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--num_epochs", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--device", type=str, default="auto")
    parser.add_argument("--fraction", type=float, default=1.0)
    parser.add_argument("--random_state", type=int, default=42)
    parser.add_argument("--verbose", type=bool, default=False)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--clip_grad_norm", type=float, default=1.0)
    parser.add_argument("--scheduler_factor", type=float, default=0.1)
    parser.add_argument("--scheduler_patience", type=int, default=2)
    parser.add_argument("--use_mixed_precision", type=bool, default=False)
    parser.add_argument("--num_workers", type=int, default=4)
    parser.add_argument("--metric_update_interval", type=int, default=1)
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--num_masks_per_set", type=int, default=5)
    parser.add_argument("--include-null", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--checkpoint_interval", type=int, default=1)
    return parser.parse_args()


def main():
    args = parse_args()
    random.seed(args.random_state)
    np.random.seed(args.random_state)
    torch.manual_seed(args.random_state)
    rank = 0
    if args.distributed:
        torch.distributed.init_process_group(backend="nccl")
        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)

    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    vocab = load_json(args.vocab_path)
    weapon_vocab = load_json(args.weapon_vocab_path)
    df = pd.read_csv(args.data_path, sep="\t", header=0)
    df["ability_tags"] = df["ability_tags"].apply(json.loads)

    train_df, val_df, test_df = generate_tokenized_datasets(
        df, frac=args.fraction, random_state=args.random_state, validation_size=0.1, test_size=0.2
    )
    config = TrainingConfig(
        num_epochs=args.num_epochs,
        patience=args.patience,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        clip_grad_norm=args.clip_grad_norm,
        scheduler_factor=args.scheduler_factor,
        scheduler_patience=args.scheduler_patience,
        device=args.device,
        distributed=args.distributed,
    )
    train_dl, val_dl, test_dl = generate_dataloaders(
        train_df,
        val_df,
        test_df,
        vocab_size=len(vocab),
        pad_token_id=vocab[PAD],
        num_instances_per_set=args.num_masks_per_set,
        null_token_id=vocab[NULL] if args.include_null else None,
        distributed=args.distributed,
        batch_size=args.batch_size,
        num_workers=args.num_workers,
        pin_memory=config.device == "cuda",
        persistent_workers=config.device == "cuda" and args.num_workers > 0,
    )
    params = {
        "vocab_size": len(vocab),
        "weapon_vocab_size": len(weapon_vocab),
        "embedding_dim": args.embedding_dim,
        "hidden_dim": args.hidden_dim,
        "output_dim": len(vocab),
        "num_layers": args.num_layers,
        "num_heads": args.num_heads,
        "num_inducing_points": args.num_inducing_points,
        "use_layer_norm": args.use_layer_norm,
        "dropout": args.dropout,
        "pad_token_id": vocab[PAD],
    }
    model = SetCompletionModel(**params).to(config.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train_dl)} batches")
    steps = []

    def on_epoch(epoch, train, val):
        if rank == 0:
            print(f"epoch {epoch}: train loss {train['loss']:.4f} f1 {train['f1']:.4f}, val loss {val['loss']:.4f}")

    history, model = train_model(
        model,
        train_dl,
        val_dl,
        config,
        vocab,
        verbose=args.verbose,
        scaler=torch.amp.GradScaler("cuda") if args.use_mixed_precision else None,
        metric_update_interval=args.metric_update_interval,
        ddp=args.distributed,
        checkpoint_dir=output_dir / "checkpoints",
        checkpoint_interval=args.checkpoint_interval,
        epoch_callback=on_epoch,
        step_callback=lambda step, values: steps.append((step, values["train/loss_step"], values["train/lr"])),
    )
    metrics = test_model(model, test_dl, config, vocab, verbose=args.verbose)
    if rank == 0:
        torch.save(model.state_dict(), output_dir / "model.pth")
        for name, value in (
            ("metrics_history.json", history),
            ("test_metrics.json", metrics),
            ("model_params.json", params),
            ("training_args.json", vars(args)),
            ("steps.json", steps),
        ):
            with open(output_dir / name, "w") as f:
                json.dump(value, f, indent=2)
    if args.distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
