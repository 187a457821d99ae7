"""Fine-tune a transformer on sentences:
python examples/drop_in/lightning_text_classification.py --engine lightning|jaxtrain"""

import common
import lightning as L
import torch
from data import reviews, tokenizer
from torch.utils.data import DataLoader

args = common.parse_args("lightning")
if args.engine == "jaxtrain":
    from jaxtrain.lightning import Trainer
else:
    from lightning import Trainer

from datasets import Dataset  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForSequenceClassification,
    BertConfig,
    get_linear_schedule_with_warmup,
)


class ReviewsDataModule(L.LightningDataModule):
    def __init__(self, max_seq_length: int = 32, train_batch_size: int = 32, eval_batch_size: int = 32):
        super().__init__()
        self.save_hyperparameters()
        self.tokenizer = tokenizer()

    def setup(self, stage):
        self.dataset = {}
        for split, (count, seed) in {"train": (640, 0), "validation": (128, 1)}.items():
            made = Dataset.from_dict(reviews(count, seed))
            made = made.map(self.convert_to_features, batched=True, remove_columns=["sentence", "label"])
            made.set_format(type="torch")
            self.dataset[split] = made

    def convert_to_features(self, example_batch):
        features = self.tokenizer(
            example_batch["sentence"], max_length=self.hparams.max_seq_length, padding="max_length", truncation=True
        )
        features["labels"] = example_batch["label"]
        return features

    def train_dataloader(self):
        return DataLoader(self.dataset["train"], batch_size=self.hparams.train_batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.dataset["validation"], batch_size=self.hparams.eval_batch_size)


class GLUETransformer(L.LightningModule):
    def __init__(
        self,
        num_labels: int = 2,
        learning_rate: float = 5e-4,
        adam_epsilon: float = 1e-8,
        warmup_steps: int = 10,
        weight_decay: float = 0.01,
    ):
        super().__init__()
        self.save_hyperparameters()
        config = BertConfig(
            vocab_size=40, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            num_labels=num_labels,
        )  # fmt: skip
        self.model = AutoModelForSequenceClassification.from_config(config)
        self.validation_step_outputs = []

    def forward(self, **inputs):
        return self.model(**inputs)

    def training_step(self, batch, batch_idx):
        outputs = self(**batch)
        loss = outputs[0]
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        outputs = self(**batch)
        val_loss, logits = outputs[:2]
        preds = torch.argmax(logits, axis=1)
        self.validation_step_outputs.append({"loss": val_loss, "preds": preds, "labels": batch["labels"]})
        return val_loss

    def on_validation_epoch_end(self):
        preds = torch.cat([x["preds"] for x in self.validation_step_outputs])
        labels = torch.cat([x["labels"] for x in self.validation_step_outputs])
        loss = torch.stack([x["loss"] for x in self.validation_step_outputs]).mean()
        self.log("val_loss", loss, prog_bar=True)
        self.log("accuracy", (preds == labels).float().mean(), prog_bar=True)
        self.validation_step_outputs.clear()

    def configure_optimizers(self):
        model = self.model
        no_decay = ["bias", "LayerNorm.weight"]
        optimizer_grouped_parameters = [
            {
                "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
                "weight_decay": self.hparams.weight_decay,
            },
            {
                "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
                "weight_decay": 0.0,
            },
        ]
        optimizer = torch.optim.AdamW(
            optimizer_grouped_parameters, lr=self.hparams.learning_rate, eps=self.hparams.adam_epsilon
        )
        scheduler = get_linear_schedule_with_warmup(
            optimizer,
            num_warmup_steps=self.hparams.warmup_steps,
            num_training_steps=self.trainer.estimated_stepping_batches,
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


def main():
    L.seed_everything(42)
    curve = common.Curve(args)
    trainer = Trainer(
        max_steps=args.max_steps,
        accelerator=args.device,
        devices=1,
        default_root_dir=args.output_dir,
        log_every_n_steps=1,
        gradient_clip_val=1.0,
        logger=[L.pytorch.loggers.CSVLogger(args.output_dir), curve.lightning_logger()],
        enable_progress_bar=False,
    )
    model = GLUETransformer()
    trainer.fit(model, datamodule=ReviewsDataModule())
    curve.finish(val_loss=trainer.callback_metrics["val_loss"], accuracy=trainer.callback_metrics["accuracy"])


if __name__ == "__main__":
    main()
