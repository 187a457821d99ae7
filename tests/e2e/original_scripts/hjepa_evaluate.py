"""Evaluate a trained H-JEPA: linear probe, nearest neighbours, statistics of features, fine-tuning, few shots."""

import argparse
import json
import logging
from pathlib import Path

import numpy as np
import torch
import yaml
from torch.utils.data import DataLoader

from jaxtrain.systems.hjepa import (
    CheckpointManager,
    FeatureQualityAnalyzer,
    FewShotEvaluator,
    FineTuneEvaluator,
    KNNEvaluator,
    LinearProbeEvaluator,
    build_dataset,
    create_hjepa_from_config,
    print_quality_report,
)

logging.basicConfig(level=logging.INFO, format="%(asctime)s - %(levelname)s - %(message)s")
logger = logging.getLogger(__name__)
CLASSES = {"cifar10": 10, "cifar100": 100, "stl10": 10, "imagenet100": 100, "imagenet": 1000}


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--dataset", required=True, choices=sorted(CLASSES))
    parser.add_argument("--num-classes", type=int)
    kinds = ["all", "linear_probe", "knn", "feature_quality", "fine_tune", "few_shot"]
    parser.add_argument("--eval-type", default="all", choices=kinds)
    parser.add_argument("--data-path", default="./data")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--num-workers", type=int, default=4)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--hierarchy-levels", type=int, nargs="+", default=[0])
    parser.add_argument("--linear-probe-epochs", type=int, default=100)
    parser.add_argument("--linear-probe-lr", type=float, default=0.1)
    parser.add_argument("--knn-k", type=int, default=20)
    parser.add_argument("--knn-temperature", type=float, default=0.07)
    parser.add_argument("--fine-tune-epochs", type=int, default=50)
    parser.add_argument("--fine-tune-lr", type=float, default=1e-3)
    parser.add_argument("--freeze-encoder", action="store_true")
    parser.add_argument("--few-shot-n-way", type=int, default=5)
    parser.add_argument("--few-shot-k-shots", type=int, nargs="+", default=[1, 5, 10])
    parser.add_argument("--few-shot-episodes", type=int, default=100)
    parser.add_argument("--output-dir", default="results/evaluation")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


def load_model(args):
    with open(args.config) as f:
        config = yaml.safe_load(f)
    model = create_hjepa_from_config(config)
    manager = CheckpointManager(checkpoint_dir=str(Path(args.checkpoint).parent))
    info = manager.load_checkpoint(args.checkpoint, model, device=args.device)
    logger.info("epoch %s, metrics %s", info["epoch"], info["metrics"])
    return model.to(args.device).eval(), info


def plain(value):
    """Make numpy's numbers JSON's."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (np.floating, np.integer, np.bool_)):
        return value.item()
    return value


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    model, info = load_model(args)
    train_set = build_dataset(args.dataset, args.data_path, split="train", image_size=args.image_size)
    val_set = build_dataset(args.dataset, args.data_path, split="val", image_size=args.image_size)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, num_workers=args.num_workers)
    val_loader = DataLoader(val_set, batch_size=args.batch_size, shuffle=False, num_workers=args.num_workers)
    num_classes = args.num_classes or CLASSES[args.dataset]
    chosen = lambda kind: args.eval_type in ("all", kind)

    results = {"metadata": {"checkpoint": args.checkpoint, "dataset": args.dataset, "epoch": info["epoch"]}}
    for level in args.hierarchy_levels:
        found = {}
        common = {"hierarchy_level": level, "device": args.device}
        if chosen("linear_probe"):
            evaluator = LinearProbeEvaluator(
                model=model, num_classes=num_classes, input_dim=model.embed_dim, pooling="mean", **common
            )
            history = evaluator.train_probe(
                train_loader=train_loader,
                val_loader=val_loader,
                epochs=args.linear_probe_epochs,
                lr=args.linear_probe_lr,
                verbose=args.verbose,
            )
            scores = evaluator.evaluate(val_loader, compute_confusion=True, top_k=2, verbose=args.verbose)
            found["linear_probe"] = {"history": history, **scores}
        if chosen("knn"):
            knn = KNNEvaluator(model, k=args.knn_k, temperature=args.knn_temperature, **common)
            knn.build_knn_index(train_loader)
            found["knn"] = knn.evaluate(val_loader, num_classes, top_k_list=[1, 2], verbose=args.verbose)
        if chosen("feature_quality"):
            analyzer = FeatureQualityAnalyzer(model, **common)
            metrics = analyzer.compute_all_metrics(val_loader, max_samples=1000)
            print_quality_report(metrics, verbose=args.verbose)
            found["feature_quality"] = metrics
        if chosen("fine_tune"):
            tuner = FineTuneEvaluator(model, num_classes, freeze_encoder=args.freeze_encoder, **common)
            found["fine_tune"] = tuner.fine_tune(
                train_loader, val_loader, epochs=args.fine_tune_epochs, lr=args.fine_tune_lr, verbose=args.verbose
            )
        if chosen("few_shot"):
            few = FewShotEvaluator(model, num_classes, **common)
            found["few_shot"] = {
                f"{k}_shot": few.evaluate_few_shot(
                    val_set,
                    n_way=args.few_shot_n_way,
                    k_shot=k,
                    n_query=2,
                    n_episodes=args.few_shot_episodes,
                    verbose=args.verbose,
                )
                for k in args.few_shot_k_shots
            }
        results[f"level_{level}"] = found

    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    with open(output / "evaluation_results.json", "w") as f:
        json.dump(plain(results), f, indent=2)
    logger.info("saved %s", output / "evaluation_results.json")


if __name__ == "__main__":
    main()
