"""Evaluate a criteria checkpoint on a whole CSV file."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from sklearn.metrics import classification_report, confusion_matrix, f1_score, roc_auc_score
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from jaxtrain.systems.criteria_evidence import CriteriaDataset, Evaluator, get_device, set_seed
from jaxtrain.systems.criteria_evidence.original.project import Criteria as Model


def main():
    path, *overrides = sys.argv[1:]
    cfg = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(overrides))
    set_seed(cfg.training.seed)
    device = get_device()
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.pretrained_model)
    dataset = CriteriaDataset(cfg.dataset.path, tokenizer, max_length=cfg.dataset.max_length)
    loader = DataLoader(dataset, batch_size=cfg.get("eval_batch_size", cfg.training.eval_batch_size))
    model = Model(cfg.model.pretrained_model, num_labels=2, classifier_dropout=cfg.model.classifier_dropout)
    checkpoint = torch.load(cfg.checkpoint, map_location=device, weights_only=True)
    model.load_state_dict(checkpoint["model_state_dict"])
    model.to(device).eval()
    print(f"epoch {checkpoint['epoch']}, best {checkpoint['best_metric_value']}")

    labels, probabilities = [], []
    with torch.no_grad():
        for batch in loader:
            batch = {key: value.to(device) for key, value in batch.items()}
            logits = model(batch["input_ids"], batch["attention_mask"])
            probabilities.append(torch.softmax(logits, dim=-1).cpu().numpy())
            labels.append(batch["labels"].cpu().numpy())
    labels, probabilities = np.concatenate(labels), np.concatenate(probabilities)
    predictions = probabilities.argmax(-1)
    results = {
        "accuracy": float((labels == predictions).mean()),
        "f1_macro": f1_score(labels, predictions, average="macro", zero_division=0),
        "auroc": roc_auc_score(labels, probabilities[:, 1]),
        "confusion_matrix": confusion_matrix(labels, predictions, labels=[0, 1]).tolist(),
        "classification_report": classification_report(
            labels, predictions, labels=[0, 1], target_names=["Negative", "Positive"], zero_division=0
        ),
        "total_samples": len(labels),
    }
    evaluator = Evaluator(model, device, task_type="criteria", criterion=nn.CrossEntropyLoss())
    scores = evaluator.evaluate(loader, class_names=["Negative", "Positive"])
    assert abs(scores["accuracy"] - results["accuracy"]) < 1e-9
    assert np.array_equal(np.asarray(evaluator.predict(loader)), predictions)
    output = Path(cfg.output_dir) / "evaluation_results.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=2))
    print(results["classification_report"])


if __name__ == "__main__":
    main()
