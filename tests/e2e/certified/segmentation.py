"""Models of segmentation_models_pytorch, with cross entropy per pixel."""

import torch
from torch import nn

from tests.e2e.certified import SAMPLES, Certified, images, rows
from torch_bridge.torchvision_operators import declare_torchvision

declare_torchvision()

import segmentation_models_pytorch as smp  # noqa: E402


def _model(kind, size=32, **options):
    def build():
        module = kind("resnet18", encoder_weights=None, classes=3, **options)
        return module, rows(x=images(size), label=torch.randint(0, 3, (SAMPLES, size, size))), nn.CrossEntropyLoss()

    return build


MODELS = [
    Certified("U-Net, ResNet-18", _model(smp.Unet, encoder_depth=3, decoder_channels=(16, 8, 8))),
    Certified(  # at 32 pixels its groups would be normalized over one element each: torch's outputs are rounding
        "FPN, ResNet-18",
        _model(smp.FPN, size=64, decoder_pyramid_channels=16, decoder_segmentation_channels=32, decoder_dropout=0.0),
    ),  # fmt: skip
]
