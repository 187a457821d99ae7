"""Conversion of the original's YAML (as nested dicts) to this project's settings."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.config import LossConfig, PredictorConfig, ViTConfig, WorldModelConfig, WorldModelLoss
from jaxtrain.task import LegacyConfig

EPOCHS = 100  # the original's default
WORLD_MODELS = ("lewm", "le_wm", "world_model")
WORLD_MODEL = tuple(name for name in WorldModelConfig.model_fields if name not in ("vit", "layerscale"))
PREDICTOR = ("depth", "num_heads", "mlp_ratio", "dropout", "max_seq_len")


def convert(original: Mapping[str, Any], accelerator: bool = True) -> dict[str, Any]:
    """Return settings for `task: hjepa.pretrain` that do what the original's file promises.

    Keys that the original ignores although its README names them (min_lr, model.ema.*, flat use_fpn, use_rope,
    use_layerscale, num_target_masks) take effect; missing sections take the original's defaults. accelerator: True if
    use_amp may lower the precision.
    """
    get = lambda section: original.get(section) or {}
    kind = str(get("model").get("type") or "hjepa").lower()
    if kind in WORLD_MODELS:
        return world_model(original, accelerator)
    if "jepa" not in kind and not kind.startswith("vit"):
        raise UserError(f"model.type: {kind!r} is unknown; known: hjepa, lewm. Without it the file trains H-JEPA")
    model, training, data = get("model"), get("training"), get("data")
    accumulate = training.get("accumulation_steps", 1)
    return _around(original, accelerator) | {
        "task": "hjepa.pretrain",
        "model": _model(model, training),
        "data": _data(data, accumulate),
        "masking": _masking(get("masking")),
        "loss": _known(get("loss"), LossConfig),
    }


def world_model(original: Mapping[str, Any], accelerator: bool = True) -> dict[str, Any]:
    """Return settings for `task: hjepa.world_model`, for a file whose `model.type` is lewm."""
    get = lambda section: original.get(section) or {}
    model, data, training = get("model"), get("data"), get("training")
    predictor, scale = model.get("predictor") or {}, model.get("layerscale") or {}
    inner = {f"predictor_{name}": predictor.get(name) for name in PREDICTOR if name in predictor}
    flat = {name: model[name] for name in WORLD_MODEL if name in model}
    layerscale = _without_none(
        use_layerscale=scale.get("use_layerscale", model.get("use_layerscale")),
        init_value=scale.get("init_value", model.get("layerscale_init")),
    )
    accumulate = training.get("accumulation_steps", 1)
    batch = data.get("batch_size", training.get("batch_size"))
    return _around(original, accelerator) | {
        "task": "hjepa.world_model",
        "model": flat
        | inner
        | _without_none(vit=_known(model.get("vit"), ViTConfig) or None, layerscale=layerscale or None),
        "data": _without_none(
            path=data.get("data_path", data.get("path")),
            image_size=data.get("image_size", model.get("img_size")),
            seq_len=data.get("seq_len", data.get("sequence_length")),
            random_window=data.get("random_window"),
            synthetic_items=data.get("num_samples", data.get("size")),
            batch_size=None if batch is None else batch * accumulate,
            num_workers=data.get("num_workers"),
        ),
        "loss": _known(get("loss"), WorldModelLoss),
    }


def _around(original: Mapping[str, Any], accelerator: bool) -> dict[str, Any]:
    """Return the sections that do not depend on the model: run, optimizer, epochs, evaluation, checkpoints, logs."""
    get = lambda section: original.get(section) or {}
    training, checkpoint, logging = get("training"), get("checkpoint"), get("logging")
    accumulate = training.get("accumulation_steps", 1)
    amp = training.get("use_amp", False) and accelerator
    return {
        "seed": original.get("seed", 42),
        "run": _without_none(name=logging.get("experiment_name"), dir=checkpoint.get("checkpoint_dir")),
        "optim": _optim(training),
        "train": {"epochs": training.get("epochs", EPOCHS), "accumulate_steps": accumulate}
        | _without_none(log_every_steps=logging.get("log_frequency")),
        "evaluation": _stopping(training.get("early_stopping") or {}) | _best(checkpoint),
        "checkpoint": {
            "every_epochs": checkpoint.get("save_frequency", 10),
            "keep_best": checkpoint.get("keep_best_n", 3),
        },
        "precision": {"policy": "bf16" if amp else "fp32"},
        "tracking": tracking(logging),
    }


def _best(checkpoint: Mapping) -> dict:
    """Return what decides the best checkpoint: the metric under its name here, and its mode.

    With train_loss the original never finds a best checkpoint; here the validation loss decides then.
    """
    name, mode = checkpoint.get("metric", checkpoint.get("metric_name")), checkpoint.get("mode")
    if name is None or name == "train_loss":
        return {}
    name = str(name).removeprefix("val_")
    return _without_none(metric={"linear_probe_accuracy": "probe_accuracy"}.get(name, name), mode=mode)


def tracking(logging: Mapping) -> dict:
    """Return the trackers: each is a section with `enabled`, true or false, or a key `use_wandb`, `use_tensorboard`."""
    options = {}
    for name, default in (("tensorboard", True), ("wandb", False)):
        value = logging.get(name)
        on = value.get("enabled", default) if isinstance(value, Mapping) else value
        options[name] = bool(logging.get(f"use_{name}", default) if on is None else on)
    wandb = logging.get("wandb")
    project = wandb.get("project") if isinstance(wandb, Mapping) else None
    return options | _without_none(wandb_project=project if project is not None else logging.get("wandb_project"))


def _without_none(**values) -> dict:
    return {key: value for key, value in values.items() if value is not None}


def _known(section: Mapping | None, kind: type) -> dict:
    return {key: section[key] for key in section or {} if key in kind.model_fields}


def _model(model: Mapping, training: Mapping) -> dict:
    fpn, scale, rope = (dict(model.get(name) or {}) for name in ("fpn", "layerscale", "rope"))
    ema, trained = model.get("ema") or {}, training.get("ema_momentum_schedule")
    if trained is not None:
        momentum = _without_none(
            momentum=trained.get("start"), momentum_end=trained.get("end"), warmup_steps=trained.get("warmup_steps")
        )
    else:
        warmup = ema.get("momentum_warmup_epochs")
        momentum = _without_none(
            momentum=ema.get("momentum"),
            momentum_end=ema.get("momentum_end"),
            ramp_ratio=warmup / max(1, training.get("epochs", EPOCHS)) if warmup else None,
        )
    converted = _without_none(
        encoder_type=model.get("encoder_type"),
        embed_dim=model.get("embed_dim"),
        num_hierarchies=model.get("num_hierarchies"),
        projection_norm=model.get("projection_norm"),
        use_target_encoder=model.get("use_target_encoder"),
        drop_path_rate=training.get("drop_path_rate"),
        gradient_checkpointing=training.get("use_gradient_checkpointing"),
        vit=_known(model.get("vit"), ViTConfig) or None,
    )
    return converted | {
        "predictor": _known(model.get("predictor"), PredictorConfig),
        "ema": momentum,
        "fpn": _without_none(
            use_fpn=fpn.get("use_fpn", model.get("use_fpn")),
            feature_dim=fpn.get("feature_dim", model.get("fpn_feature_dim")),
            fusion_method=fpn.get("fusion_method", model.get("fpn_fusion_method")),
        ),
        "layerscale": _without_none(
            use_layerscale=scale.get("use_layerscale", model.get("use_layerscale")),
            init_value=scale.get("init_value", model.get("layerscale_init")),
        ),
        "rope": _without_none(
            use_rope=rope.get("use_rope", model.get("use_rope")), theta=rope.get("theta", model.get("rope_theta"))
        ),
    }


def _data(data: Mapping, accumulate: int) -> dict:
    augmentation = data.get("augmentation") or {}
    return _without_none(
        dataset=data.get("dataset"),
        path=data.get("data_path"),
        image_size=data.get("image_size"),
        datasets=[dict(one) for one in data.get("datasets") or []] if data.get("use_multi_dataset") else None,
        sampling_strategy=data.get("sampling_strategy"),
        batch_size=data["batch_size"] * accumulate if "batch_size" in data else None,
        num_workers=data.get("num_workers"),
    ) | {"drop_last": True, "augmentation": _augmentation(augmentation)}


def _augmentation(section: Mapping) -> dict:
    """Convert the augmentation settings; all of them take effect, while the original reads only color_jitter."""
    flip, crop = section.get("horizontal_flip"), section.get("crop_scale")
    if section.get("random_crop") is False:
        crop = (1.0, 1.0)
    return _without_none(
        color_jitter=section.get("color_jitter"),
        horizontal_flip=None if flip is None else 0.5 * flip if isinstance(flip, bool) else flip,
        crop_scale=crop,
    )


def _masking(masking: Mapping) -> dict:
    return _without_none(
        kind="ragged",
        num_masks=masking.get("num_masks", masking.get("num_target_masks")),
        mask_scale=masking.get("mask_scale"),
        aspect_ratio=masking.get("aspect_ratio"),
    )


def _optim(training: Mapping) -> dict:
    beta1, beta2 = training.get("betas") or (0.9, 0.95)
    name = str(training.get("optimizer", "adamw")).lower()
    scheduler = training.get("scheduler_params") or {}
    return _without_none(
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
    return _without_none(patience=stopping.get("patience", 10), min_delta=stopping.get("min_delta"))


def _dotted(section: str, names: str) -> set[str]:
    return {f"{section}.{name}" for name in names.split()}


ORIGINAL = LegacyConfig(
    name="hjepa",
    keys=frozenset(
        {"seed", "device", "experiment.name", "experiment.seed", "experiment.output_dir"}
        | _dotted(
            "model",
            "type encoder_type embed_dim num_hierarchies projection_norm use_target_encoder vit use_flash_attention "
            "use_fpn fpn_feature_dim fpn_fusion_method use_rope rope_theta use_layerscale layerscale_init "
            "predictor.depth predictor.num_heads predictor.mlp_ratio ema.momentum ema.momentum_end "
            "ema.momentum_warmup_epochs "
            "fpn.use_fpn fpn.feature_dim fpn.fusion_method layerscale.use_layerscale layerscale.init_value "
            "rope.use_rope rope.theta predictor.dropout predictor.max_seq_len action_dim img_size",
        )
        | {f"model.{name}" for name in WORLD_MODEL if name.startswith("predictor_")}
        | _dotted(
            "data",
            "dataset data_path image_size batch_size num_workers pin_memory augmentation.color_jitter "
            "augmentation.horizontal_flip augmentation.random_crop augmentation.crop_scale "
            "use_multi_dataset datasets sampling_strategy path seq_len sequence_length random_window num_samples size",
        )
        | _dotted(
            "training",
            "epochs warmup_epochs lr learning_rate min_lr weight_decay optimizer betas momentum lr_schedule clip_grad "
            "use_amp accumulation_steps drop_path_rate use_gradient_checkpointing early_stopping.enabled "
            "early_stopping.patience early_stopping.min_delta early_stopping.mode scheduler_params.min_lr "
            "ema_momentum_schedule.start ema_momentum_schedule.end ema_momentum_schedule.warmup_steps",
        )
        | _dotted("masking", "num_masks num_target_masks mask_scale aspect_ratio")
        | {f"loss.{name}" for name in LossConfig.model_fields}
        | _dotted("checkpoint", "save_frequency keep_best_n checkpoint_dir metric metric_name mode resume")
        | _dotted(
            "logging",
            "experiment_name log_dir log_frequency wandb.enabled wandb.project wandb.entity wandb.tags "
            "tensorboard.enabled wandb tensorboard use_wandb use_tensorboard wandb_project",
        )
    ),
    convert=convert,
    replaced={
        "device": "JAX takes the accelerators that are there; shard.devices limits their number",
        "data.pin_memory": "batches are always put on the devices ahead of their use",
        "model.use_flash_attention": "XLA chooses the attention kernel",
        "logging.log_dir": "logs and curves lie in the run folder, run.dir",
        "logging.wandb.entity": "W&B reads WANDB_ENTITY",
        "logging.wandb.tags": "W&B reads WANDB_TAGS",
        "training.early_stopping.mode": "evaluation.mode decides what is best",
        "data.datasets": "use_multi_dataset is off",
        "checkpoint.resume": "the same command goes on in its run folder",
        "data.prefetch_factor": "data.prefetch_batches batches are always ready",
        "data.persistent_workers": "workers always stay",
        "data.drop_last": "every training epoch has whole batches, as in the original",
        "data.transforms.*": "the original does not read it; data.augmentation says what happens to images",
        "model.patch_size": "encoder_type names the patches; model.vit.patch_size changes them",
        "model.pretrained": "nothing is downloaded; model.encoder_weights takes a file of timm's",
        "model.predictor.embed_dim": "the predictor is as wide as the encoder",
        "model.predictor.dropout": "the original does not read it; its predictor drops nothing",
        "model.ema.*": "training.ema_momentum_schedule decides",
        "model.ema_momentum": "model.ema.momentum decides",
        "masking.num_context_masks": "the original draws context masks and does not use them",
        "masking.context_scale": "the original draws context masks and does not use them",
        "masking.patch_size": "the encoder's patches are masked",
        "training.early_stopping.*": "early stopping is off",
        "training.online_eval.*": "neighbours and a linear probe judge the features at every evaluation; see `probe`",
        "training.eval_frequency": "validation follows every epoch, as in the original",
        "distributed.*": "torchrun, srun or mpirun start the processes",
        "compile.*": "the step is always compiled",
        "training.compile*": "the step is always compiled",
        "planner.*": "a run trains the model; CEMPlanner takes these arguments when it plans",
        "debug.*": "the original does not read it",
        "experiment.*": "the original does not read it",
        "evaluation.*": "the sections `evaluation` and `probe` of this project say how features are judged, and when",
    },
)
