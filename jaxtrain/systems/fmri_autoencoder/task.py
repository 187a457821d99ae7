"""What training the autoencoders means: loss, metrics, and the original's schedule on request."""

import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder.config import HeadOptions
from jaxtrain.systems.fmri_autoencoder.gen1 import SherlockAutoencoder
from jaxtrain.systems.fmri_autoencoder.head import MultimodalAutoencoder
from jaxtrain.systems.fmri_autoencoder.losses import (
    CombinedAutoEncoderLoss,
    NormalizedCombinedAutoEncoderLoss,
)
from jaxtrain.systems.fmri_autoencoder.metrics import (
    compute_correlation_metric,
    compute_r2_score,
    voxel_correlation,
    voxel_sums,
)
from jaxtrain.systems.fmri_autoencoder.original.schedules import OriginalRate, gen1_rate, head_rate
from jaxtrain.task import Loss, Statistics

OUTPUTS = ("bottleneck", "predicted_fmri", "video_recon", "audio_recon", "text_recon")


def build_model(config, rngs):
    """Either generation, by the options' kind. Raises UserError where the batch cannot be cut into its groups."""
    options = config.model
    micro_batch = config.data.batch_size // config.train.accumulate_steps
    if micro_batch % options.batch_norm_groups:
        raise UserError(
            f"model.batch_norm_groups: {options.batch_norm_groups} does not divide the {micro_batch} samples of a "
            "micro-batch; 1 normalises over all of them"
        )
    if isinstance(options, HeadOptions):
        return MultimodalAutoencoder(options, statistics_twice=config.compat == "original", rngs=rngs)
    return SherlockAutoencoder(options, rngs=rngs)


def criterion(config) -> CombinedAutoEncoderLoss:
    """The criterion of a config: normalised for the second generation unless told otherwise."""
    options = config.loss
    normalized = options.normalize_by_std
    if normalized is None:
        normalized = isinstance(config.model, HeadOptions)
    weights = {name: value for name, value in options if name != "normalize_by_std"}
    return NormalizedCombinedAutoEncoderLoss(**weights) if normalized else CombinedAutoEncoderLoss(**weights)


def loss(model, batch, config, rngs) -> Loss:
    """Reconstruction and voxels, a mean over the valid volumes; the terms are logged unweighted."""
    outputs = model(batch["video"], batch["audio"], batch["text"], rngs=rngs, valid=batch["valid"])
    targets = (batch[name] for name in ("video", "audio", "text", "fmri"))
    total, parts = criterion(config)(outputs, *targets, valid=batch["valid"])
    parts = {name: value for name, value in parts.items() if name != "total_loss"}
    return Loss(total, batch["valid"].sum(), parts)


def outputs(model, batch) -> dict:
    """bottleneck, predicted_fmri, video_recon, audio_recon, text_recon."""
    found = model(batch["video"], batch["audio"], batch["text"])
    return {name: found[name] for name in OUTPUTS}


def eval_statistics(outputs, batch, config) -> Statistics:
    prediction, target = (z.astype(jnp.float32) for z in (outputs["predicted_fmri"], batch["fmri"]))
    valid = batch["valid"]
    over_valid = lambda values: jnp.where(valid, values, 0).sum()
    rows = {
        "fmri_correlation": compute_correlation_metric(prediction, target),
        "fmri_r2": compute_r2_score(prediction, target),
        "fmri_mse": jnp.square(prediction - target).mean(-1),
    }
    return Statistics(sums={name: over_valid(values) for name, values in rows.items()} | _prefixed(prediction, batch))


def _prefixed(prediction, batch) -> dict:
    return {f"voxel_{name}": value for name, value in voxel_sums(prediction, batch["fmri"], batch["valid"]).items()}


def compute(sums, rows, config) -> dict[str, float]:
    """voxel_correlation: Pearson over time, averaged over voxels; `_p90` the voxel better than nine in ten. The mean
    predictor's are 0. fmri_correlation and fmri_r2: over voxels, averaged over volumes, as the original reports them.
    fmri_mse_of_mean: error of predicting every voxel by its mean, beside the model's fmri_mse."""
    voxels = {name.removeprefix("voxel_"): value for name, value in sums.items() if name.startswith("voxel_")}
    count = max(float(voxels["count"]), 1.0)
    found = voxel_correlation(voxels)
    variance = np.asarray(voxels["yy"], np.float64) / count - np.square(np.asarray(voxels["y"], np.float64) / count)
    return {
        "voxel_correlation": float(found.mean()),
        "voxel_correlation_p90": float(np.percentile(found, 90)),
        **{name: float(sums[name]) / count for name in ("fmri_correlation", "fmri_r2", "fmri_mse")},
        "fmri_mse_of_mean": float(variance.mean()),
    }


def schedule(config, given, steps_per_epoch: int):
    """The core's schedule, or under compat: original the one that the original follows by mistake."""
    settings = config.optim.schedule
    kinds = {"cosine": "cosine", "step": "step", "constant": "none"}
    if config.compat != "original" or settings.name not in kinds or not config.optim.lr:
        return given
    epochs = settings.warmup_epochs
    if epochs is None:
        epochs = (settings.warmup_steps or 0) / steps_per_epoch
    if epochs != int(epochs):
        raise UserError("optim.schedule: compat: original counts the warm-up in whole epochs; set warmup_epochs")
    rule = OriginalRate(
        base=config.optim.lr,
        steps=steps_per_epoch,
        epochs=-(-config.train.steps // steps_per_epoch),
        warmup_epochs=int(epochs),
        min_lr=settings.min_lr,
        kind=kinds[settings.name],
    )
    rate = (head_rate if isinstance(config.model, HeadOptions) else gen1_rate)(rule)
    return lambda step: rate(step) / config.optim.lr
