"""An autoencoder of digits: python examples/drop_in/lightning_autoencoder.py --engine lightning|jaxtrain"""

import common
import lightning as L
import torch
from data import digits, split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

args = common.parse_args("lightning")
if args.engine == "jaxtrain":
    from jaxtrain.lightning import Trainer
else:
    from lightning import Trainer


class LitAutoEncoder(L.LightningModule):
    def __init__(self, hidden_dim: int = 64, learning_rate: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 28 * 28))

    def forward(self, x):
        return self.decoder(self.encoder(x.view(x.size(0), -1)))

    def training_step(self, batch, batch_idx):
        loss = self._common_step(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._common_step(batch), on_step=False, on_epoch=True, prog_bar=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self._common_step(batch))

    def predict_step(self, batch, batch_idx, dataloader_idx=None):
        x, _ = batch
        return self(x)

    def _common_step(self, batch):
        x, _ = batch
        x_hat = self(x)
        return F.mse_loss(x_hat, x.view(x.size(0), -1))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


def main():
    L.seed_everything(7)
    train_set, val_set = split(digits(), 1024, 256)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=32)
    curve = common.Curve(args)
    trainer = Trainer(
        max_steps=args.max_steps,
        accelerator=args.device,
        devices=1,
        default_root_dir=args.output_dir,
        log_every_n_steps=1,
        logger=[L.pytorch.loggers.CSVLogger(args.output_dir), curve.lightning_logger()],
        enable_progress_bar=False,
    )
    model = LitAutoEncoder()
    trainer.fit(model, train_loader, val_loader)
    val_loss = trainer.callback_metrics["val_loss"]
    test_loss = trainer.test(model, val_loader, verbose=False)[0]["test_loss"]
    predictions = torch.cat(trainer.predict(model, val_loader))
    curve.finish(val_loss=val_loss, test_loss=test_loss, mean=predictions.mean())


if __name__ == "__main__":
    main()
