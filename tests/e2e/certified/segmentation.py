"""Models of segmentation_models_pytorch, with cross entropy per pixel."""

import torch
from torch import nn

from jaxtrain.systems.torch_module.torch_examples import declare_torchvision
from tests.e2e.certified import SAMPLES, Certified, images, rows

declare_torchvision()

import segmentation_models_pytorch as smp  # noqa: E402


def _model(kind, **options):
    def build():
        module = kind("resnet18", encoder_weights=None, classes=3, **options)
        return module, rows(x=images(), label=torch.randint(0, 3, (SAMPLES, 32, 32))), nn.CrossEntropyLoss()

    return build


MODELS = [
    Certified("U-Net, ResNet-18", _model(smp.Unet, encoder_depth=3, decoder_channels=(16, 8, 8))),
    Certified(
        "FPN, ResNet-18",
        _model(smp.FPN, decoder_pyramid_channels=16, decoder_segmentation_channels=32, decoder_dropout=0.0),
    ),  # fmt: skip
]
