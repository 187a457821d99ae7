"""The original's losses that add a regulariser to HJEPALoss."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from jaxtrain.systems.hjepa.losses import halves
from jaxtrain.systems.hjepa.original.contrastive import NTXentLoss
from jaxtrain.systems.hjepa.original.jepa_loss import HJEPALoss
from jaxtrain.systems.hjepa.original.loss_module import arrays_too, not_negative, of_levels, to_rows
from jaxtrain.systems.hjepa.original.regularizer_losses import SIGRegLoss, VICRegLoss


class CombinedLoss(nn.Module):
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
        huber_delta: float = 1.0,
        vicreg_weight: float | list[float] = 0.1,
        vicreg_invariance_weight: float = 25.0,
        vicreg_variance_weight: float = 25.0,
        vicreg_covariance_weight: float = 1.0,
        vicreg_variance_threshold: float = 1.0,
        apply_vicreg_per_level: bool = True,
        vicreg_on_targets: bool = False,
        reduction: str = "mean",
        eps: float = 1e-8,
        *,
        detach_targets: bool = True,
    ):
        super().__init__()
        jepa = (jepa_loss_type, jepa_hierarchy_weights, num_hierarchies, reduction, normalize_embeddings, huber_delta)
        self.num_hierarchies, self.eps = num_hierarchies, eps
        self.jepa_loss = HJEPALoss(*jepa, eps, detach_targets)
        weights = of_levels(vicreg_weight, num_hierarchies, "vicreg_weight")
        self.register_buffer("_vicreg_weights", torch.tensor(weights))
        self.apply_vicreg_per_level, self.vicreg_on_targets = apply_vicreg_per_level, vicreg_on_targets
        self.vicreg_loss = VICRegLoss(
            vicreg_invariance_weight,
            vicreg_variance_weight,
            vicreg_covariance_weight,
            vicreg_variance_threshold,
            eps,
        )

    @property
    def vicreg_weights(self) -> torch.Tensor:
        """Return the weight of each level's VICReg term, float [level]."""
        return self._vicreg_weights

    def get_loss_summary(self, loss_dict: Mapping[str, torch.Tensor | float]) -> str:
        """Return a line per term of `loss_dict`, in its order, for printing."""
        return summary(loss_dict)

    @arrays_too
    def forward(self, predictions, targets, masks=None, context_features=None) -> dict[str, torch.Tensor]:
        """Take the arguments of HJEPALoss. context_features: [batch, 1 + patch, width] of the context encoder."""
        base = self.jepa_loss(predictions, targets, masks)
        weights, terms = self._vicreg_weights, {}
        if context_features is not None:
            regularizer = self.vicreg_loss(*halves(context_features)[:2])
            extra = weights[0] * regularizer["loss"]
            terms["vicreg_encoder"] = regularizer["loss"]
            terms |= {
                f"vicreg_{name}": regularizer[f"{name}_loss"] for name in ("invariance", "variance", "covariance")
            }
        elif self.apply_vicreg_per_level:
            extra = 0.0
            for level in range(self.num_hierarchies):
                regularizer = self.vicreg_loss(*self._views(predictions[level], targets[level]))
                extra = extra + weights[level] * regularizer["loss"]
                terms[f"vicreg_h{level}"] = regularizer["loss"]
                for name in ("invariance", "variance", "covariance"):
                    terms[f"vicreg_{name}_h{level}"] = regularizer[f"{name}_loss"]
        else:
            regularizer = self.vicreg_loss(*self._views(predictions[-1], targets[-1]))
            extra = weights[-1] * regularizer["loss"]
            terms |= {
                f"vicreg_{name}": value for name, value in regularizer.items()
            }  # so vicreg_loss is unweighted here
        return base | {"jepa_loss": base["loss"], "vicreg_loss": extra} | terms | {"loss": base["loss"] + extra}

    def _views(self, prediction, target):
        return (target, prediction) if self.vicreg_on_targets else views_of_level(prediction, target)

    def extra_repr(self) -> str:
        return f"num_hierarchies={self.num_hierarchies}, apply_vicreg_per_level={self.apply_vicreg_per_level}"


def views_of_level(prediction, target):
    """Return the halves of a level's predictions; for a batch of one, the prediction and its target."""
    return (prediction, target) if len(prediction) == 1 else halves(prediction)[:2]


def summary(loss_dict: Mapping[str, torch.Tensor | float]) -> str:
    """Return the terms of a loss as lines of `name: value`; terms of more than one number are left out."""
    plain = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in loss_dict.items()}
    single = {name: value for name, value in plain.items() if getattr(value, "ndim", 0) == 0}
    return "\n".join(f"{name}: {float(value):.6f}" for name, value in single.items())


