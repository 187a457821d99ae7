"""Criteria and metrics for torch tensors, with gradients; JAX and numpy arrays go to their JAX versions."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder import losses, metrics
from jaxtrain.systems.fmri_autoencoder.losses import FMRI_LOSSES, MODALITIES, STD_EPSILON


def wide(x: torch.Tensor) -> torch.Tensor:
    """Convert half precision and integers to float32; keep float64."""
    return x if x.dtype is torch.float64 else x.float()


def matched(kind: str, prediction: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prediction and its target in one shape, in float32 at least; see losses.matched."""
    prediction, target = wide(prediction), wide(target)
    if kind == "video" and prediction.shape != target.shape:
        return prediction, target.flatten(1)[:, : prediction.shape[-1]]
    if kind == "audio" and prediction.ndim != target.ndim:
        if prediction.ndim == 3 and prediction[0].numel() > target[0].numel():
            prediction = prediction[..., : target.shape[1] // prediction.shape[1]]
        return prediction.flatten(1), target.flatten(1)
    return prediction, target


def internal_losses(outputs: Mapping, targets: Sequence, fmri, reconstruction_weight: float, fmri_weight: float):
    """Return the model's own training-mode losses: plain mean squared errors, and the weighted `total_loss`."""
    losses = {}
    for kind, target in zip(MODALITIES, targets, strict=True):
        losses[f"{kind}_loss"] = functional.mse_loss(*matched(kind, outputs[f"{kind}_recon"], target))
    losses["reconstruction_loss"] = sum(losses.values())
    total = reconstruction_weight * losses["reconstruction_loss"]
    if fmri is not None:
        losses["fmri_loss"] = functional.mse_loss(wide(outputs["predicted_fmri"]), wide(fmri))
        total = total + fmri_weight * losses["fmri_loss"]
    return {**losses, "total_loss": total}


def tensors_among(values: Any) -> bool:
    """Return True if a torch tensor is among the arguments."""
    leaves = values.values() if isinstance(values, Mapping) else values
    return any(
        isinstance(value, torch.Tensor) or (isinstance(value, Mapping) and tensors_among(value)) for value in leaves
    )


class _Criterion(nn.Module):
    """Base class of criteria whose attributes are the settings of their JAX class."""

    JAX: type

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if "JAX" in vars(cls):
            cls.__signature__ = inspect.signature(cls.JAX)

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__()
        for name, value in vars(self.JAX(*arguments, **settings)).items():
            setattr(self, name, value)

    def __call__(self, *arguments: Any, **named: Any):
        if tensors_among(arguments) or tensors_among(named):
            return super().__call__(*arguments, **named)
        return self.JAX(**self._settings())(*arguments, **named)

    def _settings(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self.JAX)}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._settings().items())


class ReconstructionLoss(_Criterion):
    """Weighted sum of the three reconstruction errors.

    Called with (video_recon, video_target, audio_recon, audio_target, text_recon, text_target); returns the sum and a
    dict of its unweighted terms. Settings: video_weight, audio_weight, text_weight = 1.0; reduction: mean, sum, or none
    if the three shapes agree.
    """

    JAX = losses.ReconstructionLoss

    def forward(self, video_recon, video_target, audio_recon, audio_target, text_recon, text_target):
        predictions, targets = (video_recon, audio_recon, text_recon), (video_target, audio_target, text_target)
        total, parts = 0.0, {}
        for kind, prediction, target in zip(MODALITIES, predictions, targets, strict=True):
            prediction, target = matched(kind, prediction, target)
            value = raw = functional.mse_loss(prediction, target, reduction=self.reduction)
            if self.normalize_by_std:
                parts[f"{kind}_std"] = deviation = spread(target)
                value = raw / deviation
            if self._reports_raw:
                parts[f"{kind}_loss_raw"] = raw
            parts[f"{kind}_loss"] = value
            total = total + getattr(self, f"{kind}_weight") * value
        return total, {**parts, "reconstruction_loss": total}


def spread(target: torch.Tensor) -> torch.Tensor:
    """Return the unbiased standard deviation over all elements, plus 1e-8, without gradient."""
    return wide(target).detach().std() + STD_EPSILON


class FMRIMatchingLoss(_Criterion):
    """Error of the predicted voxels: mse, mae, or `correlation`, which is the uncentred cosine distance of the rows.

    Called with (prediction, target), both [batch, n_voxels]. Settings: loss_type = "mse", reduction = "mean". Raises
    UserError, a ValueError, for another loss_type.
    """

    JAX = losses.FMRIMatchingLoss

    def forward(self, predicted_fmri, target_fmri):
        return self.value(wide(predicted_fmri), wide(target_fmri))

    def value(self, prediction, target):
        if self.loss_type == "mse":
            return functional.mse_loss(prediction, target, reduction=self.reduction)
        if self.loss_type == "mae":
            return functional.l1_loss(prediction, target, reduction=self.reduction)
        if self.loss_type != "correlation":
            raise UserError(f"loss_type is {self.loss_type!r}, wanted one of {', '.join(FMRI_LOSSES)}")
        distance = 1 - (functional.normalize(prediction) * functional.normalize(target)).sum(-1)
        if self.reduction == "none":
            return distance
        return distance.sum() if self.reduction == "sum" else distance.mean()


