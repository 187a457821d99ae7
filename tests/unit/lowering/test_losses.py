"""Losses in a converted module: shapes that later operators build on."""

import pytest
import torch
from torch.nn import functional as F

from torch_bridge.from_torch import from_torch


@pytest.mark.parametrize("rows", [1, 4])
def test_a_loss_per_row_keeps_its_axis_for_what_comes_after_it(rows):
    class Last(torch.nn.Module):
        def forward(self, logits, target):
            return F.cross_entropy(logits, target, reduction="none").cumsum(0)[-1]

    logits, target = torch.randn(rows, 3), torch.arange(rows) % 3
    converted = from_torch(Last(), (logits, target))
    assert float(converted(logits.numpy(), target.numpy())) == pytest.approx(Last()(logits, target).item(), rel=1e-6)
