"""Fine-tune an encoder on the criteria task."""

import json
import shutil
import sys
from pathlib import Path

import mlflow
import torch
from omegaconf import OmegaConf
from sklearn.metrics import accuracy_score, f1_score, precision_score, recall_score
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, random_split
from transformers import AutoTokenizer, get_scheduler

from jaxtrain.systems.criteria_evidence import (
    CriteriaDataset,
    Trainer,
    configure_mlflow,
    get_device,
    get_optimal_dataloader_kwargs,
    log_config,
    mlflow_run,
    print_system_info,
    prune_directory_except,
    set_seed,
)
from jaxtrain.systems.criteria_evidence.original.project import Criteria as Model


def create_dataloaders(cfg, tokenizer, device):
    dataset = CriteriaDataset(
        csv_path=Path(cfg.dataset.path),
        tokenizer=tokenizer,
        text_column=cfg.dataset.text_column,
        label_column=cfg.dataset.label_column,
        max_length=cfg.dataset.max_length,
    )
    n_train, n_val = int(0.8 * len(dataset)), int(0.1 * len(dataset))
    sizes = [n_train, n_val, len(dataset) - n_train - n_val]
    generator = torch.Generator().manual_seed(cfg.training.seed)
    train, val, test = random_split(dataset, sizes, generator=generator)
    kwargs = get_optimal_dataloader_kwargs(
        device,
        num_workers=cfg.dataset.num_workers,
        pin_memory=cfg.dataset.pin_memory,
        persistent_workers=cfg.dataset.persistent_workers,
        prefetch_factor=cfg.dataset.prefetch_factor,
    )
    return (
        DataLoader(train, batch_size=cfg.training.train_batch_size, shuffle=True, **kwargs),
        DataLoader(val, batch_size=cfg.training.eval_batch_size, shuffle=False, **kwargs),
        DataLoader(test, batch_size=cfg.training.eval_batch_size, shuffle=False, **kwargs),
    )


def create_optimizer(model, cfg):
    no_decay = ("bias", "LayerNorm.weight", "LayerNorm.bias")
    named = list(model.named_parameters())
    groups = [
        {
            "params": [p for n, p in named if not any(x in n for x in no_decay)],
            "weight_decay": cfg.training.optimizer.weight_decay,
        },
        {"params": [p for n, p in named if any(x in n for x in no_decay)], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=cfg.training.learning_rate, betas=(0.9, 0.999), eps=1e-8)


@torch.no_grad()
def test(model, loader, device):
    model.eval()
    labels, predictions = [], []
    for batch in loader:
        logits = model(batch["input_ids"].to(device), batch["attention_mask"].to(device))
        predictions += logits.argmax(dim=-1).cpu().tolist()
        labels += batch["labels"].tolist()
    return {
        "test_accuracy": accuracy_score(labels, predictions),
        "test_f1_macro": f1_score(labels, predictions, average="macro", zero_division=0),
        "test_f1_micro": f1_score(labels, predictions, average="micro", zero_division=0),
        "test_precision": precision_score(labels, predictions, average="macro", zero_division=0),
        "test_recall": recall_score(labels, predictions, average="macro", zero_division=0),
    }


def main():
    path, *overrides = sys.argv[1:]
    cfg = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(overrides))
    if cfg.get("best_config"):
        cfg = OmegaConf.merge(cfg, OmegaConf.load(cfg.best_config))
    print(OmegaConf.to_yaml(cfg))
    set_seed(cfg.training.seed, deterministic=cfg.training.deterministic, cudnn_benchmark=cfg.training.cudnn_benchmark)
    print_system_info()
    device = get_device(prefer_cuda=True, device_id=0)
    torch.backends.cuda.matmul.allow_tf32 = bool(cfg.training.tf32_enabled)

    tokenizer = AutoTokenizer.from_pretrained(cfg.model.pretrained_model)
    train_loader, val_loader, test_loader = create_dataloaders(cfg, tokenizer, device)
    model = Model(
        model_name=cfg.model.pretrained_model,
        num_labels=2,
        classifier_dropout=cfg.model.classifier_dropout,
        classifier_layer_num=cfg.model.classifier_layer_num,
        classifier_hidden_dims=list(cfg.model.classifier_hidden_dims) or None,
    ).to(device)
    optimizer = create_optimizer(model, cfg)
    scheduler = get_scheduler(
        cfg.training.scheduler.name,
        optimizer,
        num_warmup_steps=cfg.training.scheduler.warmup_steps,
        num_training_steps=len(train_loader) * cfg.training.epochs,
    )
    output = Path(cfg.output_dir)
    checkpoints = output / "checkpoints"
    configure_mlflow(
        tracking_uri=cfg.mlflow.tracking_uri,
        experiment=f"{cfg.project}-train",
        tags=OmegaConf.to_container(cfg.mlflow.tags),
        artifact_location=cfg.mlflow.artifact_location,
    )
    with mlflow_run(name=f"{Path(cfg.model.pretrained_model).name}_epochs{cfg.training.epochs}") as run:
        log_config(OmegaConf.to_container(cfg, resolve=True))
        trainer = Trainer(
            model=model,
            train_loader=train_loader,
            val_loader=val_loader,
            optimizer=optimizer,
            criterion=nn.CrossEntropyLoss(),
            device=device,
            num_epochs=cfg.training.epochs,
            patience=3,
            gradient_clip=cfg.training.max_grad_norm,
            gradient_accumulation_steps=cfg.training.gradient_accumulation,
            scheduler=scheduler,
            save_dir=checkpoints,
            use_amp=cfg.training.get("use_amp", True),
            amp_dtype=cfg.training.amp_dtype,
            early_stopping_metric=cfg.training.monitor_metric,
            early_stopping_mode=cfg.training.monitor_mode,
            min_delta=1e-4,
            logging_steps=cfg.training.logging_steps,
        )
        results = trainer.train()
        best = torch.load(checkpoints / "best_checkpoint.pt", map_location=device)
        model.load_state_dict(best["model_state_dict"])
        metrics = test(model, test_loader, device)
        mlflow.log_metrics(metrics)
        summary = {
            "run_id": run.info.run_id,
            "model_name": cfg.model.pretrained_model,
            "epochs": cfg.training.epochs,
            "best_validation_metric": results,
            "test_metrics": metrics,
        }
        artifacts = output / "models" / run.info.run_id
        artifacts.mkdir(parents=True, exist_ok=True)
        for name in ("best_checkpoint.pt", "latest_checkpoint.pt"):
            shutil.copy2(checkpoints / name, artifacts / name)
        (artifacts / "summary.json").write_text(json.dumps(summary, indent=2))
        OmegaConf.save(cfg, artifacts / "config.yaml")
        prune_directory_except(checkpoints, {"best_checkpoint.pt", "latest_checkpoint.pt"})
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
