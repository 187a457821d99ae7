"""Scripts under one changed import: transformers' Trainer, Lightning, accelerate, sentence-transformers."""

import importlib
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.public_trainings import STEPS, script
from benchmarks.public_trainings.generative import mlp


def library(side: str, theirs: str, ours: str):
    return importlib.import_module(theirs if side == "torch" else f"jaxtrain.{ours}")


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows: list):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@script("transformers' Trainer", "BERT classifier, losses from the log")
def hugging_face(side: str) -> list[float]:
    import transformers

    kind = library(side, "transformers", "transformers").Trainer
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    config = transformers.BertConfig(
        **sizes, vocab_size=40, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=16
    )
    model = transformers.BertForSequenceClassification(config)
    rows = [{"input_ids": torch.randint(1, 40, (8,)), "labels": torch.tensor(i % 2)} for i in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            seed=1,
        )
        trainer = kind(model=model, args=arguments, train_dataset=Rows(rows))
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@script("Lightning", "autoencoder in a LightningModule, OneCycleLR")
def lightning(side: str) -> list[float]:
    pl = library(side, "lightning", "lightning")
    seen: list[float] = []

    class Auto(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp(8, 16, 3, 16, 8, act=nn.GELU)

        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.net(batch), batch)
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    loader = torch.utils.data.DataLoader(Rows(list(torch.randn(20, 8))), batch_size=4)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    pl.Trainer(max_steps=STEPS, accelerator="cpu", devices=1, **quiet).fit(Auto(), loader)
    return seen


@script("accelerate", "a loop with accumulate, clip_grad_norm_ and a schedule")
def accelerate(side: str) -> list[float]:
    accelerator = library(side, "accelerate", "accelerate").Accelerator(cpu=True) if side == "torch" else None
    accelerator = accelerator or library(side, "accelerate", "accelerate").Accelerator()
    model = mlp(8, 24, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    rows = [(torch.randn(8), i % 3) for i in range(4 * STEPS)]
    loader = torch.utils.data.DataLoader(Rows(rows), batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@script("torch.compile's backend", "an unchanged loop: torch.compile(model, backend='jaxtrain')")
def backend(side: str) -> list[float]:
    model = nn.Sequential(nn.Conv1d(4, 8, 3, 1, 1), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    batches = [(torch.randn(4, 4, 8), torch.randint(0, 3, (4,))) for _ in range(3)]
    call = model if side == "torch" else torch.compile(model, backend="jaxtrain")
    losses = []
    for step in range(STEPS):
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = F.cross_entropy(call(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@script("sentence-transformers", "MultipleNegativesRankingLoss on pairs, mean pooling")
def sentences(side: str) -> list[float]:
    import datasets
    import sentence_transformers
    import tokenizers
    import transformers
    from sentence_transformers import losses
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    kind = library(side, "sentence_transformers", "sentence_transformers").SentenceTransformerTrainer
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(30))]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=40, **sizes, **off)
    draw = lambda: " ".join(f"w{n}" for n in torch.randint(0, 30, (6,)).tolist())
    rows = datasets.Dataset.from_list([{"anchor": draw(), "positive": draw()} for _ in range(24)])
    with tempfile.TemporaryDirectory() as folder:
        transformers.PreTrainedTokenizerFast(tokenizer_object=inner, mask_token="[MASK]", **special).save_pretrained(
            folder
        )
        transformers.BertModel(config).save_pretrained(folder)
        modules = [Transformer(folder), Pooling(16, "mean")]
        model = sentence_transformers.SentenceTransformer(modules=modules, device="cpu")
        arguments = sentence_transformers.SentenceTransformerTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            max_steps=STEPS,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        )
        trainer = kind(model, arguments, train_dataset=rows, loss=losses.MultipleNegativesRankingLoss(model))
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
