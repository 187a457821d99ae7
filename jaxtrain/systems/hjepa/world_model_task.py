"""Training of the world model: predict the next embedding, and keep embeddings spread out."""

import jax
import jax.numpy as jnp

from jaxtrain.nn.vit import overrides, vit_size
from jaxtrain.systems.hjepa.regularizers import sigreg_statistic, slices
from jaxtrain.systems.hjepa.world_model import LeWorldModel
from jaxtrain.task import Loss, Statistics


def build_model(config, rngs) -> LeWorldModel:
    model = config.model
    size = vit_size(model.encoder_type, **overrides(model.vit))
    return LeWorldModel(
        model.encoder_type,
        config.data.image_size,
        model.embed_dim or size.embed_dim,
        model.action_dim,
        model.predictor_depth,
        model.predictor_num_heads,
        model.predictor_mlp_ratio,
        model.predictor_dropout,
        model.predictor_max_seq_len,
        model.projection_norm,
        model.gradient_checkpointing,
        vit=overrides(model.vit),
        rngs=rngs,
    )


def loss(model: LeWorldModel, batch, config, rngs) -> Loss:
    """Squared error of the predicted next embedding plus sigreg_weight times SIGReg (characteristic function) of all
    embeddings. The target is not differentiated, as in the original's smoke script."""
    valid = batch["valid"]
    outputs = model(batch["frames"], batch["actions"], rngs, valid)
    wanted = jax.lax.stop_gradient(outputs.target_embeddings).astype(jnp.float32)
    errors = jnp.square(outputs.prediction_inputs.astype(jnp.float32) - wanted).mean((1, 2))
    weight = valid.sum().astype(jnp.float32)
    prediction = jnp.where(valid, errors, 0).sum() / jnp.maximum(weight, 1)
    rows = outputs.embeddings.reshape(-1, outputs.embeddings.shape[-1]).astype(jnp.float32)
    key = jax.random.key(0) if rngs is None else rngs()
    directions = slices(key, config.loss.sigreg_num_slices, rows.shape[-1])
    keep = jnp.repeat(valid, outputs.embeddings.shape[1])
    test = {"test_method": "char_function", "num_quadrature": config.loss.sigreg_num_quadrature}
    statistic = jnp.where(weight > 0, sigreg_statistic(rows, directions, keep=keep, **test), 0.0)
    value = prediction + config.loss.sigreg_weight * statistic
    return Loss(value, weight, {"prediction": prediction, "sigreg": statistic})


def outputs(model: LeWorldModel, batch):
    """embeddings, predictions: float [batch, step, width]."""
    found = model(batch["frames"], batch["actions"])
    return {"embeddings": found.embeddings, "predictions": found.predictions}


def eval_statistics(outputs, batch, config) -> Statistics:
    embeddings, predictions = outputs["embeddings"], outputs["predictions"]
    errors = jnp.square(predictions[:, :-1] - embeddings[:, 1:]).mean((1, 2))
    still = jnp.square(embeddings[:, :-1] - embeddings[:, 1:]).mean((1, 2))
    valid = batch["valid"]
    total = lambda values: jnp.where(valid, values, 0).sum()
    return Statistics(sums={"error": total(errors), "still": total(still), "count": valid.sum()})


def compute(sums, rows, config) -> dict[str, float]:
    """prediction_error: mean square per number. error_ratio: over that of "nothing moves"; below 1 is learning."""
    return {
        "prediction_error": float(sums["error"]) / max(float(sums["count"]), 1),
        "error_ratio": float(sums["error"]) / max(float(sums["still"]), 1e-12),
    }
