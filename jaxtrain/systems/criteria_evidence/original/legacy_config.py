"""Convert the original's YAML (nested script configs, flat training files, a study's best_config.yaml) to settings."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.task import LegacyConfig

ARCHITECTURES = ("criteria", "evidence", "share", "joint")
WARMED = "constant_with_warmup"
SCHEDULES = {"constant": "constant", "none": "constant", WARMED: "constant"} | {
    name: name for name in ("cosine", "linear", "cosine_with_restarts", "polynomial")
}
SPANS = ("span_em", "span_f1", "start_accuracy", "end_accuracy")
METRICS = {  # the original's names without val_ or validation_ -> names here; the first one is monitored by default
    "criteria": {"f1_macro": "f1_macro", "f1": "f1_binary", "auroc_macro": "auroc"}
    | {name: name for name in ("f1_micro", "accuracy", "precision_macro", "recall_macro", "auroc")},
    "evidence": {name: name for name in SPANS},
    "share": {"joint_score": "joint_score"}
    | {f"criteria_{name}": f"criteria_{name}" for name in ("f1", "accuracy", "precision", "recall")}
    | {f"evidence_{name}": f"evidence_{name}" for name in SPANS},
}
TASKS = {"binary_classification": "criteria", "multi_label_classification": "evidence"}  # task.type of the group `task`
PRECISIONS = {"float16": "fp16", "bfloat16": "bf16"}


@dataclasses.dataclass(frozen=True)
class OriginalValues:
    """Values of a config file, looked up under `training` and `dataset` or at the top level."""

    values: Mapping[str, Any]

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first name that is set, else `default`. Dotted names are nested keys.

        Each name is looked up as `training.<name>`, then `dataset.<name>`, then `<name>`.
        """
        for name in names:
            for path in (f"training.{name}", f"dataset.{name}", name):
                value = _at(self.values, path.split("."))
                if value is not None:
                    return value
        return default

    def is_null(self, name: str) -> bool:
        """Return True if `training.<name>` or `<name>` is explicitly null."""
        sections = (self.values, self.values.get("training"))
        return any(isinstance(one, Mapping) and name in one and one[name] is None for one in sections)

    def one(self, known: Mapping[str, str], *names: str, default: str) -> str:
        """Return the translation in `known` of the value that `get` finds; raises UserError for an unknown value."""
        value = str(self.get(*names, default=default)).lower()
        if value not in known:
            raise UserError(f"{names[0]} is {value!r}, wanted one of {', '.join(known)}")
        return known[value]


def _at(values: Any, path: list[str]) -> Any:
    for name in path:
        if not isinstance(values, Mapping) or name not in values:
            return None
        values = values[name]
    return values


