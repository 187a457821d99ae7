"""The original's HJEPALoss: distances of predictions and targets, summed over the hierarchy levels."""

import torch
from torch import nn
from torch.nn import functional

from jaxtrain.systems.hjepa.original.loss_module import arrays_too, of_levels

DISTANCES = ("mse", "smoothl1", "huber")
REDUCTIONS = ("mean", "sum", "none")


class HJEPALoss(nn.Module):
    """Sum over levels of weight * distance(prediction, target). Returns loss, loss_h0, ..., loss_unweighted.

    loss_type: mse, smoothl1 (beta 1) or huber (huber_delta). hierarchy_weights: one for all levels, or one each.
    normalize_embeddings: compare directions only. Raises ValueError for other values.

    Values are the original's: with masks, the sum over elements is divided by the number of *positions*, so it is
    `width` times the unmasked value.
    """

    def __init__(
        self,
        loss_type: str = "smoothl1",
        hierarchy_weights: float | list[float] = 1.0,
        num_hierarchies: int = 3,
        reduction: str = "mean",
        normalize_embeddings: bool = True,
        huber_delta: float = 1.0,
        eps: float = 1e-8,
        detach_targets: bool = True,
    ):
        super().__init__()
        for name, value, known in (("loss_type", loss_type, DISTANCES), ("reduction", reduction, REDUCTIONS)):
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown; known: {', '.join(known)}")
        self.loss_type, self.reduction = loss_type, reduction
        self.num_hierarchies = num_hierarchies
        self.normalize_embeddings, self.detach_targets = normalize_embeddings, detach_targets
        self.huber_delta, self.eps = huber_delta, eps
        weights = of_levels(hierarchy_weights, num_hierarchies, "hierarchy_weights")
        self.register_buffer("_hierarchy_weights", torch.tensor(weights))

    @property
    def hierarchy_weights(self) -> torch.Tensor:
        """Return the weight of each level, float [level]."""
        return self._hierarchy_weights

    @arrays_too
    def forward(self, predictions, targets, masks=None, context_features=None) -> dict[str, torch.Tensor]:
        """Return the loss and its terms. Raises ValueError if the numbers or shapes of the arguments differ.

        predictions, targets: per level [batch, token, width]. masks: per level bool [batch, token], True counts; or
        None.
        context_features: not used.
        """
        self._check(predictions, targets, masks)
        masks = [None] * len(predictions) if masks is None else masks
        levels = [
            self._level(prediction, target, mask)
            for prediction, target, mask in zip(predictions, targets, masks, strict=True)
        ]
        if len({level.shape for level in levels}) > 1:
            raise ValueError(
                "reduction='none' keeps every element, and levels of different shapes have no sum; take mean"
            )
        total = sum(weight * loss for weight, loss in zip(self._hierarchy_weights, levels, strict=True))
        named = {f"loss_h{level}": loss for level, loss in enumerate(levels)}
        return {"loss": total, **named, "loss_unweighted": sum(levels) / len(levels)}

    def _check(self, predictions, targets, masks) -> None:
        counts = {"predictions": len(predictions), "targets": len(targets)}
        counts |= {} if masks is None else {"masks": len(masks)}
        if set(counts.values()) != {self.num_hierarchies}:
            got = ", ".join(f"{count} {name}" for name, count in counts.items())
            raise ValueError(f"got {got}, wanted one per level: num_hierarchies is {self.num_hierarchies}")
        for level, (prediction, target) in enumerate(zip(predictions, targets, strict=True)):
            if prediction.shape != target.shape:
                raise ValueError(
                    f"level {level}: prediction {tuple(prediction.shape)} and target {tuple(target.shape)} "
                    "differ in shape"
                )
            mask = None if masks is None else masks[level]
            if mask is not None and mask.shape != prediction.shape[:-1]:
                raise ValueError(
                    f"level {level}: mask {tuple(mask.shape)} has not the prediction's {tuple(prediction.shape[:-1])}"
                )

    def _level(self, prediction, target, mask):
        target = target.detach() if self.detach_targets else target
        if self.normalize_embeddings:
            prediction, target = (functional.normalize(x, dim=-1, eps=self.eps) for x in (prediction, target))
        elements = self._elements(prediction, target)
        if mask is not None:
            elements = elements * mask[..., None].to(elements.dtype)
        if self.reduction == "none":
            return elements
        if self.reduction == "sum":
            return elements.sum()
        return elements.mean() if mask is None else elements.sum() / (mask.sum() + 1e-8)

    def _elements(self, prediction, target):
        if self.loss_type == "mse":
            return functional.mse_loss(prediction, target, reduction="none")
        if self.loss_type == "smoothl1":
            return functional.smooth_l1_loss(prediction, target, reduction="none")
        return functional.huber_loss(prediction, target, reduction="none", delta=self.huber_delta)

    def extra_repr(self) -> str:
        return (
            f"loss_type={self.loss_type}, num_hierarchies={self.num_hierarchies}, "
            f"hierarchy_weights={[round(weight, 6) for weight in self._hierarchy_weights.tolist()]}, "
            f"reduction={self.reduction}, normalize_embeddings={self.normalize_embeddings}"
        )