class CombinedAutoEncoderLoss(_Criterion):
    """reconstruction_weight * reconstruction + fmri_weight * voxels (without a target, only the first term).

    Called with (outputs of the model, video, audio, text, fmri=None); returns the total and a dict of its terms.
    Settings: reconstruction_weight, fmri_weight, video_weight, audio_weight, text_weight = 1.0, fmri_loss_type = "mse".
    """

    JAX = losses.CombinedAutoEncoderLoss
    PARTS = (ReconstructionLoss, FMRIMatchingLoss)

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        reconstruction, fmri = self.PARTS
        options = {"normalize_by_std": self.normalize_by_std} if hasattr(self, "normalize_by_std") else {}
        weights = self.video_weight, self.audio_weight, self.text_weight
        self.reconstruction_loss = reconstruction(*weights, **options)
        self.fmri_loss = fmri(self.fmri_loss_type, **options)

    def forward(self, outputs, video_target, audio_target, text_target, fmri_target=None):
        recon, targets = (outputs[f"{kind}_recon"] for kind in MODALITIES), (video_target, audio_target, text_target)
        pairs = [x for pair in zip(recon, targets, strict=True) for x in pair]
        reconstruction, parts = self.reconstruction_loss(*pairs)
        total = self.reconstruction_weight * reconstruction
        if fmri_target is not None:
            value = self.fmri_loss(outputs["predicted_fmri"], fmri_target)
            value, fmri_parts = value if isinstance(value, tuple) else (value, {})
            parts = {**parts, "fmri_loss": value, **fmri_parts}
            total = total + self.fmri_weight * value
        return total, {**parts, "total_loss": total}


class NormalizedReconstructionLoss(ReconstructionLoss):
    """ReconstructionLoss with each error divided by the spread of its target over the batch (normalize_by_std)."""

    JAX = losses.NormalizedReconstructionLoss


class NormalizedFMRIMatchingLoss(FMRIMatchingLoss):
    """FMRIMatchingLoss with mse and mae divided by the spread of the target over the batch; `correlation` as it is.

    Returns (value, {"fmri_loss", "fmri_loss_raw", "fmri_std" if it was divided}).
    """

    JAX = losses.NormalizedFMRIMatchingLoss

    def forward(self, predicted_fmri, target_fmri):
        value = raw = self.value(wide(predicted_fmri), wide(target_fmri))
        parts = {"fmri_loss_raw": raw}
        if self.normalize_by_std and self.loss_type != "correlation":
            parts["fmri_std"] = deviation = spread(target_fmri)
            value = raw / deviation
        return value, {"fmri_loss": value, **parts}


class NormalizedCombinedAutoEncoderLoss(CombinedAutoEncoderLoss):
    """CombinedAutoEncoderLoss with normalised terms."""

    JAX = losses.NormalizedCombinedAutoEncoderLoss
    PARTS = (NormalizedReconstructionLoss, NormalizedFMRIMatchingLoss)


class PerceptualLoss(nn.Module):
    """Placeholder: like the original's, the constructor raises NotImplementedError."""

    def __init__(self, layer_weights: Mapping[str, float] | None = None):
        raise NotImplementedError("PerceptualLoss: the original has none either; ReconstructionLoss compares pixels")


def criterion(config) -> CombinedAutoEncoderLoss:
    """Return the criterion of a config: normalised for the second generation unless the config says otherwise."""
    in_jax = losses.criterion(config)
    kinds = (CombinedAutoEncoderLoss, NormalizedCombinedAutoEncoderLoss)
    return next(kind for kind in kinds if kind.JAX is type(in_jax))(**vars(in_jax))


def compute_correlation_metric(predicted, target, dim: int = 1):
    """Return the Pearson correlation along `dim`; 0 for a constant slice. dim=1: over voxels, one value per volume."""
    if not tensors_among((predicted, target)):
        return metrics.compute_correlation_metric(predicted, target, dim)
    x, y = (z - z.mean(dim, keepdim=True) for z in (wide(predicted), wide(target)))
    return (x * y).sum(dim) / (x.square().sum(dim).sqrt() * y.square().sum(dim).sqrt() + metrics.EPSILON)


def compute_r2_score(predicted, target, dim: int = 1):
    """Return 1 - residual / total sum of squares along `dim`."""
    if not tensors_among((predicted, target)):
        return metrics.compute_r2_score(predicted, target, dim)
    predicted, target = wide(predicted), wide(target)
    total = (target - target.mean(dim, keepdim=True)).square().sum(dim)
    return 1 - (target - predicted).square().sum(dim) / (total + metrics.EPSILON)
