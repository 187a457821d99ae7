"""A small U-Net that finds shapes: python examples/drop_in/lightning_segmentation.py --engine lightning|jaxtrain"""

import common
import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

args = common.parse_args("lightning")
if args.engine == "jaxtrain":
    from jaxtrain.lightning import Trainer
else:
    from lightning import Trainer


class Shapes(Dataset):
    """Noisy pictures of a square and a disc; the mask says which pixel belongs to which."""

    def __init__(self, count: int, seed: int, size: int = 32):
        draw = torch.Generator().manual_seed(seed)
        rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        centres = torch.randint(8, size - 8, (count, 4), generator=draw)
        self.masks = torch.zeros(count, size, size, dtype=torch.long)
        for mask, (a, b, c, d) in zip(self.masks, centres.tolist(), strict=True):
            mask[((rows - a).abs() < 6) & ((columns - b).abs() < 6)] = 1
            mask[(rows - c) ** 2 + (columns - d) ** 2 < 36] = 2
        colours = torch.eye(3)[self.masks].permute(0, 3, 1, 2)
        self.images = colours + 0.3 * torch.randn(colours.shape, generator=draw)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.masks[index]


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, num_classes: int = 3, features: int = 8):
        super().__init__()
        self.first = DoubleConv(3, features)
        self.down = nn.Sequential(nn.MaxPool2d(2), DoubleConv(features, 2 * features))
        self.deep = nn.Sequential(nn.MaxPool2d(2), DoubleConv(2 * features, 4 * features))
        self.up1 = nn.ConvTranspose2d(4 * features, 2 * features, 2, stride=2)
        self.conv1 = DoubleConv(4 * features, 2 * features)
        self.up2 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.conv2 = DoubleConv(3 * features, features)
        self.head = nn.Conv2d(features, num_classes, 1)

    def forward(self, x):
        first = self.first(x)
        second = self.down(first)
        x = self.conv1(torch.cat([self.up1(self.deep(second)), second], dim=1))
        return self.head(self.conv2(torch.cat([self.up2(x), first], dim=1)))


class SegModel(L.LightningModule):
    def __init__(self, lr: float = 5e-4):
        super().__init__()
        self.save_hyperparameters()
        self.net = UNet()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_nb):
        img, mask = batch
        out = self(img)
        loss_val = F.cross_entropy(out, mask, ignore_index=250)
        log_dict = {"train_loss": loss_val.detach()}
        self.log_dict(log_dict)
        return {"loss": loss_val, "log": log_dict, "progress_bar": log_dict}

    def validation_step(self, batch, batch_idx):
        img, mask = batch
        out = self(img)
        self.log("val_loss", F.cross_entropy(out, mask, ignore_index=250))
        self.log("pixel_acc", (out.argmax(1) == mask).float().mean())

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.net.parameters(), lr=self.hparams.lr)
        sch = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)
        return [opt], [sch]


def main():
    L.seed_everything(0)
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
    model = SegModel()
    trainer.fit(model, DataLoader(Shapes(320, 0), 16, shuffle=True), DataLoader(Shapes(64, 1), 16))
    curve.finish(**{name: trainer.callback_metrics[name] for name in ("val_loss", "pixel_acc")})


if __name__ == "__main__":
    main()
