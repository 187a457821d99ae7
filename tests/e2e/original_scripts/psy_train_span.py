"""Fine-tune the evidence, share or joint architecture with a loop of the script's own."""

import argparse
import json
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, get_linear_schedule_with_warmup

from jaxtrain.systems.criteria_evidence import (
    compute_total_steps,
    create_optimizer,
    ensure_directory,
    get_logger,
    load_evidence_dataset,
    load_joint_dataset,
    load_share_dataset,
    set_seed,
)
from jaxtrain.systems.criteria_evidence.original.architectures import Evidence, Joint, Share

logger = get_logger("train_span")


def span_loss(outputs, batch):
    start = F.cross_entropy(outputs.start_logits, batch["start_positions"])
    end = F.cross_entropy(outputs.end_logits, batch["end_positions"])
    return (start + end) / 2


def forward(model, batch, kind):
    inputs = {k: v for k, v in batch.items() if k not in ("labels", "start_positions", "end_positions")}
    outputs = model(**inputs)
    loss = span_loss(outputs, batch)
    if kind != "evidence":
        loss = loss + F.cross_entropy(outputs.logits, batch["labels"])
    return loss, outputs


@torch.no_grad()
def evaluate(model, loader, kind):
    model.eval()
    total, exact, rows = 0.0, 0, 0
    for batch in loader:
        loss, outputs = forward(model, batch, kind)
        total += loss.item()
        start, end = outputs.start_logits.argmax(-1), outputs.end_logits.argmax(-1)
        exact += int(((start == batch["start_positions"]) & (end == batch["end_positions"])).sum())
        rows += len(start)
    return {"loss": total / max(len(loader), 1), "span_em": exact / max(rows, 1)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["evidence", "share", "joint"], required=True)
    parser.add_argument("--csv", required=True)
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    seed = set_seed(42, True, None)
    logger.info("seed %s", seed)
    tokenizer = AutoTokenizer.from_pretrained(args.encoder)
    common = {"splits": [0.5, 0.25, 0.25], "csv_path": args.csv}
    if args.kind == "joint":
        splits = load_joint_dataset(
            **common,
            criteria_tokenizer=tokenizer,
            evidence_tokenizer=tokenizer,
            criteria_max_length=24,
            evidence_max_length=40,
        )
        model = Joint(task_cfg={"criteria_model_name": args.encoder, "evidence_model_name": args.encoder})
    elif args.kind == "share":
        splits = load_share_dataset(**common, tokenizer=tokenizer, max_length=40)
        model = Share(args.encoder)
    else:
        splits = load_evidence_dataset(**common, tokenizer=tokenizer, max_length=40)
        model = Evidence(args.encoder)
    train, val, test = splits.values() if isinstance(splits, dict) else splits
    train_loader = DataLoader(train, batch_size=4, shuffle=True)
    val_loader, test_loader = DataLoader(val, batch_size=4), DataLoader(test, batch_size=4)
    cfg = {"learning_rate": args.lr, "weight_decay": 0.01, "optimizer": {"name": "adamw", "betas": [0.9, 0.999]}}
    optimizer = create_optimizer(model, cfg)
    steps = compute_total_steps(len(train_loader), 1, args.epochs)
    scheduler = get_linear_schedule_with_warmup(optimizer, int(0.1 * steps), steps)
    out, best, history = Path(ensure_directory(args.out)), float("inf"), []
    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            optimizer.zero_grad(set_to_none=True)
            loss, _ = forward(model, batch, args.kind)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        metrics = evaluate(model, val_loader, args.kind)
        history.append({"epoch": epoch, "train_loss": loss.item(), **metrics})
        logger.info("%s", history[-1])
        if metrics["loss"] < best:
            best = metrics["loss"]
            torch.save({"model_state_dict": model.state_dict(), "epoch": epoch, "metrics": metrics}, out / "best.pt")
    model.load_state_dict(torch.load(out / "best.pt")["model_state_dict"])
    results = {"history": history, "test": evaluate(model, test_loader, args.kind)}
    (out / "results.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
