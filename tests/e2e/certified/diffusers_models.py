"""Denoisers and autoencoders of diffusers."""

import torch
from torch.nn import functional as F

from tests.e2e.certified import SAMPLES, Certified, images, rows
from torch_bridge.torchvision_operators import declare_torchvision

declare_torchvision()

import diffusers  # noqa: E402


def _denoising(output, batch):
    return F.mse_loss(output.sample, batch["noise"])


def _noisy(size: int = 16, channels: int = 3, **more: torch.Tensor):
    times = torch.randint(0, 1000, (SAMPLES,))
    return rows(sample=images(size, channels), timestep=times, noise=images(size, channels), **more)


def unet():
    module = diffusers.UNet2DModel(
        sample_size=16,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )
    return module, _noisy(), _denoising


def conditional_unet():
    module = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=12,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    return module, _noisy(8, 4, encoder_hidden_states=torch.randn(SAMPLES, 5, 12)), _denoising


def autoencoder():
    module = diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=16,
    )
    return module, rows(sample=images(16)), lambda output, batch: F.l1_loss(output.sample, batch["sample"])


MODELS = [
    Certified("UNet2D, denoising", unet),
    Certified("UNet2D, conditional", conditional_unet),
    Certified("AutoencoderKL", autoencoder),
]
