"""The CTC loss through log_softmax: torch's own gradient holds only there."""

import jax
import numpy as np
import pytest
import torch

from torch_bridge.lowering.operators import TABLE
from torch_bridge.lowering.table import Call


@pytest.mark.parametrize("reduction", [1, 2])
def test_gradient_of_the_logits_equals_torch_to_1e_5(reduction):
    logits = torch.randn(7, 2, 4, generator=torch.manual_seed(0), requires_grad=True)
    targets, steps, sizes = torch.tensor([[1, 1, 3], [2, 3, 0]]), [7, 6], [3, 2]
    torch.ops.aten.ctc_loss.IntList(logits.log_softmax(-1), targets, steps, sizes, 0, reduction, False).backward()

    def loss(x):
        log_p = jax.nn.log_softmax(x, axis=-1)
        return TABLE["aten.ctc_loss.IntList"](Call(), log_p, targets.numpy(), steps, sizes, 0, reduction, False)

    ours = jax.grad(loss)(logits.detach().numpy())
    np.testing.assert_allclose(ours, logits.grad, rtol=1e-4, atol=1e-5)
