"""The training losses of H-JEPA and their registry.

Each loss takes `LossInputs` and returns a dict of scalars, of which "loss" is minimised; names and values are those of
the torch original. Masks: bool [batch, token] per level, True = counts.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.systems.hjepa.config import LossConfig
from jaxtrain.systems.hjepa.regularizers import Terms, normalize, ntxent, sigreg, sigreg_statistic, slices, vicreg


class LossInputs(NamedTuple):
    """Inputs of a loss. predictions, targets: per level [batch, token, width].

    context: [batch, 1 + token, width] of the context encoder, class token first. masks: per level, or None. directions:
    SIGReg's slices [slice, width], or a pair. rows: bool [batch], samples that are not padding.
    """

    predictions: list
    targets: list
    context: Any = None
    masks: Any = None
    directions: Any = None
    rows: Any = None


def element_loss(difference, loss_type: str, huber_delta: float = 1.0):
    """Return the loss per element. mse: d^2; smoothl1: torch's with beta 1; huber: torch's with delta."""
    size = jnp.abs(difference)
    if loss_type == "mse":
        return jnp.square(difference)
    if loss_type == "smoothl1":
        return jnp.where(size < 1, 0.5 * jnp.square(difference), size - 0.5)
    if loss_type == "huber":
        linear = huber_delta * (size - huber_delta / 2)
        return jnp.where(size <= huber_delta, 0.5 * jnp.square(difference), linear)
    raise ValueError(f"loss_type={loss_type!r} is unknown; known: mse, smoothl1, huber")


def hjepa(
    compared: LossInputs,
    *,
    loss_type: str = "smoothl1",
    hierarchy_weights: float | list[float] = 1.0,
    reduction: str = "mean",
    normalize_embeddings: bool = True,
    huber_delta: float = 1.0,
    eps: float = 1e-8,
    detach_targets: bool = True,
    masked_mean: str = "image",
) -> Terms:
    """Return the sum over levels of weight * distance(prediction, target), and its terms.

    masked_mean defines the mean over masked tokens: "image" averages over the tokens and elements of each sample, then
    over the samples that have any; "position" (the original) divides the sum over elements by the number of positions.
    """
    predictions, targets = compared.predictions, compared.targets
    weights = level_weights(hierarchy_weights, len(predictions))
    masks = compared.masks or [None] * len(predictions)
    if not len(predictions) == len(targets) == len(masks):
        raise ValueError(
            f"{len(predictions)} predictions, {len(targets)} targets, {len(masks)} masks: one per level each"
        )
    losses = []
    for level, (prediction, target, mask) in enumerate(zip(predictions, targets, masks, strict=True)):
        if prediction.shape != target.shape:
            raise ValueError(f"level {level}: prediction {prediction.shape} and target {target.shape} differ in shape")
        target = jax.lax.stop_gradient(target) if detach_targets else target
        if normalize_embeddings:
            prediction, target = normalize(prediction, eps), normalize(target, eps)
        prediction, target = (x.astype(jnp.float32) for x in (prediction, target))
        losses.append(_reduce(element_loss(prediction - target, loss_type, huber_delta), mask, reduction, masked_mean))
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    named = {f"loss_h{level}": loss for level, loss in enumerate(losses)}
    return {"loss": total, **named, "loss_unweighted": sum(losses) / len(losses)}


def level_weights(weights: float | list[float], levels: int) -> list[float]:
    """Return one weight per level, from one number or a list. Raises ValueError for a list of another length."""
    if isinstance(weights, (int, float)):
        return [float(weights)] * levels
    if len(weights) != levels:
        raise ValueError(f"loss.hierarchy_weights: {len(weights)} weights for {levels} levels")
    return [float(weight) for weight in weights]


def _reduce(elements, mask, reduction: str, masked_mean: str):
    if mask is not None:
        elements = jnp.where(mask[..., None], elements, 0)
    if reduction == "none":
        return elements
    if reduction == "sum":
        return elements.sum()
    if mask is None:
        return elements.mean()
    if masked_mean == "position":
        return elements.sum() / (mask.sum() + 1e-8)
    tokens = mask.sum(1)
    image = elements.sum((1, 2)) / (jnp.maximum(tokens, 1) * elements.shape[-1])
    return image.sum() / jnp.maximum((tokens > 0).sum(), 1)


def halves(features, rows=None):
    """Return the first and second half of a batch as two views, and which pairs count (None: all).

    With rows (bool [batch]), only the samples that count are split, as if the others were absent. An odd last sample is
    left out; a batch of one is used as both views.
    """
    size = len(features)
    half = size // 2
    if size == 1:
        return features, features, rows
    if rows is None:
        return features[:half], features[half : 2 * half], None
    order = jnp.argsort(~rows, stable=True)
    count = rows.sum()
    pairs = jnp.where(count == 1, 1, count // 2)
    position = jnp.arange(max(half, 1))
    second = jnp.where(count == 1, position, jnp.minimum(position + pairs, size - 1))
    return features[order[position]], features[order[second]], position < pairs


def combined(
    compared: LossInputs,
    *,
    jepa: dict,
    vicreg_options: dict,
    vicreg_weight: float | list[float] = 0.1,
    apply_vicreg_per_level: bool = True,
    vicreg_on_targets: bool = False,
) -> Terms:
    """Return H-JEPA plus VICReg, on the halves of a batch of context features if given, or else of level features."""
    base = hjepa(compared, **jepa)
    terms: Terms = {}
    weights = level_weights(vicreg_weight, len(compared.predictions))
    if compared.context is not None:
        first, second, keep = halves(compared.context, compared.rows)
        regularizer = vicreg(first, second, keep=keep, **vicreg_options)
        extra = weights[0] * regularizer["loss"]
        terms["vicreg_encoder"] = regularizer["loss"]
        terms |= {f"vicreg_{name}": regularizer[f"{name}_loss"] for name in ("invariance", "variance", "covariance")}
    elif apply_vicreg_per_level:
        extra = jnp.zeros(())
        for level, weight in enumerate(weights):
            first, second, keep = _level_views(compared, level, vicreg_on_targets)
            regularizer = vicreg(first, second, keep=keep, **vicreg_options)
            extra = extra + weight * regularizer["loss"]
            terms[f"vicreg_h{level}"] = regularizer["loss"]
            for name in ("invariance", "variance", "covariance"):
                terms[f"vicreg_{name}_h{level}"] = regularizer[f"{name}_loss"]
    else:
        first, second, keep = _level_views(compared, len(weights) - 1, vicreg_on_targets)
        regularizer = vicreg(first, second, keep=keep, **vicreg_options)
        extra = weights[-1] * regularizer["loss"]
        terms |= {f"vicreg_{name}": value for name, value in regularizer.items()}  # so vicreg_loss is unweighted here
    return base | {"jepa_loss": base["loss"], "vicreg_loss": extra} | terms | {"loss": base["loss"] + extra}


def _level_views(compared: LossInputs, level: int, on_targets: bool):
    prediction, target = compared.predictions[level], compared.targets[level]
    if on_targets:
        return target, prediction, compared.rows
    if len(prediction) == 1:
        return prediction, target, compared.rows
    return halves(prediction, compared.rows)


def hierarchical_combined(
    compared: LossInputs, *, jepa: dict, vicreg_configs: list[dict], vicreg_weight: float | list[float] = 0.1
) -> Terms:
    """Return H-JEPA plus a separate VICReg for every level; vicreg_configs holds the arguments of each."""
    base = hjepa(compared, **jepa)
    weights = level_weights(vicreg_weight, len(compared.predictions))
    extra, terms = jnp.zeros(()), {}
    for level, (weight, options) in enumerate(zip(weights, vicreg_configs, strict=True)):
        first, second, keep = _level_views(compared, level, False)
        regularizer = vicreg(first, second, keep=keep, **options)
        extra = extra + weight * regularizer["loss"]
        terms[f"vicreg_h{level}"] = regularizer["loss"]
        terms |= {f"vicreg_{name}_h{level}": value for name, value in regularizer.items() if name != "loss"}
    return base | terms | {"loss": base["loss"] + extra, "jepa_loss": base["loss"], "vicreg_loss": extra}


def hjepa_sigreg(compared: LossInputs, *, jepa: dict, sigreg_loss_weight: float = 1.0, **test) -> Terms:
    """Return H-JEPA plus SIGReg's statistic on the halves of a batch of context features; only log their distance."""
    base = hjepa(compared, **jepa)
    first, second, keep = halves(compared.context, compared.rows)
    if keep is not None:
        keep = jnp.repeat(keep, first.shape[1])
    directions = compared.directions if isinstance(compared.directions, (tuple, list)) else (compared.directions,) * 2
    views = [x.reshape(-1, x.shape[-1]).astype(jnp.float32) for x in (first, second)]
    statistic = sum(sigreg_statistic(x, d, keep=keep, **test) for x, d in zip(views, directions, strict=True)) / 2
    square = jnp.square(views[0] - views[1]).mean(-1)
    distance = square.mean() if keep is None else jnp.where(keep, square, 0).sum() / jnp.maximum(keep.sum(), 1)
    total = base["loss"] + sigreg_loss_weight * statistic
    extra = {"loss": total, "jepa_loss": base["loss"], "sigreg_loss": statistic, "sigreg_invariance": distance}
    return base | extra


