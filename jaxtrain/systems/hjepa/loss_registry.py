"""`loss.type` -> a function of `Compared`."""

import dataclasses
import functools
import warnings
from collections.abc import Callable

import jax

from jaxtrain.systems.hjepa import losses
from jaxtrain.systems.hjepa.config import LossConfig
from jaxtrain.systems.hjepa.losses import LossInputs
from jaxtrain.systems.hjepa.regularizers import Terms, sigreg, slices, vicreg

PURE = ("hjepa", "jepa", "smoothl1", "mse", "huber")


@dataclasses.dataclass(frozen=True)
class LossFunction:
    """call: Compared -> terms with "loss". num_slices: random directions that it wants in `Compared.directions`."""

    call: Callable[[LossInputs], Terms]
    num_slices: int = 0
    fixed_slices: bool = False
    views: bool = False  # wants target_features as the second view of class tokens

    def __call__(self, compared: LossInputs, target_features=None) -> Terms:
        return self.call(compared, target_features) if self.views else self.call(compared)

    def directions(self, width: int, rngs):
        """Directions for this step, one draw per view; the same at every step in evaluation or if fixed."""
        if not self.num_slices:
            return None
        if rngs is None or self.fixed_slices:
            return slices(jax.random.key(0), self.num_slices, width)
        return slices(rngs(), self.num_slices, width), slices(rngs(), self.num_slices, width)


def build(config: LossConfig, levels: int, masked_mean: str = "image") -> LossFunction:
    """The loss of a config; masked_mean as in `losses.hjepa`."""
    jepa = jepa_options(config, masked_mean)
    losses.level_weights(config.hierarchy_weights, levels)
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
    test = {"test_method": config.sigreg_test_method, "num_test_points": config.sigreg_num_test_points}
    sliced = {"num_slices": config.sigreg_num_slices, "fixed_slices": config.sigreg_fixed_slices}
    if kind in PURE:
        return LossFunction(functools.partial(losses.hjepa, **jepa))
    if kind == "combined":
        options = {"vicreg_options": regular | {"eps": 1e-8}, "vicreg_weight": config.vicreg_weight}
        return LossFunction(functools.partial(losses.combined, jepa=jepa, **options))
    if kind == "hierarchical_combined":
        options = {"vicreg_configs": [regular] * levels, "vicreg_weight": config.vicreg_weight}
        return LossFunction(functools.partial(losses.hierarchical_combined, jepa=jepa, **options))
    if kind in ("hjepa_sigreg", "sigreg_combined"):
        call = functools.partial(losses.hjepa_sigreg, jepa=jepa, sigreg_loss_weight=config.sigreg_loss_weight, **test)
        return LossFunction(call, **sliced)
    if kind in ("cjepa", "contrastive_jepa"):
        options = {"contrastive_weight": config.contrastive_weight, "temperature": config.contrastive_temperature}
        call = functools.partial(losses.contrastive, jepa=jepa, **options)
        return LossFunction(lambda compared, views: call(compared, compared.context, views), views=True)
    weights = losses.level_weights(config.hierarchy_weights, levels)
    if kind == "vicreg":
        return LossFunction(functools.partial(_per_level, vicreg, weights, config.detach_targets, regular))
    options = test | {"invariance_weight": config.sigreg_invariance_weight, "sigreg_weight": config.sigreg_weight}
    return LossFunction(functools.partial(_per_level, sigreg, weights, config.detach_targets, options), **sliced)


def jepa_options(config: LossConfig, masked_mean: str = "image") -> dict:
    """Arguments of `losses.hjepa`: the distance is jepa_loss_type, else the type's own name, else smoothl1."""
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
    """sum over levels of weight * function(prediction, target): how `vicreg` and `sigreg` train here. The original's
    classes of these names cannot be called by its trainer."""
    terms: Terms = {}
    total = 0.0
    masks = compared.masks or [None] * len(weights)
    for level, (weight, mask) in enumerate(zip(weights, masks, strict=True)):
        prediction, target = compared.predictions[level], compared.targets[level]
        target = jax.lax.stop_gradient(target) if detach_targets else target
        arguments = (compared.directions,) if function is sigreg else ()
        keep = None if mask is None else mask.reshape(-1)
        found = function(prediction, target, *arguments, keep=keep, **options)
        total = total + weight * found["loss"]
        terms |= {f"{name}_h{level}": value for name, value in found.items()}
    return terms | {"loss": total}
