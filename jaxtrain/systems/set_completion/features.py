"""Task `sae`: train a sparse autoencoder on activations of a frozen model that pass through a ring buffer.

Every step runs the frozen model on one batch of sets, writes the pooled vectors to the buffer, draws sae.batch_size
rows of the buffer and updates the autoencoder on them, all inside the compiled step.
"""

import pathlib

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.errors import UserError
from jaxtrain.losses import weighted_mean
from jaxtrain.metrics import ratio
from jaxtrain.runtime.prng import initial_rngs
from jaxtrain.systems.set_completion.losses import run_model, shown, visible_ids
from jaxtrain.systems.set_completion.model import SetCompletionModel
from jaxtrain.systems.set_completion.sae import (
    RingBuffer,
    SparseAutoencoder,
    cosine_rate,
    l1_coefficient,
    miracle_distance,
    original_total_steps,
    resample,
    sae_loss,
    usage_coefficient,
    usage_divergence,
)
from jaxtrain.systems.set_completion.steering import reconstruction_impact
from jaxtrain.task import Loss, Statistics
from torch_bridge import files
from torch_bridge.layouts import named_variables
from torch_bridge.state_dict import compare, convert_ddp_state, explain


class FeatureModel(nnx.Module):
    """Frozen model `primary`, trained autoencoder `sae`, `buffer` of recent activations, int32 count of `updates`."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        settings, width = config.sae, config.model.hidden_dim
        self.primary = SetCompletionModel(**config.model.arguments(), rngs=rngs)
        self.sae = SparseAutoencoder(
            width, settings.expansion_factor, decoder_is_trained(config), settings.top_k, rngs=rngs
        )
        self.buffer = RingBuffer(settings.buffer_size, width, exact_fill_bug=config.compat == "original")
        self.updates = nn.Carry(jnp.zeros((), jnp.int32))


def decoder_is_trained(config) -> bool:
    return config.sae.train_decoder and config.compat != "original"


def build_model(config, rngs: nnx.Rngs) -> FeatureModel:
    return FeatureModel(config, rngs=rngs)


def trainable(key: str, config) -> bool:
    """Return True for the autoencoder's parameters, except the unused `decoder.bias` and an untrained decoder."""
    fixed = {"sae.decoder.bias"} | (set() if decoder_is_trained(config) else {"sae.decoder.weight"})
    return key.startswith("sae.") and key not in fixed


def loss(model: FeatureModel, batch, config, rngs) -> Loss:
    """Return reconstruction error + l1_coefficient * L1 + usage_coefficient * usage divergence; see sae.py.

    Training: on rows of the buffer; weight 0, so no update, until it holds sae.steps_before_train rows. Evaluation: on
    the batch's own activations, with the base coefficients of the config.
    """
    settings = config.sae
    visible = visible_ids(batch, config, rngs)
    pooled, _, present = run_model(model.primary, visible, batch["weapon"])
    pooled, counted = jax.lax.stop_gradient(pooled).astype(jnp.float32), batch["valid"] & present
    if rngs is None:
        return evaluation_loss(model.sae, pooled, counted, settings)

    model.buffer.add(pooled, counted & jnp.isfinite(pooled).all(1))
    ready = model.buffer.count() >= settings.steps_before_train
    rows = model.buffer.sample(rngs(), settings.batch_size)
    usage_before, step = model.sae.usage_ema[...], model.updates[...]
    l1 = l1_coefficient(step, settings.l1_coefficient, settings.l1_warmup_steps, settings.l1_start)
    usage = usage_coefficient(
        step,
        settings.usage_coefficient,
        settings.usage_warmup_steps,
        settings.usage_period_steps,
        settings.usage_floor,
    )
    total, parts = sae_loss(model.sae, rows, l1, usage, settings.target_usage, settings.usage_gradient)
    model.sae.usage_ema.set_value(jnp.where(ready, model.sae.usage_ema[...], usage_before))
    model.updates.set_value(step + ready)
    weight = ready.astype(jnp.float32) * settings.batch_size
    return Loss(
        jnp.where(ready, total, 0.0), weight, {name: jnp.where(ready, part, 0.0) for name, part in parts.items()}
    )


def evaluation_loss(sae: SparseAutoencoder, x, counted, settings) -> Loss:
    reconstruction, h = sae(x)
    mse, weight = weighted_mean(jnp.square(reconstruction - x).mean(1), counted)
    l1, _ = weighted_mean(jnp.abs(h).sum(1), counted)
    kl = usage_divergence(sae.usage_ema[...], settings.target_usage)
    total = mse + settings.l1_coefficient * l1 + settings.usage_coefficient * kl
    return Loss(total, weight, {"mse": mse, "l1": l1, "kl_usage": kl})


def schedule(config, core_schedule, steps_per_epoch: int):
    """Return the given schedule, or for `compat: original` its cosine with its T_max, after which it rises again."""
    if config.compat != "original":
        return core_schedule
    epochs = max(1, round(config.train.steps / steps_per_epoch))
    total = original_total_steps(epochs, steps_per_epoch, config.data.batch_size, config.sae.steps_before_train, 1)
    return lambda step: float(cosine_rate(step, 1.0, total))


