"""A small convolutional network with a DataModule:
python examples/drop_in/lightning_image_classifier.py --engine lightning|jaxtrain"""

import common
import lightning as L
import torch
from data import digits, split
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.functional import accuracy

args = common.parse_args("lightning")
if args.engine == "jaxtrain":
    from jaxtrain.lightning import Trainer
else:
    from lightning import Trainer


class DigitsDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        self.train_set, self.val_set = split(digits(), 640, 256)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)

    test_dataloader = val_dataloader


class ImageClassifier(L.LightningModule):
    def __init__(self, lr: float = 3e-4):
        super().__init__()
        self.save_hyperparameters()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.norm = nn.BatchNorm2d(64)
        self.fc1 = nn.Linear(64 * 12 * 12, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.norm(self.conv2(x))), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(torch.flatten(x, 1)))), dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.nll_loss(logits, y)
        self.log("train_loss", loss)
        if batch_idx % 10 == 0:
            self.log("train_acc", accuracy(logits.argmax(dim=1), y, task="multiclass", num_classes=10))
        return loss

    def evaluate(self, batch, stage):
        x, y = batch
        logits = self(x)
        acc = accuracy(logits.argmax(dim=1), y, task="multiclass", num_classes=10)
        self.log_dict({f"{stage}_loss": F.nll_loss(logits, y), f"{stage}_acc": acc}, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=5e-4)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    L.seed_everything(7)
    curve = common.Curve(args)
    trainer = Trainer(
        max_steps=args.max_steps,
        accelerator=args.device,
        devices=1,
        default_root_dir=args.output_dir,
        log_every_n_steps=1,
        callbacks=[
            ModelCheckpoint(monitor="val_acc", mode="max"),
            EarlyStopping(monitor="val_loss", patience=5),
            LearningRateMonitor(logging_interval="step"),
        ],
        logger=[L.pytorch.loggers.CSVLogger(args.output_dir), curve.lightning_logger()],
        enable_progress_bar=False,
    )
    trainer.fit(ImageClassifier(), datamodule=DigitsDataModule())
    metrics = dict(trainer.callback_metrics)
    trainer.test(ckpt_path="best", datamodule=DigitsDataModule(), verbose=False)
    curve.finish(**{name: metrics[name] for name in ("val_loss", "val_acc")}, **trainer.callback_metrics)


if __name__ == "__main__":
    main()
