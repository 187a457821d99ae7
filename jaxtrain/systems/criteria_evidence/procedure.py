"""Loss, outputs and schedule as the trainer calls them."""

from typing import Any

from jaxtrain.optim import original_schedules
from jaxtrain.systems.criteria_evidence import losses
from jaxtrain.systems.criteria_evidence.metrics import text_tokens
from jaxtrain.task import Loss

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def forward(model, batch, rngs) -> dict[str, Any]:
    """The model on the texts of a batch; family base and the originals' trainer take them by the same names."""
    names = [f"{side}{name}" for side in ("", "criteria_", "evidence_") for name in INPUTS]
    return model(**{name: batch[name] for name in names if name in batch}, rngs=rngs)


def loss(model, batch, config, rngs) -> Loss:
    settings = config.loss
    given = forward(model, batch, rngs)
    visible = text_tokens(batch) if settings.mask_padding and "start_logits" in given else None
    return losses.combined(given, batch, settings.weights, visible, settings.label_smoothing, settings.focal_gamma)


def outputs(model, batch) -> dict[str, Any]:
    """logits [batch, class], start_logits and end_logits [batch, token], whichever the model has."""
    return forward(model, batch, None)


def schedule(config, given, steps_per_epoch: int):
    """Under `compat: original` the schedule of transformers, one step further after every epoch; else as configured."""
    settings = config.optim.schedule
    if config.compat != "original" or settings.name in ("step", "wsd", "plateau"):
        return given
    warmup = settings.warmup_steps or int((settings.warmup_ratio or 0) * config.train.steps)
    # The original's length counts micro-batches, not updates.
    total = config.train.steps * config.train.accumulate_steps
    original = original_schedules.transformers(settings.name, total, warmup, lr=config.optim.lr, power=settings.power)
    return original_schedules.with_extra_step_per_epoch(original, steps_per_epoch)
