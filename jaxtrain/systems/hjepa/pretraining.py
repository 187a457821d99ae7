"""The pre-training task: the functions that `jaxtrain.train` calls for H-JEPA."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.data.collate import stack
from jaxtrain.nn import Carry
from jaxtrain.nn.vit import overrides, vit_size
from jaxtrain.optim import schedules
from jaxtrain.systems.hjepa import device_images, losses, metrics, tokens
from jaxtrain.systems.hjepa.losses import LossInputs
from jaxtrain.systems.hjepa.model import HJEPA
from jaxtrain.systems.hjepa.views import View, views_of
from jaxtrain.task import Loss
from torch_bridge.layouts import named_variables


def build_model(config, rngs: nnx.Rngs) -> HJEPA:
    model, original = config.model, config.compat == "original"
    size = vit_size(model.encoder_type, **overrides(model.vit))
    built = HJEPA(
        model.encoder_type,
        config.data.image_size,
        model.embed_dim or size.embed_dim,
        model.predictor.depth,
        model.predictor.num_heads,
        model.predictor.mlp_ratio,
        model.num_hierarchies,
        model.drop_path_rate,
        model.fpn.use_fpn,
        model.fpn.feature_dim,
        model.fpn.fusion_method,
        model.gradient_checkpointing,
        model.layerscale.use_layerscale,
        model.layerscale.init_value,
        model.use_target_encoder,
        model.projection_norm,
        vit=overrides(model.vit),
        rope_theta=model.rope.theta if model.rope.use_rope else None,
        copy_target_at_init=not original,
        drop_masked=model.drop_masked,
        drop_path_with_layerscale=not original,
        rngs=rngs,
    )
    if original and built.target_encoder is not None:
        built.before_update = PreviousWeights(built.context_encoder)
    return built


class PreviousWeights(nnx.Module):
    """Context encoder weights before the last update, which the original mixes into the target. Not exported."""

    def __init__(self, encoder: nnx.Module):
        self.values = nnx.List([Carry(value[...]) for value in parameters_by_key(encoder)])

    def take(self, encoder: nnx.Module) -> None:
        for previous, value in zip(self.values, parameters_by_key(encoder), strict=True):
            previous.set_value(value[...])


def is_trainable(key: str, config) -> bool:
    """Return False for the target (updated by averaging) and `pos_embed_predictor` (no gradient, so torch skips it)."""
    return not key.startswith("target_encoder.") and key != "predictor.pos_embed_predictor"


def after_update(model: HJEPA, step, config) -> None:
    """Update the target encoder. step: number of updates made so far; 1 at the first call."""
    if model.target_encoder is None:
        return
    if config.compat == "original":
        _original_update(model, step - 1, config)
    else:
        move_towards(model.target_encoder, model.context_encoder, momentum(config, step - 1))


def momentum(config, step):
    """Return the EMA momentum after 0-based update `step`: constant during warm-up, then linear to the ramp's end."""
    ema = config.model.ema
    if config.compat == "original":
        schedule = schedules.momentum(ema.momentum, ema.momentum_end, config.train.steps, ema.warmup_steps)
        return jnp.asarray([schedule(k) for k in range(config.train.steps)], jnp.float32)[step]
    steps = config.train.steps or 1
    ramp = (ema.ramp_steps or steps * (ema.ramp_ratio or 1)) - ema.warmup_steps
    return momentum_at(jnp.maximum(step - ema.warmup_steps, 0), ema.momentum, ema.momentum_end, max(1, ramp))


def _original_update(model: HJEPA, step, config) -> None:
    """Update the target as the original does: with the weights from before the update, once per micro-batch."""
    rate = momentum(config, step) ** config.train.accumulate_steps
    for ours, theirs in zip(parameters_by_key(model.target_encoder), model.before_update.values, strict=True):
        ours.set_value(rate * ours[...] + (1 - rate) * theirs[...])
    model.before_update.take(model.context_encoder)


def extra_metrics(config, step) -> dict:
    """Return additional values to log at every logged step."""
    return {"ema_momentum": momentum(config, step)} if config.model.use_target_encoder else {}


def schedule(config, planned, steps_per_epoch: int):
    """Return the learning-rate schedule.

    `compat: original` sets the rate after each update: update 0 runs at the full rate, every later one a step late.
    """
    if config.compat != "original":
        return planned
    return lambda step: 1.0 if step == 0 else planned(step - 1)


# ---- one batch


