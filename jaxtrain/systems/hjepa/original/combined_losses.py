"""The original's losses that add a regulariser to HJEPALoss, and its loss registry."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa import losses
from jaxtrain.systems.hjepa.config import LossConfig
from jaxtrain.systems.hjepa.losses import LossInputs, halves
from jaxtrain.systems.hjepa.original.jepa_loss import HJEPALoss
from jaxtrain.systems.hjepa.original.loss_module import LossModule, arrays_too, of_levels, to_rows
from jaxtrain.systems.hjepa.original.regularizer_losses import NTXentLoss, SIGRegLoss, VICRegLoss


class LevelRegularized(LossModule):
    """HJEPALoss plus VICReg with a weight per level. vicreg_weight: one for all levels, or a list."""

    def __init__(self, jepa_loss: HJEPALoss, vicreg_weight: float | list[float], num_hierarchies: int):
        super().__init__()
        self.num_hierarchies, self.jepa_loss = num_hierarchies, jepa_loss
        weights = of_levels(vicreg_weight, num_hierarchies, "vicreg_weight")
        self.register_buffer("_vicreg_weights", torch.tensor(weights))

    @property
    def vicreg_weights(self) -> torch.Tensor:
        """Return the weight of each level, float [level]."""
        return self._vicreg_weights


class CombinedLoss(LevelRegularized):
    """HJEPALoss plus VICReg, on the halves of a batch of context features if given, else of the levels' features.

    Returns the terms of both: loss, jepa_loss, vicreg_loss (weighted), loss_h*, loss_unweighted and, with context
    features, vicreg_encoder, vicreg_invariance, vicreg_variance, vicreg_covariance; without them, the same per level
    (_h*).
    """

    def __init__(
        self,
        jepa_loss_type: str = "smoothl1",
        jepa_hierarchy_weights: float | list[float] = 1.0,
        num_hierarchies: int = 3,
        normalize_embeddings: bool = True,
        vicreg_weight: float | list[float] = 0.1,
        vicreg_invariance_weight: float = 25.0,
        vicreg_variance_weight: float = 25.0,
        vicreg_covariance_weight: float = 1.0,
        vicreg_variance_threshold: float = 1.0,
        apply_vicreg_per_level: bool = True,
        vicreg_on_targets: bool = False,
        eps: float = 1e-8,
        detach_targets: bool = True,
        reduction: str = "mean",
        huber_delta: float = 1.0,
    ):
        jepa = (jepa_loss_type, jepa_hierarchy_weights, num_hierarchies, reduction, normalize_embeddings, huber_delta)
        super().__init__(HJEPALoss(*jepa, eps, detach_targets), vicreg_weight, num_hierarchies)
        self.apply_vicreg_per_level, self.vicreg_on_targets = apply_vicreg_per_level, vicreg_on_targets
        self.vicreg_loss = VICRegLoss(
            vicreg_invariance_weight,
            vicreg_variance_weight,
            vicreg_covariance_weight,
            vicreg_variance_threshold,
            eps,
        )

    @arrays_too
    def forward(self, predictions, targets, masks=None, context_features=None) -> dict[str, torch.Tensor]:
        """Take the arguments of HJEPALoss. context_features: [batch, 1 + patch, width] of the context encoder."""
        base = self.jepa_loss(predictions, targets, masks)
        weights, terms = self._vicreg_weights, {}
        if context_features is not None:
            found = self.vicreg_loss(*halves(context_features)[:2])
            extra = weights[0] * found["loss"]
            terms["vicreg_encoder"] = found["loss"]
            terms |= {f"vicreg_{name}": found[f"{name}_loss"] for name in ("invariance", "variance", "covariance")}
        elif self.apply_vicreg_per_level:
            extra = 0.0
            for level in range(self.num_hierarchies):
                found = self.vicreg_loss(*self._views(predictions[level], targets[level]))
                extra = extra + weights[level] * found["loss"]
                terms[f"vicreg_h{level}"] = found["loss"]
                for name in ("invariance", "variance", "covariance"):
                    terms[f"vicreg_{name}_h{level}"] = found[f"{name}_loss"]
        else:
            found = self.vicreg_loss(*self._views(predictions[-1], targets[-1]))
            extra = weights[-1] * found["loss"]
            terms |= {f"vicreg_{name}": value for name, value in found.items()}  # so vicreg_loss is unweighted here
        return base | {"jepa_loss": base["loss"], "vicreg_loss": extra} | terms | {"loss": base["loss"] + extra}

    def _views(self, prediction, target):
        return (target, prediction) if self.vicreg_on_targets else views_of_level(prediction, target)

    def for_arrays(self, predictions, targets, masks=None, context_features=None):
        return losses.combined(
            LossInputs(list(predictions), list(targets), context_features, masks),
            jepa=self.jepa_loss.options(),
            vicreg_options=self.vicreg_loss.options(),
            vicreg_weight=self._vicreg_weights.tolist(),
            apply_vicreg_per_level=self.apply_vicreg_per_level,
            vicreg_on_targets=self.vicreg_on_targets,
        )

    def extra_repr(self) -> str:
        return f"num_hierarchies={self.num_hierarchies}, apply_vicreg_per_level={self.apply_vicreg_per_level}"


def views_of_level(prediction, target):
    """Return the halves of a level's predictions; for a batch of one, the prediction and its target."""
    return (prediction, target) if len(prediction) == 1 else halves(prediction)[:2]


