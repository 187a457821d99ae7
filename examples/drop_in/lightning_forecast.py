"""Forecast a time series with an LSTM: python examples/drop_in/lightning_forecast.py --engine lightning|jaxtrain"""

import common
import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import nn
from torch.utils.data import DataLoader, Dataset

args = common.parse_args("lightning")
if args.engine == "jaxtrain":
    from jaxtrain.lightning import Trainer
else:
    from lightning import Trainer


class Waves(Dataset):
    """Windows of two mixed sines with noise; the value after the window is wanted."""

    def __init__(self, count: int, seed: int, seq_len: int = 32):
        time = torch.arange(count + seq_len, dtype=torch.float32)
        noise = 0.05 * torch.randn(len(time), 4, generator=torch.Generator().manual_seed(seed))
        phases = torch.tensor([0.0, 0.5, 1.0, 1.5])
        self.series = torch.sin(0.2 * time[:, None] + phases) * torch.cos(0.03 * time[:, None]) + noise
        self.seq_len = seq_len

    def __len__(self):
        return len(self.series) - self.seq_len

    def __getitem__(self, index):
        return self.series[index : index + self.seq_len], self.series[index + self.seq_len, :1]


class LSTMRegressor(L.LightningModule):
    def __init__(self, n_features: int = 4, hidden_size: int = 64, num_layers: int = 2, learning_rate: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.lstm = nn.LSTM(n_features, hidden_size, num_layers, batch_first=True)
        self.linear = nn.Linear(hidden_size, 1)
        self.criterion = nn.MSELoss()
        self.val_mae = torchmetrics.MeanAbsoluteError()

    def forward(self, x):
        lstm_out, _ = self.lstm(x)
        return self.linear(lstm_out[:, -1])

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("train_loss", loss)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        y_hat = self(x)
        self.log("val_loss", self.criterion(y_hat, y), prog_bar=True)
        self.val_mae(y_hat, y)
        self.log("val_mae", self.val_mae)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def main():
    L.seed_everything(1)
    curve = common.Curve(args)
    trainer = Trainer(
        max_steps=args.max_steps,
        accelerator=args.device,
        devices=1,
        default_root_dir=args.output_dir,
        log_every_n_steps=1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        val_check_interval=0.5,
        callbacks=[LearningRateMonitor()],
        logger=[L.pytorch.loggers.CSVLogger(args.output_dir), curve.lightning_logger()],
        enable_progress_bar=False,
    )
    model = LSTMRegressor()
    train_loader = DataLoader(Waves(1280, seed=0), batch_size=32, shuffle=True)
    trainer.fit(model, train_loader, DataLoader(Waves(256, seed=1), batch_size=64))
    curve.finish(**{name: trainer.callback_metrics[name] for name in ("val_loss", "val_mae")})


if __name__ == "__main__":
    main()