def loss(model: HJEPA, batch, config, rngs) -> Loss:
    """Return the configured loss of a batch: the mean over images that are not padding, and over crops."""
    views = views_of(model, batch, config, rngs)
    crops, value, parts, watched = sum(view.crops for view in views), jnp.zeros(()), {}, {}
    weight = batch["valid"].sum().astype(jnp.float32)
    for view in views:
        outputs = model(view.images, view.mask, view.masked, view.valid, rngs=rngs)
        terms = _terms(model, view, outputs, config, rngs)
        value = value + view.crops / crops * terms.pop("loss")
        parts = {key: parts.get(key, 0.0) + view.crops / crops * part for key, part in terms.items()}
        if rngs is not None and view is views[0]:
            watched = metrics.in_step(outputs.context_features, outputs.target_features, view.valid)
    parts = {key: jnp.where(weight > 0, part, 0.0) for key, part in parts.items()}
    return Loss(jnp.where(weight > 0, value, 0.0), weight, parts | watched)


def _terms(model: HJEPA, view: View, outputs, config, rngs) -> dict:
    """Compute the configured loss and its terms for one view."""
    function = loss_of(config)
    masks = [counted(view.masked, level, view.valid) for level in range(model.num_hierarchies)]
    directions = function.directions(outputs.context_features.shape[-1], rngs)
    compared = LossInputs(outputs.predictions, outputs.targets, outputs.context_features, masks, directions, view.valid)
    terms = dict(function(compared, outputs.target_features))
    terms.pop("contrastive_neg_sim", None)  # always -inf, as in the original
    return terms


def loss_of(config) -> losses.LossFunction:
    return losses.build(config.loss, config.model.num_hierarchies)


def counted(masked: tokens.Masked, level: int, valid):
    """Return which entries of a level enter the loss, bool [batch, token]."""
    present = masked.present(level)
    shape = (len(valid), masked.indices.shape[1] >> level)
    return jnp.broadcast_to(valid[:, None] if present is None else present & valid[:, None], shape)


def outputs(model: HJEPA, batch):
    """Return features, float [batch, width]: the mean over patches of the target encoder's level-0 features."""
    images = device_images.prepare(batch["image"], model.context_encoder.vit.grid * model.patch_size)
    return {"features": model.extract_features(images, 0).mean(1)}


def collate(items) -> dict[str, np.ndarray]:
    """Stack the items of a dataset (images, (image, label) tuples or mappings) into columns."""
    first = items[0]
    if isinstance(first, dict):
        return {str(key): stack([item[key] for item in items], str(key)) for key in first}
    if isinstance(first, (tuple, list)):
        names = ("image", "label")
        return {
            name: stack([item[i] for item in items], name) for i, name in zip(range(len(first)), names, strict=False)
        }
    return {"image": stack(list(items), "image")}


# ---- start of a run


def param_group(key: str, config) -> str:
    """Return the group of a parameter: encoder, predictor or projection. optim.groups can give each its own rate."""
    head = key.partition(".")[0]
    return {"context_encoder": "encoder", "predictor": "predictor"}.get(head, "projection")


def initial_weights(config):
    """Load both encoders from a timm-format file (model.encoder_weights), without its classifier head, or None."""
    if config.model.encoder_weights is None:
        return None
    from torch_bridge import files
    from torch_bridge.state_dict import convert_ddp_state

    state = convert_ddp_state(files.load(config.model.encoder_weights))
    state = {key: value for key, value in state.items() if not key.startswith(("head.", "fc_norm."))}
    encoders = ("context_encoder", "target_encoder") if config.model.use_target_encoder else ("context_encoder",)
    return {f"{encoder}.vit.{key}": value for encoder in encoders for key, value in state.items()}


def momentum_at(step, start: float, end: float, warmup_steps: int):
    """Return start + (end - start) * min(1, step / warmup_steps). step: a number or a traced integer."""
    if warmup_steps <= 0:
        return end + 0.0 * step
    share = step / warmup_steps
    capped = min(1.0, share) if isinstance(share, float) else share.clip(max=1.0)
    return start + (end - start) * capped


def move_towards(target: nnx.Module, context: nnx.Module, momentum) -> None:
    """Set target <- momentum * target + (1 - momentum) * context, once for every parameter."""
    for theirs, ours in zip(parameters_by_key(context), parameters_by_key(target), strict=True):
        ours.set_value((momentum * ours[...] + (1 - momentum) * theirs[...]).astype(ours.dtype))


def parameters_by_key(module: nnx.Module) -> list[nnx.Variable]:
    """Return each parameter once, sorted by key (attribute order changes when a model is split and merged)."""
    named = sorted(
        ((key, v) for key, v in named_variables(module) if isinstance(v, nnx.Param)), key=lambda pair: pair[0]
    )
    return list({id(variable): variable for _, variable in named}.values())