class HierarchicalCombinedLoss(LevelRegularized):
    """HJEPALoss plus a separate VICReg for every level; vicreg_configs holds the arguments of each."""

    def __init__(
        self,
        jepa_loss_type: str = "smoothl1",
        jepa_hierarchy_weights: float | list[float] = 1.0,
        num_hierarchies: int = 3,
        normalize_embeddings: bool = True,
        vicreg_configs: list[Mapping[str, Any]] | None = None,
        vicreg_weight: float | list[float] = 0.1,
        eps: float = 1e-8,
        detach_targets: bool = True,
        reduction: str = "mean",
        huber_delta: float = 1.0,
    ):
        configs = [{}] * num_hierarchies if vicreg_configs is None else list(vicreg_configs)
        if len(configs) != num_hierarchies:
            raise ValueError(f"vicreg_configs: {len(configs)} for {num_hierarchies} levels (num_hierarchies)")
        jepa = (jepa_loss_type, jepa_hierarchy_weights, num_hierarchies, reduction, normalize_embeddings, huber_delta)
        super().__init__(HJEPALoss(*jepa, eps, detach_targets), vicreg_weight, num_hierarchies)
        self.vicreg_losses = nn.ModuleList(VICRegLoss(**config) for config in configs)

    @arrays_too
    def forward(self, predictions, targets, masks=None, context_features=None) -> dict[str, torch.Tensor]:
        """Take the arguments of HJEPALoss; context_features is not used."""
        base = self.jepa_loss(predictions, targets, masks)
        extra, terms = 0.0, {}
        for level, (weight, loss) in enumerate(zip(self._vicreg_weights, self.vicreg_losses, strict=True)):
            found = loss(*views_of_level(predictions[level], targets[level]))
            extra = extra + weight * found["loss"]
            terms[f"vicreg_h{level}"] = found["loss"]
            terms |= {f"vicreg_{name}_h{level}": value for name, value in found.items() if name != "loss"}
        return base | terms | {"loss": base["loss"] + extra, "jepa_loss": base["loss"], "vicreg_loss": extra}

    def for_arrays(self, predictions, targets, masks=None, context_features=None):
        return losses.hierarchical_combined(
            LossInputs(list(predictions), list(targets), masks=masks),
            jepa=self.jepa_loss.options(),
            vicreg_configs=[loss.options() for loss in self.vicreg_losses],
            vicreg_weight=self._vicreg_weights.tolist(),
        )


