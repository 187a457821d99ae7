"""Tensors whose length the data decides give torch's numbers and gradients, whatever the mask selects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_bridge.from_torch import from_torch
from torch_bridge.lowering import UnsupportedModel

# Each takes x [8, 5], labels y [8] and a mask m [8].


def masked_cross_entropy(x, y, m):
    return F.cross_entropy(x[m], y[m], label_smoothing=0.1) + F.cross_entropy(x[m], y[m], reduction="none").sum()


def positions(x, y, m):
    rows = m.nonzero(as_tuple=True)[0]
    return F.cross_entropy(x[rows], y.index_select(0, rows)) + (x[rows] ** 2).sum() / rows.numel()


def two_halves(x, y, m):
    values = F.cross_entropy(x, y, reduction="none")
    return values[m].mean() + 0.5 * values[~m].mean()


def moments(x, y, m):
    chosen = torch.masked_select(x, m[:, None])
    return chosen.mean() + chosen.var() + x[m].std(0).sum() + chosen.norm()


def extremes(x, y, m):
    return x[m].amax(0).sum() + x[m].max() - x[m].min(1)[0].sum()


def softmax_over_rows(x, y, m):
    return (x[m].softmax(0) * x[m]).sum() + F.log_softmax(x[m], 0).mean()


def products(x, y, m):
    inside, outside = x[m], x[~m]
    return (inside @ outside.t()).tanh().sum() + (inside.t() @ inside).square().mean()


def written_back(x, y, m):
    whole = torch.zeros_like(x)
    whole[m] = x[m].exp()
    rows = torch.where(m)[0]
    whole = whole.index_add(0, rows, x[rows] * 3)
    whole[rows] = whole[rows] * 2
    return (whole * x).sum()


def numbers_that_the_mask_excludes(x, y, m):
    holed = torch.where(m[:, None], x, torch.full_like(x, float("nan")))
    known = ~holed.isnan().any(1)
    return F.cross_entropy(holed[known], y[known]) + x[x > 0].log().mean()


def pairs(x, y, m):
    distance = torch.cdist(x, x)
    same = y[:, None] == y[None]
    return distance[same].mean() - distance[~same].mean()


def picked_classes(x, y, m):
    rows, labels = F.log_softmax(x[m], 1), y[m]
    picked = rows[torch.arange(rows.size(0)), labels] + rows.gather(1, labels[:, None])[:, 0]
    return -(picked * F.one_hot(labels, 5).float().sum(1)).mean()


def class_means(x, y, m):
    classes, inverse, counts = torch.unique(y, return_inverse=True, return_counts=True)
    means = torch.zeros(classes.size(0), 5).index_add(0, inverse, x) / counts[:, None]
    return (x - means[inverse]).square().sum(1).mean() + means.square().mean()


def sorted_errors(x, y, m):
    errors, order = torch.sort(x[m].flatten(), descending=True)
    hits = (y[m][:, None].expand(-1, 5).flatten() > 2).float()[order]
    return torch.dot(F.relu(errors), 1 - hits.cumsum(0) / (hits.sum() + 1))


def off_diagonal(x, y, m):
    other = ~torch.eye(8, dtype=torch.bool)
    return (x @ x.t()).masked_select(other).view(8, 7).logsumexp(1).mean()


def selected_again(x, y, m):
    rows = x[m]
    return rows[rows[:, 0] > 0].square().sum() + rows.view(-1).abs().sum() + x[:, m[:5]].square().mean()


def joined(x, y, m):
    rows, labels = torch.cat([x[m], x, x[~m] * 2]), torch.cat([y[m], y, y[~m]])
    return F.cross_entropy(rows, labels) + torch.cat([x[m][:, 0], x[:, 1]]).std() + rows.flatten().logsumexp(0)


def turned(x, y, m):
    return (x[m].flip(0) * x[m]).sum() + (x[m].flip(0, 1) * x[m]).cumsum(0).sum()


def middles(x, y, m):
    return x[m].median() + x[m].median(0).values.sum() + x[m][:, 1].nanmedian()


def cut(x, y, m):
    rows = x[m]
    steps = (rows[1:] - rows[:-1]).square().sum()
    return steps + rows[:3].sum() + rows[-2:].prod(0).sum() + rows[::2].exp().sum() + rows[1:-1].sum()


def beside_labels(x, y, m):
    return -F.log_softmax(x, 1)[m, y[m]].sum() + (x[:, 1:4][m, y[m].clamp(max=2)] ** 2).sum()


def batch_statistics(x, y, m):
    return (F.batch_norm(x[m], None, None, training=True) * x[m]).sum()


def among_the_rows(x, y, m):
    rows = x[m]
    alike = (rows @ rows.t()).masked_fill(torch.eye(rows.size(0)).bool(), -9.0)
    others = (rows @ x[~m].t()).logsumexp((0, 1)).clamp(min=-50)
    return alike.logsumexp(1).sum() + others + torch.triu(alike, 1).sum() + alike.diagonal().sum()


def masks_computed_twice(x, y, m):
    total = F.mse_loss(x[:, 0][y > 2], y[y > 2].float()) + (x[m & (y != 1)] * x.detach()[m & (y != 1)]).sum()
    return total + F.l1_loss(x[:, 0].masked_select(y.view(-1) > 2), y.masked_select(y.view(-1).gt(2)).float())


def masks_of_what_is_written_between(x, y, m):
    wanted = y.float()
    total = x[:, 0][wanted > 2].sum()
    wanted[:4].mul_(-1)
    total = total + x[:, 1][wanted > 2].sum() * 2
    mask = wanted > 2
    other = (wanted > 2).logical_not_()
    return total + x[:, 2][mask].sum() * 3 + x[:, 3][other].sum() * 4


QUICK = [masked_cross_entropy, written_back, numbers_that_the_mask_excludes, class_means]
QUICK += [masks_of_what_is_written_between]
LOSSES = [
    positions,
    two_halves,
    moments,
    extremes,
    softmax_over_rows,
    products,
    pairs,
    picked_classes,
    sorted_errors,
    off_diagonal,
    selected_again,
    joined,
    turned,
    middles,
    cut,
    beside_labels,
    batch_statistics,
    among_the_rows,
]


class Selecting(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.eye(5) + 0.1)

    def forward(self, x, y, m):
        return self.function(x @ self.weight, y, m)


def drawn(seed: int):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 5, generator=g), torch.randint(0, 5, (8,), generator=g)


MASKS = [torch.tensor([1, 0, 1, 1, 0, 0, 1, 0]).bool(), torch.ones(8).bool(), torch.zeros(8).bool()]


@pytest.mark.parametrize(
    "function",
    [*QUICK, *(pytest.param(function, marks=pytest.mark.slow) for function in LOSSES)],
    ids=lambda function: function.__name__,
)
def test_a_selection_has_torchs_value_and_gradient_for_any_number_of_rows(function):
    module = Selecting(function)
    converted = from_torch(module, (*drawn(0), MASKS[0]), modes=("training",))
    step = jax.jit(jax.value_and_grad(lambda x, y, m: converted(x, y, m)))
    for seed, mask in enumerate([*MASKS, torch.arange(8) % 3 == 0]):
        x, y = drawn(seed + 1)
        inputs = x.requires_grad_()
        try:
            value = module(inputs, y, mask)
        except (RuntimeError, IndexError):  # torch has no maximum of nothing
            continue
        (slope,) = torch.autograd.grad(value, inputs)
        ours, gradient = step(jnp.asarray(x.detach()), jnp.asarray(y, jnp.int32), jnp.asarray(mask.numpy()))
        np.testing.assert_allclose(ours, value.item(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(gradient, slope, rtol=1e-3, atol=1e-4)


def test_a_selection_that_leaves_the_module_is_refused():
    with pytest.raises(UnsupportedModel, match="returns a tensor whose shape depends on the values of another"):
        from_torch(Selecting(lambda x, y, m: x[m]), (*drawn(0), MASKS[0]))


def test_an_operator_that_does_not_know_selections_is_refused_by_name():
    with pytest.raises(UnsupportedModel, match=r"aten\.glu\.default of a tensor whose shape depends on the values"):
        from_torch(Selecting(lambda x, y, m: F.glu(x[m], 0).mean()), (*drawn(0), MASKS[0]))