def convert(original: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings. Missing values take the defaults of the original's configs/training/default.yaml.

    The architecture is the first one found among: the requested task, `project`, the section `task`, and a guess from
    columns and models; criteria otherwise. The original's batch is one micro-batch, so data.batch_size is batch x
    accumulation.
    """
    values = OriginalValues(original)
    accumulate = values.get("gradient_accumulation_steps", "gradient_accumulation", default=1)
    architecture = _architecture(original)
    checkpointing = [values.get(name) for name in ("gradient_checkpointing", "model.gradient_checkpointing")]
    return {
        "task": f"criteria_evidence.{architecture}",
        "seed": values.get("seed", default=42),
        "deterministic": values.get("deterministic", default=True),
        "model": _model(original, architecture),
        "data": _data(values, original.get("dataset") or {}, accumulate, architecture),
        "loss": _without_none(weights=_section(values.get("loss_weights"))),
        "optim": _optim(values),
        "train": _without_none(
            epochs=values.get("epochs", "num_epochs", default=10),
            accumulate_steps=accumulate,
            log_every_steps=values.get("logging_steps"),
            remat="full" if any(checkpointing) else None,
        ),
        "evaluation": _evaluation(values, architecture),
        "precision": {"policy": _precision(values), "matmul": _matmul(values)},
        "tracking": _tracking(original.get("mlflow") or {}),
        "run": _without_none(dir=_at(original, ["hydra", "run", "dir"])),
    }


def _without_none(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _section(values: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if values is None else dict(values)


def _architecture(original: Mapping[str, Any]) -> str:
    asked = (getattr(original, "task", None) or "").rpartition(".")[2]
    named = (asked, original.get("project"), _at(original, ["task", "name"]))
    for name in (*named, TASKS.get(str(_at(original, ["task", "type"])))):
        if name in ARCHITECTURES:
            return name
    dataset, model = (original.get(name) or {} for name in ("dataset", "model"))
    if "criteria_model" in model:
        return "joint"
    if "context_column" in dataset:
        return "share" if "label_column" in dataset else "evidence"
    return "criteria"


def _model(original: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    model = original.get("model") or {}
    options = _without_none(
        pretrained=model.get("pretrained_model", model.get("encoder_name", model.get("criteria_model"))),
        evidence_pretrained=model.get("evidence_model"),
        fusion_dropout=_at(model, ["fusion", "dropout"]),
        lora=_lora(model.get("lora") or {}) or None,
    )
    heads = {"criteria": _head(model.get("criteria") or {}), "evidence": _head(model.get("evidence") or {})}
    side = "evidence" if architecture == "evidence" else "criteria"
    plain = {"dropout": model.get("classifier_dropout", model.get("dropout"))}
    plain |= {"layers": model.get("classifier_layer_num"), "hidden": model.get("classifier_hidden_dims") or None}
    heads[side] = _without_none(**plain) | heads[side]
    if architecture in ("share", "joint"):
        heads["evidence"] = _without_none(dropout=model.get("dropout")) | heads["evidence"]
    return options | {name: head for name, head in heads.items() if head}


def _head(head: Mapping[str, Any]) -> dict[str, Any]:
    return _without_none(
        dropout=head.get("dropout"), layers=head.get("layer_num"), hidden=head.get("hidden_dims") or None
    )


def _lora(lora: Mapping[str, Any]) -> dict[str, Any]:
    return _without_none(**{name: lora.get(name) for name in ("enabled", "r", "alpha", "dropout")})


def _data(values: OriginalValues, dataset: Mapping[str, Any], accumulate: int, architecture: str) -> dict[str, Any]:
    lengths = ("max_length", "model.max_length")
    posts = ("evidence_max_length", *(() if architecture == "criteria" else lengths))
    return _without_none(
        path=dataset.get("path"),
        sentence_column=dataset.get("text_column", dataset.get("answer_column", dataset.get("sentence_column"))),
        status_column=dataset.get("label_column"),
        context_column=dataset.get("context_column"),
        ratios=_ratios(dataset.get("splits")),
        max_length=values.get("criteria_max_length", *lengths),
        evidence_max_length=values.get(*posts),
        batch_size=values.get("train_batch_size", "batch_size", default=16) * accumulate,
        eval_batch_size=values.get("eval_batch_size", default=32),
        num_workers=values.get("num_workers", default=8),
        prefetch_batches=values.get("prefetch_factor", default=2),
    )


def _ratios(splits: Any) -> list[float] | None:
    """Return the shares of training, validation and test from a list of two or three, or from a mapping.

    Raises UserError for a list of another length.
    """
    if splits is None:
        return None
    shares = [splits.get(name) or 0.0 for name in ("train", "val", "test")] if hasattr(splits, "get") else list(splits)
    if len(shares) not in (2, 3):
        raise UserError(f"dataset.splits has {len(shares)} shares, wanted train, val and, if any, test")
    return [*shares, 0.0][:3]


def _optim(values: OriginalValues) -> dict[str, Any]:
    beta1, beta2 = values.get("optimizer.betas", default=(0.9, 0.999))
    default = "constant" if values.is_null("scheduler") else "cosine"
    names = ("scheduler.type", "scheduler.name")
    schedule = {"name": values.one(SCHEDULES, *names, default=default)}
    steps = values.get("scheduler.warmup_steps")
    if schedule["name"] != "constant" or str(values.get(*names, default=default)).lower() == WARMED:
        ratio = values.get("scheduler.warmup_ratio", "warmup_ratio", default=0.06)
        schedule |= {"warmup_steps": steps} if steps is not None else {"warmup_ratio": ratio}
    if schedule["name"] == "cosine_with_restarts":
        schedule |= _without_none(cycles=values.get("scheduler.num_cycles"))
    name = str(values.get("optimizer.name", default="adamw")).lower()
    return {
        "name": name,
        **({"momentum": values.get("optimizer.momentum", default=0.9)} if name == "sgd" else {}),
        "lr": values.get("learning_rate", default=2e-5),
        "weight_decay": values.get("weight_decay", "optimizer.weight_decay", default=0.01),
        "beta1": beta1,
        "beta2": beta2,
        "eps": values.get("optimizer.eps", default=1e-8),
        "clip_norm": values.get("gradient_clip", "max_grad_norm", default=1.0) or None,
        "schedule": schedule,
    }


def _evaluation(values: OriginalValues, architecture: str) -> dict[str, Any]:
    known = METRICS.get(architecture, METRICS["share"]) | {"loss": "loss"}
    named = str(values.get("early_stopping.metric", "monitor_metric", default=next(iter(known))))
    metric = named.removeprefix("validation_").removeprefix("val_")
    if architecture != "criteria" and metric in METRICS["criteria"] and isinstance(values.get("task"), Mapping):
        metric = next(iter(known))  # the group `training` monitors the classifier for every task
    if metric not in known:
        raise UserError(f"early_stopping.metric is {named!r}, wanted val_ and one of {', '.join(known)}")
    return {
        "metric": known[metric],
        "mode": values.get("early_stopping.mode", "monitor_mode", default="max"),
        "patience": values.get("early_stopping.patience", default=3),
        "min_delta": values.get("early_stopping.min_delta", default=1e-4),
        "test": True,
    }


def _precision(values: OriginalValues) -> str:
    enabled = all(values.get(name, default=True) for name in ("amp.enabled", "use_amp", "mixed_precision"))
    policy = values.one(PRECISIONS, "amp.dtype", "amp_dtype", default="float16")
    return policy if enabled else "fp32"


def _matmul(values: OriginalValues) -> str:
    return "highest" if values.get("tf32_enabled") is False else "default"


def _tracking(mlflow: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tracking settings: always MLflow, by default in the original's store sqlite:///mlflow.db."""
    return {
        "mlflow": True,
        "mlflow_uri": mlflow.get("tracking_uri", "sqlite:///mlflow.db"),
        "mlflow_model": "psy-agents",
    }


BEST = {  # names of the original's searches -> settings; settings that a task does not have are left out
    "learning_rate": ("optim.lr",),
    "weight_decay": ("optim.weight_decay",),
    "warmup_ratio": ("optim.schedule.warmup_ratio",),
    "scheduler": ("optim.schedule.name",),
    "gradient_clip": ("optim.clip_norm",),
    "dropout": ("model.criteria.dropout", "model.evidence.dropout"),
    "max_length": ("data.max_length", "data.evidence_max_length"),
    "encoder": ("model.pretrained", "model.evidence_pretrained"),
    "lora_enabled": ("model.lora.enabled",),
    "lora_r": ("model.lora.r",),
    "lora_alpha": ("model.lora.alpha",),
    "num_epochs": ("train.epochs",),
    "epochs": ("train.epochs",),
    "seed": ("seed",),
}
BATCH, ACCUMULATE = ("batch_size", "train_batch_size"), ("gradient_accumulation_steps", "gradient_accumulation")


def best(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings from the flat best_config.yaml of the original's search. Raises UserError for unknown names."""
    unknown = [name for name in values if name not in (*BEST, *BATCH, *ACCUMULATE)]
    if unknown:
        raise UserError(
            f"{', '.join(unknown)}: no counterpart here; known are {', '.join((*BEST, *BATCH, *ACCUMULATE))}"
        )
    settings = {setting: value for name, value in values.items() for setting in BEST.get(name, ())}
    if "optim.schedule.name" in settings:
        settings["optim.schedule.name"] = OriginalValues(values).one(SCHEDULES, "scheduler", default="cosine")
    accumulate = next((values[name] for name in ACCUMULATE if name in values), None)
    batch = next((values[name] for name in BATCH if name in values), None)
    settings |= _without_none(**{"train.accumulate_steps": accumulate})
    return settings | _without_none(**{"data.batch_size": None if batch is None else batch * (accumulate or 1)})


TRAINING = (
    "epochs num_epochs learning_rate weight_decay train_batch_size batch_size eval_batch_size gradient_accumulation "
    "gradient_accumulation_steps max_grad_norm gradient_clip logging_steps eval_steps seed deterministic "
    "cudnn_benchmark amp_dtype tf32_enabled compile_model compile_mode gradient_checkpointing device monitor_metric "
    "monitor_mode num_workers pin_memory persistent_workers prefetch_factor max_length warmup_ratio use_amp "
    "mixed_precision amp.enabled amp.dtype optimizer.name optimizer.betas optimizer.eps optimizer.weight_decay "
    "optimizer.momentum scheduler.type scheduler.name scheduler.warmup_ratio scheduler.warmup_steps "
    "scheduler.num_cycles early_stopping.metric early_stopping.mode early_stopping.patience early_stopping.min_delta "
    "loss_weights.criteria loss_weights.evidence"
).split()
DATASET = (
    "path splits splits.train splits.val splits.test text_column label_column context_column answer_column "
    "sentence_column max_length criteria_max_length evidence_max_length num_workers pin_memory persistent_workers "
    "prefetch_factor"
).split()
MODEL = (
    "pretrained_model encoder_name criteria_model evidence_model dropout classifier_dropout classifier_layer_num "
    "classifier_hidden_dims gradient_checkpointing fusion.dropout lora.enabled lora.r lora.alpha lora.dropout "
    "criteria.dropout criteria.layer_num criteria.hidden_dims evidence.dropout max_length"
).split()

ORIGINAL = LegacyConfig(
    name="psy (psy_agents_noaug)",
    unlisted=frozenset({f"{at}{name}" for at in ("", "training.") for name in ("use_amp", "mixed_precision")}),
    keys=frozenset(
        {*TRAINING, *(f"training.{name}" for name in TRAINING)}
        | {f"dataset.{name}" for name in DATASET}
        | {f"model.{name}" for name in MODEL}
        | {"project", "hydra.run.dir", "best_config", "checkpoint"}
        | {f"mlflow.{name}" for name in ("tracking_uri", "experiment", "artifact_location", "tags.project")}
        | {f"optuna.{name}" for name in ("storage", "study_name", "direction")}
        | {"project.name", "mlflow.experiment_name", "data.source", "task.name", "task.type", "task.loss"}
        | {"task.label_column"}
    ),
    convert=convert,
    best=best,
    replaced={
        "*pin_memory": "batches are always put on the devices ahead of their use",
        "*persistent_workers": "worker processes live as long as the trainer",
        "*cudnn_benchmark": "XLA chooses its kernels when it compiles; `deterministic` decides between their variants",
        "*compile_mode": "the step is always compiled",
        "*compile_model": "the step is always compiled",
        "*device": "JAX takes the accelerators that are there; shard.devices limits their number",
        "*eval_steps": "evaluation follows every epoch; evaluation.every_steps changes that",
        "mlflow.*": "the run's name and folder name it in MLflow; tracking.mlflow_uri says where",
        "optuna.*": "jaxtrain.tune takes them on its command line and in its search space",
        "hpo.*": "jaxtrain.tune takes a search space by --space and its stages from configs/hpo",
        "paths.*": "everything is written under run.dir",
        "model.max_length": "max_length of the section training or dataset wins over it",
        "project.name": "run.name names a run",
        "data.*": "a run reads one CSV, data.path; original/groundtruth.py makes tables of posts and annotations",
        "task.*": "the task decides labels, loss and metrics",
        "best_config": "best_config=FILE on the command line takes the best values of a search",
        "checkpoint": "jaxtrain.evaluate takes it",
        "*scheduler.warmup_*": "a constant learning rate has no warm-up, and warmup_steps wins over warmup_ratio",
        "*scheduler.num_cycles": "only cosine_with_restarts has cycles",
    },
)
