"""Loss operators. `reduction` is torch's code: 0 none, 1 mean, 2 sum."""

import jax
import jax.numpy as jnp

from torch_bridge.lowering.dtypes import promote, wide
from torch_bridge.lowering.operators.derivatives import absolute, derived, sloped
from torch_bridge.lowering.table import lowering


def _reduce(values, reduction: int):
    return (lambda x: x, jnp.mean, jnp.sum)[reduction](values)


@lowering("mse_loss.default")
def mse_loss(call, x, target, reduction=1):
    x, target = promote(x, target)
    return _reduce(jnp.square(x - target), reduction)


@lowering("l1_loss.default")
def l1_loss(call, x, target, reduction=1):
    x, target = promote(x, target)
    return _reduce(absolute(x - target), reduction)


@lowering("smooth_l1_loss.default")
def smooth_l1_loss(call, x, target, reduction=1, beta=1.0):
    x, target = promote(x, target)
    error = absolute(x - target)
    if beta == 0:
        return _reduce(error, reduction)
    return _reduce(jnp.where(error < beta, 0.5 * error**2 / beta, error - 0.5 * beta), reduction)


@lowering("huber_loss.default")
def huber_loss(call, x, target, reduction=1, delta=1.0):
    x, target = promote(x, target)
    error = absolute(x - target)
    return _reduce(jnp.where(error < delta, 0.5 * error**2, delta * (error - 0.5 * delta)), reduction)


@lowering("binary_cross_entropy.default")
def binary_cross_entropy(call, x, target, weight=None, reduction=1):
    """Compute the loss with logarithms of at least -100 and a gradient's denominator of at least 1e-12, as torch."""
    log = lambda p: jnp.maximum(jnp.log(p), -100)
    fixed, aim = jax.lax.stop_gradient((x, target))
    values = -(aim * log(fixed) + (1 - aim) * log(1 - fixed))
    slope = (x - target) / jnp.maximum((1 - x) * x, 1e-12)
    values = sloped(values, (x, slope), (target, jnp.log(1 - x) - jnp.log(x)))
    return _reduce(values if weight is None else values * weight, reduction)


