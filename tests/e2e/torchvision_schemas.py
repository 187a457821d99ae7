"""timm and the image models of transformers import torchvision, whose wheel from PyPI is built for CUDA. Beside a CPU
build of torch its kernels do not load, and its import then fails for two operators that it expects to be declared.
Declaring them is all that the import needs; the models here use no kernel of torchvision's.
"""

import torch

OPERATORS = ("nms", "qnms")

_library = torch.library.Library("torchvision", "FRAGMENT")


def declare() -> None:
    """Declare what a torchvision without kernels lacks. Call before the first import of timm or transformers."""
    if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
        for name in OPERATORS:
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
