"""Models of timm, with cross entropy."""

from torch import nn

from tests.e2e.certified import Certified, classes, images, rows
from torch_bridge.torchvision_operators import declare_torchvision

declare_torchvision()

import timm  # noqa: E402

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (1, 1), "num_heads": (2, 2)}


def _model(kind: str, size: int = 32, **options):
    def build():
        module = timm.create_model(kind, num_classes=5, **options)
        return module, rows(x=images(size), label=classes()), nn.CrossEntropyLoss()

    return build


MODELS = [
    Certified("ResNet", _model("test_resnet", 64)),
    Certified("EfficientNet", _model("test_efficientnet", 64)),
    Certified("ConvNeXt", _model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))),
    Certified("ViT", _model("vit_tiny_patch16_224", **VIT)),
    Certified("Swin V2", _model("swinv2_tiny_window8_256", **SWIN)),
]