def contrastive(
    compared: LossInputs,
    view_i,
    view_j,
    *,
    jepa: dict,
    jepa_weight: float = 1.0,
    contrastive_weight: float = 0.1,
    temperature: float = 0.1,
    use_cosine_similarity: bool = True,
) -> Terms:
    """Return C-JEPA: H-JEPA plus NT-Xent between the class tokens of two views [batch, 1 + token, width]."""
    base = hjepa(compared, **jepa)
    terms = ntxent(
        view_i[:, 0],
        view_j[:, 0],
        temperature=temperature,
        use_cosine_similarity=use_cosine_similarity,
        keep=compared.rows,
    )
    return base | {
        "loss": jepa_weight * base["loss"] + contrastive_weight * terms["loss"],
        "jepa_loss": base["loss"],
        "contrastive_loss": terms["loss"],
        "contrastive_accuracy": terms["accuracy"],
        "contrastive_pos_sim": terms["positive_similarity"],
        "contrastive_neg_sim": terms["negative_similarity"],
    }


PURE = ("hjepa", "jepa", "smoothl1", "mse", "huber")


@dataclasses.dataclass(frozen=True)
class LossFunction:
    """The configured loss. call: LossInputs -> terms with "loss". num_slices: random directions it needs as input."""

    call: Callable[[LossInputs], Terms]
    num_slices: int = 0
    fixed_slices: bool = False
    views: bool = False  # needs target_features as the second view of class tokens

    def __call__(self, compared: LossInputs, target_features=None) -> Terms:
        return self.call(compared, target_features) if self.views else self.call(compared)

    def directions(self, width: int, rngs):
        """Return random directions for this step, one draw per view; fixed in evaluation or if fixed_slices is set."""
        if not self.num_slices:
            return None
        if rngs is None or self.fixed_slices:
            return slices(jax.random.key(0), self.num_slices, width)
        return slices(rngs(), self.num_slices, width), slices(rngs(), self.num_slices, width)


