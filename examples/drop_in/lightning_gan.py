"""A GAN of digits, two optimizers in manual optimization:
python examples/drop_in/lightning_gan.py --engine lightning|jaxtrain"""

import common
import lightning as L
import numpy as np
import torch
from data import digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

args = common.parse_args("lightning")
if args.engine == "jaxtrain":
    from jaxtrain.lightning import Trainer
else:
    from lightning import Trainer


class Generator(nn.Module):
    def __init__(self, latent_dim: int = 100, img_shape: tuple = (1, 28, 28)):
        super().__init__()
        self.img_shape = img_shape

        def block(in_feat, out_feat, normalize=True):
            layers = [nn.Linear(in_feat, out_feat)]
            if normalize:
                layers.append(nn.BatchNorm1d(out_feat, 0.8))
            layers.append(nn.LeakyReLU(0.2, inplace=True))
            return layers

        self.model = nn.Sequential(
            *block(latent_dim, 128, normalize=False),
            *block(128, 256),
            *block(256, 512),
            *block(512, 1024),
            nn.Linear(1024, int(np.prod(img_shape))),
            nn.Tanh(),
        )

    def forward(self, z):
        img = self.model(z)
        return img.view(img.size(0), *self.img_shape)


class Discriminator(nn.Module):
    def __init__(self, img_shape: tuple = (1, 28, 28)):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(int(np.prod(img_shape)), 512),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(512, 256),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(256, 1),
        )

    def forward(self, img):
        return self.model(img.view(img.size(0), -1))


class GAN(L.LightningModule):
    def __init__(self, latent_dim: int = 100, lr: float = 0.00005, b1: float = 0.5, b2: float = 0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator(latent_dim)
        self.discriminator = Discriminator()
        self.validation_z = torch.randn(8, latent_dim)

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        imgs, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim).type_as(imgs)

        self.toggle_optimizer(optimizer_g)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake = torch.zeros(imgs.size(0), 1).type_as(imgs)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def validation_step(self, batch):
        pass

    def on_validation_epoch_end(self):
        sample_imgs = self(self.validation_z.type_as(next(self.parameters())))
        self.log("sample_mean", sample_imgs.mean())

    def configure_optimizers(self):
        betas = (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=betas)
        return [opt_g, opt_d], []


def main():
    L.seed_everything(7)
    loader = DataLoader(digits(), batch_size=64, shuffle=True, drop_last=True)
    curve = common.Curve(args)
    trainer = Trainer(
        max_steps=2 * args.max_steps,  # Lightning counts the steps of both optimizers
        accelerator=args.device,
        devices=1,
        default_root_dir=args.output_dir,
        log_every_n_steps=1,
        logger=[L.pytorch.loggers.CSVLogger(args.output_dir), curve.lightning_logger("d_loss")],
        enable_progress_bar=False,
    )
    model = GAN()
    trainer.fit(model, loader, DataLoader(digits(), batch_size=64))
    curve.finish(g_loss=trainer.callback_metrics["g_loss"], sample_mean=trainer.callback_metrics["sample_mean"])


if __name__ == "__main__":
    main()