class HierarchicalCombinedLoss(CombinedLoss):
    """HJEPALoss plus a separate VICReg for every level; vicreg_configs holds the arguments of each.

    kwargs: further arguments of CombinedLoss, by name.
    """

    def __init__(
        self,
        jepa_loss_type: str = "smoothl1",
        jepa_hierarchy_weights: float | list[float] = 1.0,
        num_hierarchies: int = 3,
        normalize_embeddings: bool = True,
        vicreg_weight: float | list[float] = 0.1,
        vicreg_configs: list[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ):
        jepa = (jepa_loss_type, jepa_hierarchy_weights, num_hierarchies, normalize_embeddings)
        super().__init__(*jepa, vicreg_weight=vicreg_weight, **kwargs)
        configs = [{}] * num_hierarchies if vicreg_configs is None else list(vicreg_configs)
        if len(configs) != num_hierarchies:
            raise ValueError(f"vicreg_configs: {len(configs)} for {num_hierarchies} levels (num_hierarchies)")
        self.vicreg_losses = nn.ModuleList(VICRegLoss(**config) for config in configs)

    @arrays_too
    def forward(self, predictions, targets, masks=None, *, context_features=None) -> dict[str, torch.Tensor]:
        """Take the arguments of HJEPALoss; context_features is not used."""
        base = self.jepa_loss(predictions, targets, masks)
        extra, terms = 0.0, {}
        for level, (weight, loss) in enumerate(zip(self._vicreg_weights, self.vicreg_losses, strict=True)):
            regularizer = loss(*views_of_level(predictions[level], targets[level]))
            extra = extra + weight * regularizer["loss"]
            terms[f"vicreg_h{level}"] = regularizer["loss"]
            terms |= {f"vicreg_{name}_h{level}": value for name, value in regularizer.items() if name != "loss"}
        return base | terms | {"loss": base["loss"] + extra, "jepa_loss": base["loss"], "vicreg_loss": extra}


class HJEPASIGRegLoss(nn.Module):
    """jepa_loss plus sigreg_weight * SIGReg's statistic on the halves of a batch of context features.

    The halves' distance is only logged. Raises ValueError for a negative weight.
    """

    def __init__(self, jepa_loss: HJEPALoss, sigreg_loss: SIGRegLoss, sigreg_weight: float = 1.0):
        super().__init__()
        not_negative(sigreg_weight=sigreg_weight)
        self.jepa_loss, self.sigreg_loss, self.sigreg_weight = jepa_loss, sigreg_loss, sigreg_weight

    @arrays_too
    def forward(self, predictions, targets, masks=None, context_features=None) -> dict[str, torch.Tensor]:
        """Take the arguments of CombinedLoss. Raises ValueError without context_features."""
        base = self.jepa_loss(predictions, targets, masks)
        first, second = self._views(context_features)
        statistic = (self.sigreg_loss.statistic(first) + self.sigreg_loss.statistic(second)) / 2
        total = base["loss"] + self.sigreg_weight * statistic
        distance = (first - second).square().mean()
        extra = {"loss": total, "jepa_loss": base["loss"], "sigreg_loss": statistic, "sigreg_invariance": distance}
        return base | extra

    def _views(self, context_features):
        if context_features is None:
            raise ValueError("HJEPASIGRegLoss wants context_features [batch, token, width]")
        return [to_rows(x) for x in halves(context_features)[:2]]


class ContrastiveJEPALoss(nn.Module):
    """C-JEPA: jepa_weight * a JEPA loss + contrastive_weight * NT-Xent between the class tokens of two views.

    contrastive_on_context: of two pairs of views, the context's counts, else the target's; an only pair always does.
    """

    def __init__(
        self,
        jepa_loss: nn.Module,
        jepa_weight: float = 1.0,
        contrastive_weight: float = 0.1,
        contrastive_temperature: float = 0.1,
        use_cosine_similarity: bool = True,
        contrastive_on_context: bool = False,
        reduction: str = "mean",
        eps: float = 1e-8,
    ):
        super().__init__()
        not_negative(jepa_weight=jepa_weight, contrastive_weight=contrastive_weight)
        self.jepa_loss, self.jepa_weight, self.contrastive_weight = jepa_loss, jepa_weight, contrastive_weight
        self.contrastive_on_context, self.eps = contrastive_on_context, eps
        self.contrastive = NTXentLoss(contrastive_temperature, use_cosine_similarity, reduction, eps)

    def get_loss_summary(self, loss_dict: Mapping[str, torch.Tensor | float]) -> str:
        """Return a line per term of `loss_dict`, in its order, for printing."""
        return summary(loss_dict)

    def extra_repr(self) -> str:
        return (
            f"jepa_weight={self.jepa_weight}, contrastive_weight={self.contrastive_weight}, "
            f"contrastive_on_context={self.contrastive_on_context}"
        )

    @arrays_too
    def forward(
        self,
        predictions,
        targets,
        context_features_i=None,
        context_features_j=None,
        target_features_i=None,
        target_features_j=None,
        masks=None,
        *,
        context_features=None,
        target_features=None,
    ) -> dict[str, torch.Tensor]:
        """Take two views, [batch, 1 + patch, width] with the class token first.

        They are context_features_i and _j, or target_features_i and _j, or a trainer's context_features and
        target_features. Raises ValueError if one is missing.
        """
        context, target = (context_features_i, context_features_j), (target_features_i, target_features_j)
        pairs = (context, target) if self.contrastive_on_context else (target, context)
        pairs += ((context_features, target_features),)
        views = next((pair for pair in pairs if pair[0] is not None and pair[1] is not None), None)
        if views is None:
            raise ValueError(
                "ContrastiveJEPALoss wants two views: context_features_i and context_features_j, or target_features_i "
                "and target_features_j"
            )
        base = self.jepa_loss(predictions, targets, masks)
        contrast = self.contrastive(*(x[:, 0] for x in views))
        return base | {
            "loss": self.jepa_weight * base["loss"] + self.contrastive_weight * contrast["loss"],
            "jepa_loss": base["loss"],
            "contrastive_loss": contrast["loss"],
            "contrastive_accuracy": contrast["accuracy"],
            "contrastive_pos_sim": contrast["positive_similarity"],
            "contrastive_neg_sim": contrast["negative_similarity"],
        }
