"""CLIP of open_clip with its contrastive loss."""

from torch.nn import functional as F

import torch  # isort: skip
from tests.e2e.certified import Certified, images, rows, tokens
from torch_bridge.torchvision_operators import declare_torchvision

declare_torchvision()

from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg  # noqa: E402


def _contrastive(output, batch):
    image, text, scale = output
    logits = scale * image @ text.T
    target = torch.arange(logits.shape[0])
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def clip():
    vision = CLIPVisionCfg(layers=2, width=16, head_width=8, patch_size=8, image_size=32)
    text = CLIPTextCfg(context_length=8, vocab_size=64, width=16, heads=2, layers=2)
    return CLIP(8, vision, text), rows(image=images(), text=tokens(8)), _contrastive


MODELS = [Certified("CLIP, contrastive", clip)]
