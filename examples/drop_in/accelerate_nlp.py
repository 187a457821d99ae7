"""Accelerate's nlp example: python examples/drop_in/accelerate_nlp.py --engine accelerate|jaxtrain"""

import common
import torch
from data import reviews, tokenizer
from datasets import Dataset
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    get_linear_schedule_with_warmup,
    set_seed,
)

args = common.parse_args("accelerate")
if args.engine == "jaxtrain":
    from jaxtrain.accelerate import Accelerator
else:
    from accelerate import Accelerator

EVAL_BATCH_SIZE = 32


def get_dataloaders(accelerator, batch_size: int = 16):
    tok = tokenizer()
    raw = {"train": Dataset.from_dict(reviews(640, 0)), "validation": Dataset.from_dict(reviews(120, 1))}

    def tokenize_function(examples):
        return tok(examples["sentence"], truncation=True, max_length=32)

    with accelerator.main_process_first():
        tokenized = {
            name: split.map(tokenize_function, batched=True, remove_columns=["sentence"]).rename_column(
                "label", "labels"
            )
            for name, split in raw.items()
        }

    def collate_fn(examples):
        return tok.pad(examples, padding="longest", pad_to_multiple_of=8, return_tensors="pt")

    train_dataloader = DataLoader(
        tokenized["train"], shuffle=True, collate_fn=collate_fn, batch_size=batch_size, drop_last=True
    )
    eval_dataloader = DataLoader(
        tokenized["validation"], shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE
    )
    return train_dataloader, eval_dataloader, tok


def training_function(config):
    accelerator = Accelerator(cpu=args.device == "cpu")
    set_seed(config["seed"])
    train_dataloader, eval_dataloader, tok = get_dataloaders(accelerator, config["batch_size"])
    model = AutoModelForSequenceClassification.from_config(
        BertConfig(
            vocab_size=len(tok), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer, num_warmup_steps=10, num_training_steps=args.max_steps
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    curve, completed_steps = common.Curve(args), 0
    while completed_steps < args.max_steps:
        model.train()
        for batch in train_dataloader:
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            curve.add(loss)
            completed_steps += 1
            if completed_steps == args.max_steps:
                break
        model.eval()
        right = count = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right, count = right + int((predictions == references).sum()), count + len(references)
        accelerator.print(f"step {completed_steps}: accuracy {right / count:.4f}")
    accelerator.end_training()
    curve.finish(accuracy=right / count, eval_loss=float(outputs.loss))


if __name__ == "__main__":
    training_function({"lr": 5e-4, "seed": 42, "batch_size": 16})
