"""Train a sparse autoencoder on a set completion model's pooled vectors, then test it."""

import argparse
import json
import logging
import sys
from pathlib import Path

import pandas as pd
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from jaxtrain.systems.set_completion import (
    PAD,
    SAEConfig,
    SetCompletionModel,
    SparseAutoencoder,
    convert_ddp_state,
    evaluate_sae_model,
    generate_dataloaders,
    generate_tokenized_datasets,
    load_json,
    setup_hook,
    train_sae_model,
)

logger = logging.getLogger(__name__)


def parse_args():
    parser = argparse.ArgumentParser()
    for name in ("model-checkpoint", "data-csv", "vocab-path", "weapon-vocab-path", "save-dir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--hook-target", default="masked_mean", choices=["masked_mean", "token_ff"])
    parser.add_argument("--hook-layer-index", type=int)
    parser.add_argument("--hook-ff-module-index", type=int)
    parser.add_argument("--primary-embedding-dim", type=int, default=32)
    parser.add_argument("--primary-hidden-dim", type=int, default=512)
    parser.add_argument("--primary-num-layers", type=int, default=3)
    parser.add_argument("--primary-num-heads", type=int, default=8)
    parser.add_argument("--primary-num-inducing", type=int, default=32)
    parser.add_argument("--primary-use-layernorm", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--primary-dropout", type=float, default=0.0)
    parser.add_argument("--expansion-factor", type=float, default=4.0)
    parser.add_argument("--l1-coeff", type=float, default=5e-6)
    parser.add_argument("--target-usage", type=float, default=0.05)
    parser.add_argument("--usage-coeff", type=float, default=1.5)
    parser.add_argument("--dead-neuron-threshold", type=float, default=1e-8)
    parser.add_argument("--kl-warmup-steps", type=int, default=6000)
    parser.add_argument("--kl-period-steps", type=int, default=60000)
    parser.add_argument("--kl-floor", type=float, default=0.05)
    parser.add_argument("--l1-warmup-steps", type=int, default=6000)
    parser.add_argument("--l1-start", type=float, default=0.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--primary-batch-size", type=int, default=32)
    parser.add_argument("--buffer-size", type=int, default=100000)
    parser.add_argument("--sae-batch-size", type=int, default=1024)
    parser.add_argument("--steps-before-train", type=int, default=50000)
    parser.add_argument("--sae-train-steps", type=int, default=4)
    parser.add_argument("--gradient-clip-val", type=float, default=1.0)
    parser.add_argument("--primary-data-fraction", type=float, default=0.005)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--resample-steps", type=int, nargs="*", default=[7000, 14000, 28000])
    parser.add_argument("--resample-weight", type=float, default=0.2)
    parser.add_argument("--resample-bias", type=float, default=0.0)
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


def load_primary_model(args, vocab, weapon_vocab):
    model = SetCompletionModel(
        len(vocab),
        len(weapon_vocab),
        args.primary_embedding_dim,
        args.primary_hidden_dim,
        len(vocab),
        num_layers=args.primary_num_layers,
        num_heads=args.primary_num_heads,
        num_inducing_points=args.primary_num_inducing,
        use_layer_norm=args.primary_use_layernorm,
        dropout=args.primary_dropout,
        pad_token_id=vocab[PAD],
    )
    state = torch.load(args.model_checkpoint, map_location=args.device, weights_only=True)
    try:
        model.load_state_dict(state)
    except RuntimeError:
        model.load_state_dict(convert_ddp_state(state))
    model.to(args.device).eval()
    for parameter in model.parameters():
        parameter.requires_grad = False
    return model


def main():
    args = parse_args()
    save_dir = Path(args.save_dir)
    save_dir.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING,
        format="%(asctime)s - %(name)s - %(levelname)s - %(message)s",
        handlers=[logging.StreamHandler(sys.stdout), logging.FileHandler(save_dir / "sae_training.log")],
    )
    device = torch.device(args.device)
    vocab, weapon_vocab = load_json(args.vocab_path), load_json(args.weapon_vocab_path)
    primary = load_primary_model(args, vocab, weapon_vocab)
    hook = setup_hook(primary, args.hook_layer_index, args.hook_ff_module_index, target=args.hook_target)

    df = pd.read_csv(args.data_csv, sep="\t")
    df["ability_tags"] = df["ability_tags"].apply(json.loads)
    frames = generate_tokenized_datasets(df, frac=args.primary_data_fraction)
    train_dl, val_dl, test_dl = generate_dataloaders(
        *frames,
        vocab_size=len(vocab),
        pad_token_id=vocab[PAD],
        batch_size=args.primary_batch_size,
        num_workers=args.num_workers,
    )
    input_dim = args.primary_hidden_dim
    config = SAEConfig(
        input_dim=input_dim,
        expansion_factor=args.expansion_factor,
        l1_coefficient=args.l1_coeff,
        dead_neuron_threshold=args.dead_neuron_threshold,
        learning_rate=args.lr,
        target_usage=args.target_usage,
        usage_coeff=args.usage_coeff,
    )
    sae = SparseAutoencoder(
        input_dim=input_dim,
        expansion_factor=args.expansion_factor,
        l1_coefficient=args.l1_coeff,
        target_usage=args.target_usage,
        usage_coeff=args.usage_coeff,
        dead_neuron_threshold=args.dead_neuron_threshold,
    ).to(device)
    optimizer = AdamW(sae.parameters(), lr=args.lr)
    before = args.steps_before_train // args.primary_batch_size
    t_max = max(0, args.epochs * len(train_dl) - before) * args.sae_train_steps or args.epochs * len(train_dl)
    scheduler = CosineAnnealingLR(optimizer, T_max=t_max, eta_min=args.lr * 0.1)
    history, sae = train_sae_model(
        primary_model=primary,
        sae_model=sae,
        optimizer=optimizer,
        scheduler=scheduler,
        hook=hook,
        sae_config=config,
        data_loader=train_dl,
        val_loader=val_dl,
        vocab=vocab,
        device=device,
        num_epochs=args.epochs,
        activation_buffer_size=args.buffer_size,
        sae_batch_size=args.sae_batch_size,
        steps_before_sae_train=args.steps_before_train,
        sae_train_steps_per_primary_step=args.sae_train_steps,
        resample_steps=args.resample_steps,
        resample_weight=args.resample_weight,
        resample_bias=args.resample_bias,
        kl_warmup_steps=args.kl_warmup_steps,
        kl_period_steps=args.kl_period_steps,
        kl_floor=args.kl_floor,
        l1_warmup_steps=args.l1_warmup_steps,
        l1_start=args.l1_start,
        gradient_clip_val=args.gradient_clip_val,
        verbose=args.verbose,
    )
    metrics = evaluate_sae_model(primary, sae, hook, test_dl, device, config, vocab, description="Test")
    hook.remove() if hasattr(hook, "remove") else None
    torch.save(sae.state_dict(), save_dir / "sae_model_final.pth")
    with open(save_dir / "sae_run_config.json", "w") as f:
        json.dump({**vars(args), "sae_input_dim": input_dim, "sae_hidden_dim": sae.hidden_dim}, f, indent=4)
    with open(save_dir / "sae_metrics_history.json", "w") as f:
        json.dump(history, f)
    with open(save_dir / "sae_test_metrics.json", "w") as f:
        json.dump(metrics, f, indent=2)
    logger.info("done")


if __name__ == "__main__":
    main()
