"""Models of vit-pytorch, with cross entropy."""

from torch import nn

from tests.e2e.certified import Certified, classes, images, rows
from torch_bridge.torchvision_operators import declare_torchvision

declare_torchvision()

from vit_pytorch import SimpleViT  # noqa: E402
from vit_pytorch.cct import CCT  # noqa: E402


def simple():
    module = SimpleViT(image_size=32, patch_size=8, num_classes=5, dim=16, depth=2, heads=2, mlp_dim=32, dim_head=8)
    return module, rows(img=images(), label=classes()), nn.CrossEntropyLoss()


def compact():
    module = CCT(img_size=32, embedding_dim=16, n_conv_layers=1, num_layers=2, num_heads=2, mlp_ratio=2, num_classes=5)
    return module, rows(x=images(), label=classes()), nn.CrossEntropyLoss()


MODELS = [Certified("SimpleViT", simple), Certified("CCT", compact)]
