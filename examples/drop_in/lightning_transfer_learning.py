"""Transfer learning, the backbone unfrozen at milestones:
python examples/drop_in/lightning_transfer_learning.py --engine lightning|jaxtrain"""

import common
import lightning as L
import torch
import torchmetrics
from data import digits, split
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateMonitor
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

args = common.parse_args("lightning")
if args.engine == "jaxtrain":
    from jaxtrain.lightning import Trainer
else:
    from lightning import Trainer


class MilestonesFinetuning(BaseFinetuning):
    def __init__(self, milestones: tuple = (1, 2), train_bn: bool = False):
        super().__init__()
        self.milestones = milestones
        self.train_bn = train_bn

    def freeze_before_training(self, pl_module):
        self.freeze(modules=pl_module.feature_extractor, train_bn=self.train_bn)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.milestones[0]:
            self.unfreeze_and_add_param_group(
                modules=pl_module.feature_extractor[-4:], optimizer=optimizer, train_bn=self.train_bn
            )
        elif epoch == self.milestones[1]:
            self.unfreeze_and_add_param_group(
                modules=pl_module.feature_extractor[:-4], optimizer=optimizer, train_bn=self.train_bn
            )


def backbone() -> nn.Sequential:
    """Stand in for a network with downloaded weights."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
    )  # fmt: skip


class TransferLearningModel(L.LightningModule):
    def __init__(self, lr: float = 1e-3, lr_scheduler_gamma: float = 1e-1, milestones: tuple = (1, 2)):
        super().__init__()
        self.save_hyperparameters()
        self.feature_extractor = backbone()
        self.fc = nn.Sequential(nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10))
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.valid_acc = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def forward(self, x):
        x = self.feature_extractor(x)
        return self.fc(x.view(x.size(0), -1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        y_logits = self.forward(x)
        train_loss = F.cross_entropy(y_logits, y)
        self.train_acc(y_logits.softmax(dim=-1), y)
        self.log("train_loss", train_loss)
        self.log("train_acc", self.train_acc, prog_bar=True, on_step=False, on_epoch=True)
        return train_loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        y_logits = self.forward(x)
        self.log("val_loss", F.cross_entropy(y_logits, y), prog_bar=True)
        self.valid_acc(y_logits.softmax(dim=-1), y)
        self.log("val_acc", self.valid_acc, prog_bar=True)

    def configure_optimizers(self):
        parameters = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(parameters, lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(
            optimizer, milestones=list(self.hparams.milestones), gamma=self.hparams.lr_scheduler_gamma
        )
        return [optimizer], [scheduler]


def main():
    L.seed_everything(7)
    train_set, val_set = split(digits(size=32, channels=3), 640, 256)
    curve = common.Curve(args)
    trainer = Trainer(
        max_steps=args.max_steps,  # 20 an epoch
        accelerator=args.device,
        devices=1,
        default_root_dir=args.output_dir,
        log_every_n_steps=1,
        callbacks=[MilestonesFinetuning(), LearningRateMonitor()],
        logger=[L.pytorch.loggers.CSVLogger(args.output_dir), curve.lightning_logger()],
        enable_progress_bar=False,
    )
    model = TransferLearningModel()
    trainer.fit(model, DataLoader(train_set, batch_size=32, shuffle=True), DataLoader(val_set, batch_size=32))
    names = ("val_loss", "val_acc", "train_acc")
    curve.finish(**{name: trainer.callback_metrics[name] for name in names})


if __name__ == "__main__":
    main()
