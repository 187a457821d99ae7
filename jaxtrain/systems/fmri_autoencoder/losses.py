"""Criteria: reconstruction of film, sound and text, and the match of predicted and measured voxels.

Every term is a mean over the real rows of the batch; `valid` (bool [batch]) marks them, None takes all. The torch
originals are the same functions with `valid=None`. All compute in float32, or in float64 for float64 inputs.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jax.lax import stop_gradient

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder.config import HeadOptions
from jaxtrain.task import Loss

STD_EPSILON = 1e-8
NORM_EPSILON = 1e-12  # torch.nn.functional.normalize
MODALITIES = ("video", "audio", "text")
FMRI_LOSSES = ("mse", "mae", "correlation")


def wide(x):
    """Convert half precision and integers to float32; keep float64."""
    return x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def squared_error(prediction, target):
    return jnp.square(prediction - target)


def absolute_error(prediction, target):
    return jnp.abs(prediction - target)


def reduce(values, valid=None, reduction: str = "mean"):
    """Return mean or sum of values float [batch, ...] over the valid rows, or the values themselves ("none")."""
    if reduction == "none":
        return values
    mask = _rows(valid, values)
    total = jnp.where(mask, values, 0).sum()
    if reduction == "sum":
        return total
    count = jnp.broadcast_to(mask, values.shape).sum()
    return total / jnp.maximum(count, 1)


def spread(target, valid=None):
    """Return the unbiased standard deviation over all elements of the valid rows, plus 1e-8. Source: torch.std."""
    target = wide(target)
    mask = _rows(valid, target)
    count = jnp.broadcast_to(mask, target.shape).sum()
    mean = jnp.where(mask, target, 0).sum() / jnp.maximum(count, 1)
    variance = jnp.where(mask, jnp.square(target - mean), 0).sum() / jnp.maximum(count - 1, 1)
    return jnp.sqrt(variance) + STD_EPSILON


def cosine_distance(prediction, target):
    """Return 1 - cosine of the angle between rows, not mean-centred: [batch, n] -> [batch]; 1 for a row of zeros."""
    unit = lambda x: x / jnp.maximum(_norm(x), NORM_EPSILON)
    return 1 - (unit(prediction) * unit(target)).sum(-1)


def _norm(x):
    square = jnp.square(x).sum(-1, keepdims=True)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)  # a zero row has gradient 0, not NaN


def _rows(valid, values):
    """Return a mask that broadcasts against values [batch, ...]."""
    if valid is None:
        return jnp.ones((1,) * values.ndim, bool)
    return valid.reshape(-1, *(1,) * (values.ndim - 1))


def matched(kind: str, prediction, target):
    """Return the prediction and its target in one shape, in float32 at least.

    Video of one shape is compared as it is; a target wider than the decoder's one frame is cut to its first columns,
    the oldest frame of the window. If one audio is [batch, rows, frames] and the other [batch, columns], both are
    flattened; a decoder that returns more frames than the target has (EnCodec's 112 for a configured 65) is cut to the
    target's.
    """
    prediction, target = wide(prediction), wide(target)
    if kind == "video" and prediction.shape != target.shape:
        target = target.reshape(target.shape[0], -1) if target.ndim > 2 else target
        target = target[:, : prediction.shape[-1]]
    if kind == "audio" and prediction.ndim != target.ndim:
        if prediction.ndim == 3 and prediction[0].size > target[0].size:
            prediction = prediction[..., : target.shape[1] // prediction.shape[1]]
        prediction, target = (x.reshape(x.shape[0], -1) for x in (prediction, target))
    return prediction, target


def internal_losses(outputs, video, audio, text, fmri, valid, options) -> dict:
    """Return the model's own training-mode losses: plain mean squared errors, and the weighted `total_loss`."""
    targets = dict(zip(MODALITIES, (video, audio, text), strict=True))
    losses = {}
    for kind, target in targets.items():
        pair = matched(kind, outputs[f"{kind}_recon"], target)
        losses[f"{kind}_loss"] = reduce(squared_error(*pair), valid)
    losses["reconstruction_loss"] = sum(losses.values())
    total = options.reconstruction_weight * losses["reconstruction_loss"]
    if fmri is not None:
        error = squared_error(wide(outputs["predicted_fmri"]), wide(fmri))
        losses["fmri_loss"] = reduce(error, valid)
        total = total + options.fmri_weight * losses["fmri_loss"]
    return {**losses, "total_loss": total}


@dataclasses.dataclass(frozen=True)
class ReconstructionLoss:
    """Weighted sum of the three reconstruction errors.

    Called with (video_recon, video_target, audio_recon, audio_target, text_recon, text_target, valid=None); returns the
    sum and a dict of its unweighted terms. reduction: mean, sum, or none if the three shapes agree.
    """

    video_weight: float = 1.0
    audio_weight: float = 1.0
    text_weight: float = 1.0
    reduction: str = "mean"
    normalize_by_std: bool = dataclasses.field(default=False, repr=False, kw_only=True)
    _reports_raw: bool = dataclasses.field(default=False, repr=False, kw_only=True)

    def __call__(self, video_recon, video_target, audio_recon, audio_target, text_recon, text_target, valid=None):
        pairs = zip(
            MODALITIES, (video_recon, audio_recon, text_recon), (video_target, audio_target, text_target), strict=True
        )
        total, parts = 0.0, {}
        for kind, prediction, target in pairs:
            prediction, target = matched(kind, jnp.asarray(prediction), jnp.asarray(target))
            value = raw = reduce(squared_error(prediction, target), valid, self.reduction)
            if self.normalize_by_std:
                parts[f"{kind}_std"] = deviation = stop_gradient(spread(target, valid))
                value = raw / deviation
            if self._reports_raw:
                parts[f"{kind}_loss_raw"] = raw
            parts[f"{kind}_loss"] = value
            total = total + getattr(self, f"{kind}_weight") * value
        return total, {**parts, "reconstruction_loss": total}


@dataclasses.dataclass(frozen=True)
class FMRIMatchingLoss:
    """Error of the predicted voxels: mse, mae, or `correlation`, which is the uncentred cosine distance of the rows.

    Called with (prediction, target, valid=None), both [batch, n_voxels]. Raises UserError for another loss_type.
    """

    loss_type: str = "mse"
    reduction: str = "mean"

    def __call__(self, predicted_fmri, target_fmri, valid=None):
        return reduce(self.values(predicted_fmri, target_fmri), valid, self.reduction)

    def values(self, predicted_fmri, target_fmri):
        errors = {"mse": squared_error, "mae": absolute_error, "correlation": cosine_distance}
        if self.loss_type not in errors:
            raise UserError(f"loss.fmri_loss_type is {self.loss_type!r}, wanted one of {', '.join(FMRI_LOSSES)}")
        prediction, target = (wide(jnp.asarray(x)) for x in (predicted_fmri, target_fmri))
        return errors[self.loss_type](prediction, target)


@dataclasses.dataclass(frozen=True)
class CombinedAutoEncoderLoss:
    """reconstruction_weight * reconstruction + fmri_weight * voxels (without a target, only the first term).

    Called with (outputs of the model, video, audio, text, fmri=None, valid=None); returns the total and its terms.
    """

    reconstruction_weight: float = 1.0
    fmri_weight: float = 1.0
    video_weight: float = 1.0
    audio_weight: float = 1.0
    text_weight: float = 1.0
    fmri_loss_type: str = "mse"

    def __call__(self, outputs: Mapping, video_target, audio_target, text_target, fmri_target=None, valid=None):
        recon = [outputs[f"{kind}_recon"] for kind in MODALITIES]
        targets = [video_target, audio_target, text_target]
        pairs = [x for pair in zip(recon, targets, strict=True) for x in pair]
        reconstruction, parts = self._reconstruction()(*pairs, valid=valid)
        total = self.reconstruction_weight * reconstruction
        if fmri_target is not None:
            value, fmri_parts = self._fmri(outputs["predicted_fmri"], fmri_target, valid)
            parts |= {"fmri_loss": value, **fmri_parts}
            total = total + self.fmri_weight * value
        return total, {**parts, "total_loss": total}

    def _reconstruction(self):
        return ReconstructionLoss(self.video_weight, self.audio_weight, self.text_weight)

    def _fmri(self, prediction, target, valid):
        return FMRIMatchingLoss(self.fmri_loss_type)(prediction, target, valid), {}


@dataclasses.dataclass(frozen=True)
class NormalizedReconstructionLoss(ReconstructionLoss):
    """ReconstructionLoss with each error divided by the spread of its target over the batch.

    The quotient still carries the target's unit: codes (about 300) weigh more than pixels (about 0.3).
    """

    normalize_by_std: bool = True
    _reports_raw: bool = dataclasses.field(default=True, repr=False, kw_only=True)


@dataclasses.dataclass(frozen=True)
class NormalizedFMRIMatchingLoss(FMRIMatchingLoss):
    """FMRIMatchingLoss with mse and mae divided by the spread of the target over the batch; `correlation` as it is.

    Returns (value, {"fmri_loss", "fmri_loss_raw", "fmri_std" if it was divided}).
    """

    normalize_by_std: bool = True

    def __call__(self, predicted_fmri, target_fmri, valid=None):
        value = raw = reduce(self.values(predicted_fmri, target_fmri), valid, self.reduction)
        parts = {"fmri_loss_raw": raw}
        if self.normalize_by_std and self.loss_type != "correlation":
            parts["fmri_std"] = deviation = stop_gradient(spread(jnp.asarray(target_fmri), valid))
            value = raw / deviation
        return value, {"fmri_loss": value, **parts}


@dataclasses.dataclass(frozen=True)
class NormalizedCombinedAutoEncoderLoss(CombinedAutoEncoderLoss):
    """CombinedAutoEncoderLoss with normalised terms."""

    normalize_by_std: bool = True

    def _reconstruction(self):
        return NormalizedReconstructionLoss(
            self.video_weight, self.audio_weight, self.text_weight, normalize_by_std=self.normalize_by_std
        )

    def _fmri(self, prediction, target, valid):
        return NormalizedFMRIMatchingLoss(self.fmri_loss_type, normalize_by_std=self.normalize_by_std)(
            prediction, target, valid
        )


OUTPUTS = ("bottleneck", "predicted_fmri", "video_recon", "audio_recon", "text_recon")


def criterion(config) -> CombinedAutoEncoderLoss:
    """Return the criterion of a config: normalised for the second generation unless the config says otherwise."""
    options = config.loss
    normalized = options.normalize_by_std
    if normalized is None:
        normalized = isinstance(config.model, HeadOptions)
    weights = {name: value for name, value in options if name != "normalize_by_std"}
    return NormalizedCombinedAutoEncoderLoss(**weights) if normalized else CombinedAutoEncoderLoss(**weights)


def loss(model, batch, config, rngs) -> Loss:
    """Return the criterion's total, a mean over the valid volumes, and its unweighted terms for the log."""
    outputs = model(batch["video"], batch["audio"], batch["text"], rngs=rngs, valid=batch["valid"])
    targets = (batch[name] for name in ("video", "audio", "text", "fmri"))
    total, parts = criterion(config)(outputs, *targets, valid=batch["valid"])
    parts = {name: value for name, value in parts.items() if name != "total_loss"}
    return Loss(total, batch["valid"].sum(), parts)


def outputs(model, batch) -> dict:
    """Return bottleneck, predicted_fmri, video_recon, audio_recon, text_recon."""
    result = model(batch["video"], batch["audio"], batch["text"])
    return {name: result[name] for name in OUTPUTS}