class HJEPASIGRegLoss(LossModule):
    """HJEPALoss plus SIGReg's statistic on the halves of a batch of context features; their distance is only logged.

    sigreg_options: arguments of SIGRegLoss, also under a config's names (`sigreg_num_slices`, ...).
    """

    def __init__(
        self,
        jepa_loss_type: str = "smoothl1",
        jepa_hierarchy_weights: float | list[float] = 1.0,
        num_hierarchies: int = 3,
        normalize_embeddings: bool = True,
        sigreg_loss_weight: float = 1.0,
        detach_targets: bool = True,
        reduction: str = "mean",
        huber_delta: float = 1.0,
        **sigreg_options,
    ):
        super().__init__()
        self.num_hierarchies, self.sigreg_loss_weight = num_hierarchies, sigreg_loss_weight
        self.jepa_loss = HJEPALoss(
            jepa_loss_type,
            jepa_hierarchy_weights,
            num_hierarchies,
            reduction,
            normalize_embeddings,
            huber_delta,
            detach_targets=detach_targets,
        )
        cut = lambda name: name if name == "sigreg_weight" else name.removeprefix("sigreg_")
        self.sigreg_loss = SIGRegLoss(**{cut(name): value for name, value in sigreg_options.items()})

    @arrays_too
    def forward(self, predictions, targets, masks=None, context_features=None) -> dict[str, torch.Tensor]:
        """Take the arguments of CombinedLoss. Raises ValueError without context_features."""
        base = self.jepa_loss(predictions, targets, masks)
        first, second = self._views(context_features)
        statistic = (self.sigreg_loss.statistic(first) + self.sigreg_loss.statistic(second)) / 2
        total = base["loss"] + self.sigreg_loss_weight * statistic
        distance = (first - second).square().mean()
        extra = {"loss": total, "jepa_loss": base["loss"], "sigreg_loss": statistic, "sigreg_invariance": distance}
        return base | extra

    def _views(self, context_features):
        if context_features is None:
            raise ValueError("HJEPASIGRegLoss wants context_features [batch, token, width]")
        return [to_rows(x) for x in halves(context_features)[:2]]

    def for_arrays(self, predictions, targets, masks=None, context_features=None):
        width = self._views(context_features)[0].shape[1]
        directions = [self.sigreg_loss.slices(width).numpy() for _ in range(2)]
        return losses.hjepa_sigreg(
            LossInputs(list(predictions), list(targets), context_features, masks, directions),
            jepa=self.jepa_loss.options(),
            sigreg_loss_weight=self.sigreg_loss_weight,
            **self.sigreg_loss.univariate_test.options(),
        )


class ContrastiveJEPALoss(LossModule):
    """C-JEPA: jepa_weight * a JEPA loss + contrastive_weight * NT-Xent between the class tokens of two views."""

    def __init__(
        self,
        jepa_loss: nn.Module | None = None,
        jepa_weight: float = 1.0,
        contrastive_weight: float = 0.1,
        contrastive_temperature: float = 0.1,
        use_cosine_similarity: bool = True,
    ):
        super().__init__()
        self.jepa_loss = HJEPALoss() if jepa_loss is None else jepa_loss
        self.jepa_weight, self.contrastive_weight = jepa_weight, contrastive_weight
        self.contrastive_loss = NTXentLoss(contrastive_temperature, use_cosine_similarity)

    @arrays_too
    def forward(
        self,
        predictions,
        targets,
        masks=None,
        context_features_i=None,
        context_features_j=None,
        target_features_i=None,
        target_features_j=None,
        context_features=None,
        target_features=None,
    ) -> dict[str, torch.Tensor]:
        """Take two views, [batch, 1 + patch, width] with the class token first.

        They are context_features_i and _j, or target_features_i and _j, or a trainer's context_features and
        target_features. Raises ValueError if one is missing.
        """
        pairs = (
            (context_features_i, context_features_j),
            (target_features_i, target_features_j),
            (context_features, target_features),
        )
        views = next((pair for pair in pairs if pair[0] is not None and pair[1] is not None), None)
        if views is None:
            raise ValueError(
                "ContrastiveJEPALoss wants two views: context_features_i and context_features_j, or target_features_i "
                "and target_features_j"
            )
        base = self.jepa_loss(predictions, targets, masks)
        found = self.contrastive_loss(*(x[:, 0] for x in views))
        return base | {
            "loss": self.jepa_weight * base["loss"] + self.contrastive_weight * found["loss"],
            "jepa_loss": base["loss"],
            "contrastive_loss": found["loss"],
            "contrastive_accuracy": found["accuracy"],
            "contrastive_pos_sim": found["positive_similarity"],
            "contrastive_neg_sim": found["negative_similarity"],
        }

    def for_arrays(self, *args, **kwargs):
        return type(self).forward.__wrapped__(self, *args, **kwargs)  # its parts accept JAX arrays