def build(config: LossConfig, levels: int, masked_mean: str = "image") -> LossFunction:
    """Build the loss of a config; masked_mean as in `losses.hjepa`."""
    jepa = jepa_options(config, masked_mean)
    level_weights(config.hierarchy_weights, levels)
    if config.type in PURE and config.vicreg_weight != LossConfig().vicreg_weight:
        warnings.warn(f"loss.type: {config.type} has no VICReg term; loss.vicreg_* has no effect", stacklevel=2)
    kind = config.type
    if kind in PURE and config.use_contrastive:
        kind = "cjepa"
    regular = {
        "invariance_weight": config.vicreg_invariance_weight,
        "variance_weight": config.vicreg_variance_weight,
        "covariance_weight": config.vicreg_covariance_weight,
    }
    test = {
        "test_method": config.sigreg_test_method,
        "num_test_points": config.sigreg_num_test_points,
        "num_quadrature": config.sigreg_char_function_num_quadrature,
        "t_min": config.sigreg_char_function_t_min,
        "t_max": config.sigreg_char_function_t_max,
        "lambda_": config.sigreg_char_function_lambda,
    }
    sliced = {"num_slices": config.sigreg_num_slices, "fixed_slices": config.sigreg_fixed_slices}
    if kind in PURE:
        return LossFunction(functools.partial(hjepa, **jepa))
    if kind == "combined":
        options = {"vicreg_options": regular | {"eps": 1e-8}, "vicreg_weight": config.vicreg_weight}
        return LossFunction(functools.partial(combined, jepa=jepa, **options))
    if kind == "hierarchical_combined":
        options = {"vicreg_configs": [regular] * levels, "vicreg_weight": config.vicreg_weight}
        return LossFunction(functools.partial(hierarchical_combined, jepa=jepa, **options))
    if kind in ("hjepa_sigreg", "sigreg_combined"):
        call = functools.partial(hjepa_sigreg, jepa=jepa, sigreg_loss_weight=config.sigreg_loss_weight, **test)
        return LossFunction(call, **sliced)
    if kind in ("cjepa", "contrastive_jepa"):
        options = {"contrastive_weight": config.contrastive_weight, "temperature": config.contrastive_temperature}
        call = functools.partial(contrastive, jepa=jepa, **options)
        return LossFunction(lambda compared, views: call(compared, compared.context, views), views=True)
    weights = level_weights(config.hierarchy_weights, levels)
    if kind == "vicreg":
        return LossFunction(functools.partial(_per_level, vicreg, weights, config.detach_targets, regular))
    options = test | {"invariance_weight": config.sigreg_invariance_weight, "sigreg_weight": config.sigreg_weight}
    return LossFunction(functools.partial(_per_level, sigreg, weights, config.detach_targets, options), **sliced)


