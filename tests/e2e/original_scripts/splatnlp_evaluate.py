"""Predict abilities with a trained model and reconstruct a build from a partial one."""

import argparse
import json

import pandas as pd
import torch

from jaxtrain.systems.set_completion import (
    PAD,
    AbilityToken,
    Allocator,
    Build,
    SetCompletionHook,
    SetCompletionModel,
    SparseAutoencoder,
    TrainingConfig,
    build_predict_abilities,
    generate_dataloaders,
    load_json,
    reconstruct_build,
    tokenize_build,
    validate,
)


def main():
    parser = argparse.ArgumentParser()
    for name in ("model", "params", "vocab", "weapon_vocab", "data", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--sae")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    vocab, weapon_vocab, params = load_json(args.vocab), load_json(args.weapon_vocab), load_json(args.params)
    model = SetCompletionModel(**params)
    model.load_state_dict(torch.load(args.model, map_location=args.device, weights_only=True))
    model.to(args.device).eval()

    df = pd.read_csv(args.data, sep="\t")
    df["ability_tags"] = df["ability_tags"].map(json.loads)
    _, val_dl, _ = generate_dataloaders(df, df, df, len(vocab), vocab[PAD], batch_size=16)
    config = TrainingConfig(1, 1, 1e-4, 0.0, 1.0, 0.1, 2, device=args.device)
    metrics = validate(model, val_dl, torch.nn.BCEWithLogitsLoss(), config, vocab, verbose=False)

    hook = None
    if args.sae:
        state = torch.load(args.sae, map_location=args.device, weights_only=True)
        features, width = state["encoder.weight"].shape
        sae = SparseAutoencoder(width, expansion_factor=features / width)
        sae.load_state_dict(state)
        hook = SetCompletionHook(sae, no_change=True)
        model.output_layer.register_forward_pre_hook(hook)

    tokens = tokenize_build({"swim_speed_up": 13, "ink_saver_main": 6, "ninja_squid": 10})
    tokens = [token for token in tokens if token in vocab]
    weapon = next(iter(weapon_vocab))
    predict = build_predict_abilities(vocab, weapon_vocab, hook=hook, device=torch.device(args.device))
    frame = predict(model, tokens, weapon, False, True)
    probabilities = build_predict_abilities(vocab, weapon_vocab, hook=hook, device=args.device, output_type="dict")
    builds = reconstruct_build(
        predict_fn=lambda context, weapon_id: probabilities(model, context, weapon_id, False, True),
        weapon_id=weapon,
        initial_context=tokens,
        allocator=Allocator(),
        beam_size=2,
        max_steps=3,
        top_k=1,
    )
    capstones = {token: AbilityToken.from_vocab_entry(token) for token in tokens}
    allocated = Allocator().allocate(capstones)
    best = builds[0] if isinstance(builds, list) and builds else builds
    results = {
        "metrics": metrics,
        "predictions": frame.to_dict(orient="records"),
        "build": best.to_dict() if isinstance(best, Build) else None,
        "allocated": allocated[0].to_dict() if isinstance(allocated, tuple) else allocated.to_dict(),
    }
    with open(args.output, "w") as f:
        json.dump(results, f, indent=2, default=str)
    print(frame.head())


if __name__ == "__main__":
    main()
