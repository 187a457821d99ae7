"""Models of monai on volumes."""

import torch
from monai.networks.nets import SegResNet, UNet
from torch import nn

from tests.e2e.certified import SAMPLES, Certified, rows


def _volumes():
    return rows(x=torch.randn(SAMPLES, 1, 8, 8, 8), label=torch.randint(0, 3, (SAMPLES, 8, 8, 8)))


def unet():
    module = UNet(spatial_dims=3, in_channels=1, out_channels=3, channels=(4, 8, 8), strides=(2, 2), num_res_units=1)
    return module, _volumes(), nn.CrossEntropyLoss()


def segresnet():
    module = SegResNet(spatial_dims=3, init_filters=8, in_channels=1, out_channels=3, blocks_down=(1, 1),
                       blocks_up=(1,))  # fmt: skip
    return module, _volumes(), nn.CrossEntropyLoss()


MODELS = [Certified("UNet, 3-d", unet), Certified("SegResNet, 3-d", segresnet)]