JEPA_TYPES = ("hjepa", "jepa", "smoothl1", "mse", "huber")
TYPES = (*JEPA_TYPES, "combined", "hierarchical_combined", "vicreg", "sigreg", "hjepa_sigreg", "sigreg_combined")
TYPES += ("cjepa", "contrastive_jepa")


def create_loss_from_config(config: Mapping[str, Any]) -> nn.Module:
    """Build the loss of the original's nested config, from its `loss` section and `model.num_hierarchies`.

    Without a type: combined. Raises ValueError for an unknown type and for invalid values.
    """
    given = dict(config.get("loss") or {})
    kind = str(given.get("type", "combined")).lower()
    if kind not in TYPES:
        raise UserError(f"loss.type: {given['type']!r} is unknown; known: {', '.join(TYPES)}")
    known = {key: value for key, value in given.items() if key in LossConfig.model_fields}
    section = LossConfig(**known | {"type": kind})
    levels = (config.get("model") or {}).get("num_hierarchies") or given.get("num_hierarchies") or 3
    if kind in JEPA_TYPES and any(key.startswith("vicreg") for key in given):
        warnings.warn(f"loss.type: {kind} has no VICReg term; loss.vicreg_* has no effect", UserWarning, stacklevel=2)
    loss = build_loss(section, levels)
    loss.section = section
    return loss


create_loss_function = create_loss_from_config  # the name in the README's example


def build_loss(section: LossConfig, levels: int) -> nn.Module:
    """Build the loss of a checked `loss` section."""
    options = losses.jepa_options(section)
    jepa = {name: options[name] for name in ("reduction", "normalize_embeddings", "huber_delta", "detach_targets")}
    parts = {"jepa_loss_type": options["loss_type"], "jepa_hierarchy_weights": section.hierarchy_weights}
    parts |= {"num_hierarchies": levels} | jepa
    regular = {
        name: getattr(section, f"vicreg_{name}")
        for name in ("invariance_weight", "variance_weight", "covariance_weight")
    }
    sliced = {
        "num_slices": section.sigreg_num_slices,
        "num_test_points": section.sigreg_num_test_points,
        "invariance_weight": section.sigreg_invariance_weight,
        "sigreg_weight": section.sigreg_weight,
        "fixed_slices": section.sigreg_fixed_slices,
        "test_method": section.sigreg_test_method,
        "char_function_t_min": section.sigreg_char_function_t_min,
        "char_function_t_max": section.sigreg_char_function_t_max,
        "char_function_num_quadrature": section.sigreg_char_function_points,
        "char_function_lambda": section.sigreg_char_function_lambda,
    }
    kind = section.type
    if kind == "combined":
        weights = {f"vicreg_{name}": value for name, value in regular.items()}
        return CombinedLoss(**parts, vicreg_weight=section.vicreg_weight, **weights)
    if kind == "hierarchical_combined":
        return HierarchicalCombinedLoss(**parts, vicreg_weight=section.vicreg_weight, vicreg_configs=[regular] * levels)
    if kind in ("hjepa_sigreg", "sigreg_combined"):
        return HJEPASIGRegLoss(**parts, sigreg_loss_weight=section.sigreg_loss_weight, **sliced)
    if kind in ("vicreg", "sigreg"):
        loss = VICRegLoss(**regular) if kind == "vicreg" else SIGRegLoss(**sliced)
        loss.hierarchy_weights = section.hierarchy_weights
        return loss
    base = HJEPALoss(options["loss_type"], section.hierarchy_weights, levels, **jepa)
    if kind in ("cjepa", "contrastive_jepa") or section.use_contrastive:
        return ContrastiveJEPALoss(
            base,
            contrastive_weight=section.contrastive_weight,
            contrastive_temperature=section.contrastive_temperature,
        )
    return base
