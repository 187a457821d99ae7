"""The CTC loss: values, and torch's gradient, which takes its input for a log softmax's."""

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional as F

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


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_gradient_of_what_no_log_softmax_made_is_torchs(zero_infinity):
    x = torch.randn(6, 3, 4, generator=torch.manual_seed(0), requires_grad=True)
    targets, steps, sizes = torch.tensor([[1, 1, 3], [2, 3, 0], [1, 2, 3]]), [6, 5, 2], [3, 2, 3]  # the last: infinite
    torch.ops.aten.ctc_loss.IntList(x, targets, steps, sizes, 0, 2, zero_infinity).backward()

    def loss(x):
        return TABLE["aten.ctc_loss.IntList"](Call(), x, targets.numpy(), steps, sizes, 0, 2, zero_infinity)

    np.testing.assert_allclose(jax.grad(loss)(x.detach().numpy()), x.grad, rtol=1e-4, atol=1e-5)


def test_labels_that_a_mask_selects_are_torchs_whatever_is_made_of_them():
    net = torch.nn.Linear(3, 5)
    x = torch.randn(2, 9, 3, generator=torch.manual_seed(0))
    labels = torch.tensor([[-100, 4, -100, 2], [1, 1, 3, -100]])

    def loss(net, batch):
        kept = batch["labels"] >= 0
        log_p = net(batch["x"]).log_softmax(-1).transpose(0, 1)
        flat = batch["labels"].masked_select(kept)
        return F.ctc_loss(log_p, flat, torch.tensor([9, 7]), kept.sum(-1), zero_infinity=True)

    batch = {"x": x, "labels": labels}
    wanted = loss(net, batch)
    (gradient,) = torch.autograd.grad(wanted, [net.weight])
    got = torch.compile(loss, backend="jaxtrain")(net, batch)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(torch.autograd.grad(got, [net.weight])[0], gradient)

    def other(net, batch):
        return net(batch["x"]).mean() * batch["labels"].masked_select(batch["labels"] > 0).sum()

    torch.testing.assert_close(torch.compile(other, backend="jaxtrain")(net, batch), other(net, batch))
