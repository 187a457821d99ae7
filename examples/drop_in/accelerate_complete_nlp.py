"""Accelerate's complete nlp example, with tracking, checkpoints, resume and accumulation:
python examples/drop_in/accelerate_complete_nlp.py --engine accelerate|jaxtrain"""

import os

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

args = common.parse_args(
    "accelerate",
    checkpointing_steps=("20", "steps between checkpoints, or epoch"),
    resume_from_checkpoint=("", "a folder that save_state has written"),
    no_tracking=(False, "write no tracker's files"),
)
if args.engine == "jaxtrain":
    from jaxtrain.accelerate import Accelerator
else:
    from accelerate import Accelerator

from accelerate.tracking import GeneralTracker, on_main_process  # noqa: E402
from accelerate.utils import ProjectConfiguration  # noqa: E402


class TextTracker(GeneralTracker):
    """A tracker of one's own: a text file."""

    name = "text"
    requires_logging_directory = False

    def __init__(self, path: str):
        super().__init__()
        self.path = path

    @property
    def tracker(self):
        return self.path

    @on_main_process
    def store_init_configuration(self, values: dict):
        self.log(values)

    @on_main_process
    def log(self, values: dict, step: int | None = None, **kwargs):
        with open(self.path, "a") as file:
            print(step, sorted(values), file=file)


def get_dataloaders(accelerator, batch_size: int):
    tok = tokenizer()
    raw = {"train": Dataset.from_dict(reviews(656, 0)), "validation": Dataset.from_dict(reviews(120, 1))}

    def tokenize_function(examples):
        return tok(examples["sentence"], truncation=True, max_length=32)

    tokenized = {
        name: split.map(tokenize_function, batched=True, remove_columns=["sentence"]).rename_column("label", "labels")
        for name, split in raw.items()
    }

    def collate_fn(examples):
        return tok.pad(examples, padding="longest", return_tensors="pt")

    train_dataloader = DataLoader(tokenized["train"], shuffle=True, collate_fn=collate_fn, batch_size=batch_size)
    eval_dataloader = DataLoader(tokenized["validation"], shuffle=False, collate_fn=collate_fn, batch_size=32)
    return train_dataloader, eval_dataloader, tok


def training_function(config):
    os.makedirs(args.output_dir, exist_ok=True)
    project = ProjectConfiguration(project_dir=args.output_dir, automatic_checkpoint_naming=False)
    trackers = [] if args.no_tracking else [TextTracker(os.path.join(args.output_dir, "log.txt"))]
    accelerator = Accelerator(
        cpu=args.device == "cpu", gradient_accumulation_steps=2, log_with=trackers, project_config=project
    )
    accelerator.init_trackers("complete_nlp", config)
    set_seed(config["seed"])
    train_dataloader, eval_dataloader, tok = get_dataloaders(accelerator, config["batch_size"])
    model = AutoModelForSequenceClassification.from_config(
        BertConfig(
            vocab_size=len(tok), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 10, args.max_steps)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    overall_step = starting_epoch = resume_step = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        overall_step = int(os.path.basename(args.resume_from_checkpoint).removeprefix("step_"))
        starting_epoch, resume_step = divmod(overall_step, len(train_dataloader))
    curve, epoch = common.Curve(args), starting_epoch
    while overall_step < args.max_steps:
        model.train()
        total_loss = 0
        loader = train_dataloader
        if epoch == starting_epoch and resume_step:
            loader = accelerator.skip_first_batches(train_dataloader, resume_step)
        if hasattr(train_dataloader, "set_epoch"):
            train_dataloader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(model):
                output = model(**batch)
                loss = output.loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            total_loss += loss.detach().float()
            curve.add(loss)
            overall_step += 1
            if overall_step % int(args.checkpointing_steps) == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))
            if overall_step == args.max_steps:
                break
        model.eval()
        right = count = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                logits = model(**batch).logits
            predictions, references = accelerator.gather_for_metrics((logits.argmax(dim=-1), batch["labels"]))
            right, count = right + int((predictions == references).sum()), count + len(references)
        accelerator.log(
            {"accuracy": right / count, "train_loss": float(total_loss) / len(train_dataloader), "epoch": epoch},
            step=overall_step,
        )
        epoch += 1
    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(args.output_dir, is_main_process=accelerator.is_main_process)
    accelerator.end_training()
    curve.finish(accuracy=right / count, mean_logit=float(logits.abs().mean()))


if __name__ == "__main__":
    training_function({"lr": 5e-4, "seed": 42, "batch_size": 16})