def jepa_options(config: LossConfig, masked_mean: str = "image") -> dict:
    """Return arguments of `losses.hjepa`. The distance is jepa_loss_type, else the type's own name, else smoothl1."""
    named = config.type if config.type in ("smoothl1", "mse", "huber") else "smoothl1"
    return {
        "loss_type": config.jepa_loss_type or named,
        "hierarchy_weights": config.hierarchy_weights,
        "reduction": config.reduction,
        "normalize_embeddings": config.normalize_embeddings,
        "huber_delta": config.huber_delta,
        "detach_targets": config.detach_targets,
        "masked_mean": masked_mean,
    }


def _per_level(function, weights, detach_targets: bool, options: dict, compared: LossInputs) -> Terms:
    """Return the sum over levels of weight * function(prediction, target), the training form of `vicreg` and `sigreg`.

    The original's trainer cannot call its classes of these names.
    """
    terms: Terms = {}
    total = 0.0
    masks = compared.masks or [None] * len(weights)
    for level, (weight, mask) in enumerate(zip(weights, masks, strict=True)):
        prediction, target = compared.predictions[level], compared.targets[level]
        target = jax.lax.stop_gradient(target) if detach_targets else target
        arguments = (compared.directions,) if function is sigreg else ()
        keep = None if mask is None else mask.reshape(-1)
        level_terms = function(prediction, target, *arguments, keep=keep, **options)
        total = total + weight * level_terms["loss"]
        terms |= {f"{name}_h{level}": value for name, value in level_terms.items()}
    return terms | {"loss": total}
