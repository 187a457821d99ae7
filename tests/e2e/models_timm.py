"""Small random models of timm; those with BatchNorm are compared in training mode."""

import torch

from tests.e2e.architectures import Architecture
from torch_bridge.torchvision_operators import declare_torchvision

declare_torchvision()


def _image(name: str, kind: str, size: int = 32, training: bool = False, **options) -> Architecture:
    batch = 8 if training else 2  # statistics over two or three numbers would magnify rounding

    def build():
        import timm

        return timm.create_model(kind, num_classes=5, **options), torch.randn(batch, 3, size, size)

    return Architecture(name, "timm", build, training)


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}

ARCHITECTURES = [
    _image("ResNet", "test_resnet", size=64, training=True),
    _image("EfficientNet", "test_efficientnet", size=64, training=True),
    _image("ByobNet", "test_byobnet", size=64, training=True),
    _image("NFNet", "test_nfnet", size=64),
    _image("ConvNeXt", "convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    _image("DenseNet", "densenet121", growth_rate=4, block_config=(1, 2)),
    _image("ViT, timm", "vit_tiny_patch16_224", **VIT),
    _image(
        "Swin V2", "swinv2_tiny_window8_256", img_size=32, window_size=4, embed_dim=8, depths=(1, 1), num_heads=(2, 2)
    ),
    _image(
        "LeViT",
        "levit_128s",
        size=64,
        img_size=64,
        embed_dim=(16, 24, 32),
        depth=(1, 1, 1),
        num_heads=(2, 3, 4),
        key_dim=8,
    ),
]
