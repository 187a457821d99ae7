"""The original's YAML (as nested dicts) -> this project's settings, and the other way to what its functions read."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.config import LossConfig

SECTIONS = ("model", "data", "training", "masking", "loss", "checkpoint", "logging")


def convert(original: Mapping[str, Any], steps_per_epoch: int = 1, accelerator: bool = False) -> dict[str, Any]:
    """Settings for `task: hjepa.pretrain` that do what the original's file promises.

    Keys that the original ignores but its README names (min_lr, model.ema.*, flat use_fpn, use_rope, use_layerscale,
    num_target_masks) take effect. steps_per_epoch: optimizer steps, for durations given in epochs. accelerator: whether
    use_amp may lower the precision. Raises UserError where a section that the original requires is missing.
    """
    missing = [name for name in ("model", "training") if name not in original]
    if missing:
        raise UserError(f"the original's config lacks the section {', '.join(missing)}; it has {', '.join(original)}")
    get = lambda section: original.get(section) or {}
    model, training, data = get("model"), get("training"), get("data")
    checkpoint, logging = get("checkpoint"), get("logging")
    accumulate = training.get("accumulation_steps", 1)
    amp = training.get("use_amp", False) and accelerator
    return {
        "task": "hjepa.pretrain",
        "seed": original.get("seed", 42),
        "run": _given(name=logging.get("experiment_name"), dir=checkpoint.get("checkpoint_dir")),
        "model": _model(model, training, steps_per_epoch),
        "data": _data(data, accumulate),
        "masking": _masking(get("masking")),
        "loss": _loss(get("loss"), model),
        "optim": _optim(training),
        "train": {"epochs": training.get("epochs", 100), "accumulate_steps": accumulate}
        | _given(log_every_steps=logging.get("log_frequency")),
        "evaluation": _stopping(training.get("early_stopping") or {}),
        "checkpoint": {
            "every_epochs": checkpoint.get("save_frequency", 10),
            "keep_best": checkpoint.get("keep_best_n", 3),
        },
        "precision": {"policy": "bf16" if amp else "fp32"},
        "tracking": {
            "tensorboard": bool((logging.get("tensorboard") or {}).get("enabled", True)),
            "wandb": bool((logging.get("wandb") or {}).get("enabled", False)),
        },
    }


def _given(**values) -> dict:
    return {key: value for key, value in values.items() if value is not None}


def _model(model: Mapping, training: Mapping, steps_per_epoch: int) -> dict:
    fpn, scale, rope = (dict(model.get(name) or {}) for name in ("fpn", "layerscale", "rope"))
    ema, trained = model.get("ema") or {}, training.get("ema_momentum_schedule")
    if trained is not None:
        momentum = _given(
            momentum=trained.get("start"), momentum_end=trained.get("end"), warmup_steps=trained.get("warmup_steps")
        )
    else:
        warmup = ema.get("momentum_warmup_epochs")
        momentum = _given(
            momentum=ema.get("momentum"),
            momentum_end=ema.get("momentum_end"),
            ramp_steps=None if not warmup else int(warmup * steps_per_epoch),
        )
    converted = _given(
        encoder_type=model.get("encoder_type"),
        embed_dim=model.get("embed_dim"),
        num_hierarchies=model.get("num_hierarchies"),
        projection_norm=model.get("projection_norm"),
        use_target_encoder=model.get("use_target_encoder"),
        drop_path_rate=training.get("drop_path_rate"),
        gradient_checkpointing=training.get("use_gradient_checkpointing"),
        vit=model.get("vit"),
    )
    return converted | {
        "predictor": dict(model.get("predictor") or {}),
        "ema": momentum,
        "fpn": _given(
            use_fpn=fpn.get("use_fpn", model.get("use_fpn")),
            feature_dim=fpn.get("feature_dim", model.get("fpn_feature_dim")),
            fusion_method=fpn.get("fusion_method", model.get("fpn_fusion_method")),
        ),
        "layerscale": _given(
            use_layerscale=scale.get("use_layerscale", model.get("use_layerscale")),
            init_value=scale.get("init_value", model.get("layerscale_init")),
        ),
        "rope": _given(
            use_rope=rope.get("use_rope", model.get("use_rope")), theta=rope.get("theta", model.get("rope_theta"))
        ),
    }


def _data(data: Mapping, accumulate: int) -> dict:
    augmentation = data.get("augmentation") or {}
    return _given(
        dataset=data.get("dataset"),
        path=data.get("data_path"),
        image_size=data.get("image_size"),
        batch_size=data["batch_size"] * accumulate if "batch_size" in data else None,
        num_workers=data.get("num_workers"),
    ) | {"drop_last": True, "augmentation": _given(color_jitter=augmentation.get("color_jitter"))}


def _masking(masking: Mapping) -> dict:
    return _given(
        kind="ragged",
        num_masks=masking.get("num_masks", masking.get("num_target_masks")),
        mask_scale=masking.get("mask_scale"),
        aspect_ratio=masking.get("aspect_ratio"),
    )


def _loss(loss: Mapping, model: Mapping) -> dict:
    return {key: value for key, value in loss.items() if key in LossConfig.model_fields}


def _optim(training: Mapping) -> dict:
    beta1, beta2 = training.get("betas") or (0.9, 0.95)
    name = str(training.get("optimizer", "adamw")).lower()
    scheduler = training.get("scheduler_params") or {}
    return _given(
        name=name,
        lr=training.get("lr", training.get("learning_rate", 1e-4)),
        weight_decay=training.get("weight_decay", 0.0),
        beta1=beta1,
        beta2=beta2,
        momentum=training.get("momentum", 0.9) if name == "sgd" else None,
    ) | {
        "clip_norm": training.get("clip_grad"),
        "schedule": {
            "name": training.get("lr_schedule", "cosine"),
            "warmup_epochs": training.get("warmup_epochs", 0),
            "min_lr": scheduler.get("min_lr", training.get("min_lr", 1e-6)),
        },
    }


def _stopping(stopping: Mapping) -> dict:
    if not stopping.get("enabled"):
        return {}
    return _given(patience=stopping.get("patience", 10), min_delta=stopping.get("min_delta"))
