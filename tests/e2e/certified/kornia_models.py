"""Descriptors of kornia with a triplet loss."""

import torch
from kornia.feature import HardNet, TFeat
from torch import nn
from torch.nn import functional as F

from tests.e2e.certified import SAMPLES, Certified, rows


class Triplets(nn.Module):
    """Descriptors of an anchor, another view of it and another patch. Each: float [batch, 1, 32, 32]."""

    def __init__(self, describe: nn.Module):
        super().__init__()
        self.describe = describe

    def forward(self, anchor, same, other):
        return self.describe(anchor), self.describe(same), self.describe(other)


def _triplets(kind):
    def build():
        anchor, other = torch.randn(2, SAMPLES, 1, 32, 32)
        data = rows(anchor=anchor, same=anchor + 0.1 * torch.randn_like(anchor), other=other)
        return Triplets(kind(pretrained=False)), data, lambda output, batch: F.triplet_margin_loss(*output, margin=4.0)

    return build


MODELS = [Certified("HardNet, triplets", _triplets(HardNet)), Certified("TFeat, triplets", _triplets(TFeat))]