def after_update(model: FeatureModel, step, config):
    """Renormalise the decoder's columns; after the updates in sae.resample_steps, reinitialise dead features.

    Returns masks of the parameters whose optimizer moments must be reset, or None.
    """
    settings, sae = config.sae, model.sae
    sae.normalize_decoder()
    if not settings.resample_steps:
        return None
    graph, state = nnx.split(sae)
    key = jax.random.fold_in(jax.random.key(config.seed), step)

    def revive(state):
        sae = nnx.merge(graph, state)
        dead = resample(
            sae,
            model.buffer.rows[...],
            model.buffer.count(),
            key,
            threshold=settings.dead_threshold,
            weight=settings.resample_weight,
            bias=settings.resample_bias,
            target_usage=settings.target_usage,
        )
        return nnx.state(sae), dead

    due = (step == jnp.asarray(settings.resample_steps)).any()
    state, dead = jax.lax.cond(due, revive, lambda state: (state, jnp.zeros(sae.hidden_dim, bool)), state)
    nnx.update(sae, state)
    stale = {
        "sae.encoder.weight": jnp.broadcast_to(dead[:, None], sae.encoder.weight.shape),
        "sae.encoder.bias": dead,
    }
    if decoder_is_trained(config):
        stale["sae.decoder.weight"] = jnp.broadcast_to(dead[None, :], sae.decoder.weight.shape)
    return stale


def outputs(model: FeatureModel, batch) -> dict:
    """Return pooled and reconstruction [batch, width], features [batch, hidden_dim], and logits and
    reconstructed_logits [batch, token]."""
    visible = shown(batch, model.primary.ability_embedding.padding_idx)
    pooled, logits, _ = run_model(model.primary, visible, batch["weapon"])
    reconstruction, h = model.sae(pooled)
    return {
        "pooled": pooled,
        "reconstruction": reconstruction,
        "features": h,
        "logits": logits,
        "reconstructed_logits": model.primary.output_layer(reconstruction),
    }


def eval_statistics(outputs, batch, config) -> Statistics:
    x, h = outputs["pooled"].astype(jnp.float32), outputs["features"].astype(jnp.float32)
    counted = batch["valid"] & (shown(batch, config.model.padding) >= 0).any(1)
    keep = lambda values: jnp.where(counted[:, None], values, 0.0).sum(0)
    targets = shown({"inputs": batch["targets"]}, config.model.padding)
    impact = reconstruction_impact(outputs["logits"], outputs["reconstructed_logits"], targets[:, 0], counted)
    return Statistics(
        sums={
            "error": keep(jnp.square(outputs["reconstruction"] - x)),
            "x": keep(x),
            "x_squared": keep(jnp.square(x)),
            "magnitude": keep(jnp.abs(h)),
            "active": keep((jnp.abs(h) > config.sae.dead_threshold).astype(jnp.float32)),
            **impact,
        }
    )


def compute(sums, rows, config) -> dict[str, float]:
    """Return the metrics of a split.

    mse, l1 (mean L1 norm of a row), l0 (active features per set), l0_sparsity (as a share of all features),
    explained_variance (of the activations around their mean), dead_ratio (share of features that no set of the split
    activates), feature_magnitude, miracle_distance, and logit_*: the effect of the reconstruction on the logits.
    `compat: original` adds cross-entropy and top-1 accuracy against the first id of the set.
    """
    count, features = float(sums["rows"]), len(sums["active"])
    variance = float((sums["x_squared"] - sums["x"] ** 2 / max(count, 1.0)).sum())
    mse = ratio(sums["error"].sum(), count * len(sums["error"]))
    l0_sparsity = ratio(sums["active"].sum(), count * features)
    dead_ratio = float((sums["active"] == 0).mean())
    original = config.compat == "original"
    metrics = {
        "mse": mse,
        "l1": ratio(sums["magnitude"].sum(), count),
        "l0": ratio(sums["active"].sum(), count),
        "l0_sparsity": l0_sparsity,
        "explained_variance": 1 - float(sums["error"].sum()) / variance if variance else 0.0,
        "dead_ratio": dead_ratio,
        "feature_magnitude": ratio(sums["magnitude"].sum(), count * features),
        "miracle_distance": miracle_distance(mse, l0_sparsity, 100 * ((1 - l0_sparsity) if original else dead_ratio)),
    }
    metrics |= {name: ratio(sums[name], count) for name in sums if name.startswith("logit_")}
    if not original:
        return metrics
    by_label = ("original_ce_loss", "reconstructed_ce_loss", "original_top1_accuracy", "reconstructed_top1_accuracy")
    labels = float(sums["labels"])
    return metrics | {name: ratio(sums[name], labels) for name in (*by_label, "top1_prediction_match_rate")}


def initial_weights(config) -> dict | None:
    """Return the frozen model's weights from sae.primary, under this task's keys; None if it is not set.

    sae.primary: a file, or a run folder with exports/best. Raises UserError if the file does not fit the model.
    """
    if config.sae.primary is None:
        return None
    path = pathlib.Path(config.sae.primary)
    if path.is_dir():
        exports = [path / "exports" / name for name in ("best.safetensors", "best.pt")]
        path = next((p for p in exports if p.is_file()), exports[-1])
    state = convert_ddp_state(files.load(path))
    expected = {
        key.removeprefix("primary."): (value.shape, value.dtype)
        for key, value in named_variables(nnx.eval_shape(lambda: build_model(config, initial_rngs(0))))
        if key.startswith("primary.")
    }
    missing, unexpected, wrong = compare(expected, state)
    if missing or unexpected or wrong:
        raise UserError("sae.primary: " + explain(missing, unexpected, wrong, str(path)))
    return {f"primary.{key}": value for key, value in state.items()}