@lowering("binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits(call, x, target, weight=None, pos_weight=None, reduction=1):
    positive = jax.nn.softplus(-x) if pos_weight is None else pos_weight * jax.nn.softplus(-x)
    values = target * positive + (1 - target) * jax.nn.softplus(x)
    return _reduce(values if weight is None else values * weight, reduction)


@lowering("kl_div.default")
def kl_div(call, x, target, reduction=1, *, log_target=False):
    if log_target:
        return _reduce(jnp.exp(target) * (target - x), reduction)
    return _reduce(jax.scipy.special.xlogy(target, target) - target * x, reduction)


@lowering("soft_margin_loss.default")
def soft_margin_loss(call, x, target, reduction=1):
    return _reduce(jax.nn.softplus(-target * x), reduction)


@lowering("multi_margin_loss.default")
def multi_margin_loss(call, x, target, p=1, margin=1, weight=None, reduction=1):
    """Compute the loss; a margin that is met exactly has no gradient."""
    lonely = x.ndim < 2
    rows, classes = jnp.atleast_2d(x), target.reshape(-1)
    short = margin - jnp.take_along_axis(rows, classes[:, None], axis=1) + rows
    counted = (short > 0) & (jnp.arange(rows.shape[1]) != classes[:, None])
    values = jnp.where(counted, short, 0) ** int(p)
    if weight is not None:
        values = values * weight[classes][:, None]
    values = values.sum(1) / rows.shape[1]
    return _reduce(values[0] if lonely else values, reduction)


@lowering("multilabel_margin_loss_forward.default")
def multilabel_margin_loss(call, x, target, reduction=1):
    """Return the loss, and which classes are targets. target: classes of each row, up to the first -1."""
    lonely = x.ndim < 2
    rows, classes = jnp.atleast_2d(x), jnp.atleast_2d(target)
    listed = jnp.cumsum(classes == -1, axis=-1) == 0
    safe = jnp.where(listed, classes, 0)
    is_target = jnp.any(jax.nn.one_hot(safe, rows.shape[1], dtype=bool) & listed[..., None], axis=1)
    margins = 1 - jnp.take_along_axis(rows, safe, axis=1)[:, :, None] + rows[:, None]
    counted = listed[:, :, None] & ~is_target[:, None] & (margins > 0)
    values = jnp.where(counted, margins, 0).sum((1, 2)) / rows.shape[1]
    values = values[0] if lonely else values
    return _reduce(values, reduction), is_target.astype(x.dtype).reshape(target.shape)


def _class_axis(x) -> int:
    return 1 if x.ndim > 1 else 0


def _picked(log_probabilities, target, weight, ignore_index):
    """Return the target's -log p times its weight, and the weight, per element; both are 0 where ignored."""
    axis = _class_axis(log_probabilities)
    counted = target != ignore_index
    safe = jnp.where(counted, target, 0)
    value = -jnp.squeeze(jnp.take_along_axis(log_probabilities, jnp.expand_dims(safe, axis), axis, mode="clip"), axis)
    each = counted.astype(value.dtype) if weight is None else jnp.where(counted, jnp.take(weight, safe), 0)
    return jnp.where(counted, value, 0) * each, each


@lowering("nll_loss_nd.default", "nll_loss.default", "nll_loss2d.default")
def nll_loss(call, x, target, weight=None, reduction=1, ignore_index=-100):
    values, weights = _picked(x, target, weight, ignore_index)
    return jnp.sum(values) / jnp.sum(weights) if reduction == 1 else _reduce(values, reduction)


@lowering("nll_loss_forward.default", "nll_loss2d_forward.default")
def nll_loss_forward(call, x, target, weight, reduction, ignore_index):
    """Return the loss and the sum of weights."""
    values, weights = _picked(x, target, weight, ignore_index)
    total = jnp.sum(weights)
    return (jnp.sum(values) / total if reduction == 1 else _reduce(values, reduction)), total


@lowering("cross_entropy_loss.default")
def cross_entropy_loss(call, x, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0):
    """x: logits [batch, class, *space] or [class]; target: class numbers, or probabilities of x's shape."""
    axis = _class_axis(x)
    log_p = jax.nn.log_softmax(wide(x), axis=axis)
    shape = tuple(-1 if a == axis else 1 for a in range(x.ndim))
    if target.shape == x.shape and jnp.issubdtype(target.dtype, jnp.floating):
        classes = x.shape[axis]
        target = target * (1 - label_smoothing) + label_smoothing / classes
        values = -(target * log_p * (1 if weight is None else weight.reshape(shape))).sum(axis)
        return (jnp.sum(values) / (values.size) if reduction == 1 else _reduce(values, reduction)).astype(x.dtype)
    values, weights = _picked(log_p, target, weight, ignore_index)
    if label_smoothing:
        smooth = -(log_p if weight is None else log_p * weight.reshape(shape)).sum(axis)
        smooth = jnp.where(target != ignore_index, smooth, 0) / x.shape[axis]
        values = (1 - label_smoothing) * values + label_smoothing * smooth
    value = jnp.sum(values) / jnp.sum(weights) if reduction == 1 else _reduce(values, reduction)
    return value.astype(x.dtype)


@lowering("ctc_loss.Tensor", "ctc_loss.IntList")
def ctc_loss(call, log_probs, targets, input_lengths, target_lengths, blank=0, reduction=1, zero_infinity=False):
    """Compute the loss. log_probs: [time, batch, class]; targets: [batch, label], or all labels in one row. The mean is
    torch's: it divides each sample's loss by its number of labels. Source: Graves et al. 2006, equations 6 to 8."""
    input_lengths, target_lengths = jnp.asarray(input_lengths), jnp.asarray(target_lengths)
    if targets.ndim == 1:
        start = jnp.cumsum(target_lengths) - target_lengths
        targets = jnp.take(targets, start[:, None] + jnp.arange(targets.shape[0]), mode="clip")
    values = jax.vmap(_ctc, in_axes=(1, 0, 0, 0, None))(log_probs, targets, input_lengths, target_lengths, blank)
    lost = jnp.isinf(values)
    if zero_infinity:
        values = jnp.where(lost, 0, values)
    values = values + _slope_of_softmax(log_probs, input_lengths, lost, 0 if zero_infinity else jnp.nan)
    if reduction == 1:
        return jnp.mean(values / jnp.maximum(target_lengths, 1))
    return _reduce(values, reduction)


def _slope_of_softmax(log_probs, lengths, lost, where_lost):
    """Return zeros [batch] whose derivative turns the CTC loss's into torch's, for log_probs of a log softmax.

    lost: the samples without any alignment, whose derivative is `where_lost`.
    """
    counted = jnp.arange(log_probs.shape[0])[:, None, None] < lengths[:, None]
    slope = jnp.where(lost[:, None], jnp.asarray(where_lost, log_probs.dtype), jnp.exp(log_probs))
    slope = jnp.where(counted, slope, 0)
    nothing = jnp.zeros(lost.shape, log_probs.dtype)
    return derived(nothing, lambda slope, move: jnp.sum(slope * move, (0, 2)), slope, log_probs)


_FAR = -1e30  # stands for log 0 inside the recursion, where -inf would turn gradients into NaN


def _ctc(log_p, labels, steps, length, blank):
    """Return -log of the sum over all alignments of one sample. log_p: [time, class]; labels: [label]."""
    count = labels.shape[0]
    extended = jnp.full(2 * count + 1, blank, labels.dtype).at[1::2].set(labels)
    state = jnp.arange(2 * count + 1)
    before = jnp.concatenate([jnp.full(2, blank, labels.dtype), extended[:-2]]) if count else extended
    skips = (extended != blank) & (extended != before) & (state > 1)
    start = jnp.where(state == 0, log_p[0, blank], _FAR)
    if count:
        start = start.at[1].set(jnp.where(length > 0, log_p[0, extended[1]], _FAR))

    def step(alpha, inputs):
        row, time = inputs
        one = jnp.concatenate([jnp.full(1, _FAR), alpha[:-1]])
        two = jnp.where(skips, jnp.concatenate([jnp.full(2, _FAR), alpha[:-2]])[: alpha.size], _FAR)
        new = jax.nn.logsumexp(jnp.stack([alpha, one, two]), axis=0) + row[extended]
        return jnp.where(time < steps, jnp.maximum(new, _FAR), alpha), None

    alpha, _ = jax.lax.scan(step, start, (log_p[1:], jnp.arange(1, log_p.shape[0])))
    last = jnp.where((state == 2 * length) | (state == 2 * length - 1), alpha, _FAR)
    total = jax.nn.logsumexp(last)
    return jnp.where(total < _FAR / 2, jnp.inf, -total)
