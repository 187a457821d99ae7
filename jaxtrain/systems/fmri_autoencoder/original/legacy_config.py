"""Conversion of the original's settings, from its TrainingConfig or its YAML files, to this project's."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder.original.schedules import GEN1_START, HEAD_START
from jaxtrain.systems.fmri_autoencoder.video import frames_per_volume
from jaxtrain.task import LegacyConfig

HEAD_ONLY = {"use_encodec", "audio_frames_per_tr", "gradient_checkpointing", "video_frames_per_tr"}
HEAD_ONLY |= {"frame_skip", "fps", "tr"}
MODEL = (
    "video_height", "video_width", "audio_mels", "text_dim", "n_voxels", "bottleneck_dim",
    "use_encodec", "audio_frames_per_tr", "gradient_checkpointing",
)  # fmt: skip
DATA = ("data_dir", "subjects", "apply_hrf", "mode", "frame_skip", "fps", "tr")
SCHEDULES = {"cosine": "cosine", "step": "step", "none": "constant"}
WEIGHTS = ("reconstruction_weight", "fmri_weight", "video_weight", "audio_weight", "text_weight")


@dataclasses.dataclass
class TrainingConfig:
    """The original's settings with its defaults; `settings` converts them to this project's config."""

    learning_rate: float = 1e-4
    batch_size: int = 64
    num_epochs: int = 100
    weight_decay: float = 1e-5
    reconstruction_weight: float = 1.0
    fmri_weight: float = 1.0
    video_weight: float = 1.0
    audio_weight: float = 1.0
    text_weight: float = 1.0
    fmri_loss_type: str = "mse"
    scheduler_type: str = "cosine"
    warmup_epochs: int = 5
    min_lr: float = 1e-6
    gradient_clip_val: float = 1.0
    use_mixed_precision: bool = True
    num_workers: int = 4
    pin_memory: bool = True
    checkpoint_dir: str = "checkpoints"
    log_dir: str = "logs"
    save_every: int = 5
    validate_every: int = 1
    early_stopping_patience: int = 10
    early_stopping_delta: float = 1e-4
    resume_from: str | None = None
    _: dataclasses.KW_ONLY
    compat: str = "correct"  # `original` keeps the original's learning rates, faults included
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)  # sections of this project's config

    def settings(
        self, model: Mapping[str, Any], head: bool, samples: int | None = None, accelerator: bool = True
    ) -> dict[str, Any]:
        """Return the nested config of a run.

        model: its options. head: True for the second generation. samples: number of training samples, if known.
        accelerator: True if use_mixed_precision may lower the precision.
        """
        if self.scheduler_type not in SCHEDULES:
            raise UserError(f"scheduler_type is {self.scheduler_type!r}, wanted one of {', '.join(SCHEDULES)}")
        warmup = min(self.warmup_epochs, self.num_epochs) if self.compat == "correct" else self.warmup_epochs
        schedule = {"name": SCHEDULES[self.scheduler_type], "min_lr": min(self.min_lr, self.learning_rate)}
        if schedule["name"] == "cosine":
            schedule |= {"warmup_epochs": warmup, "warmup_start": self._warmup_start(head)}
        return {
            "task": f"fmri_autoencoder.{'head' if head else 'gen1'}",
            "compat": self.compat,
            "model": dict(model),
            "loss": {name: getattr(self, name) for name in (*WEIGHTS, "fmri_loss_type")},
            "data": {"batch_size": self.batch_size if samples is None else min(self.batch_size, samples)}
            | {"drop_last": True},
            "optim": {
                "lr": self.learning_rate,
                "weight_decay": self.weight_decay,
                "clip_norm": self.gradient_clip_val or None,
                "schedule": schedule,
            },
            "train": {"epochs": self.num_epochs},
            "evaluation": {
                "every_epochs": self.validate_every,
                "patience": self.early_stopping_patience,
                "min_delta": self.early_stopping_delta,
            },
            "checkpoint": {"every_epochs": self.save_every},
            "precision": {"policy": "bf16" if self.use_mixed_precision and accelerator else "fp32"},
            "run": {"dir": self.checkpoint_dir},
            "init_from": self.resume_from if is_checkpoint_file(self.resume_from) else None,
            **self.overrides,
        }

    def _warmup_start(self, head: bool) -> float:
        """Return the fraction of the learning rate at which the original's warm-up starts."""
        return min(1.0, HEAD_START / self.learning_rate) if head and self.learning_rate else GEN1_START


def of_config(config: Any) -> TrainingConfig:
    """Return the original's settings for a run's config, to be stored in its checkpoint files."""
    optim, schedule, evaluation = config.optim, config.optim.schedule, config.evaluation
    kinds = {ours: theirs for theirs, ours in SCHEDULES.items()}
    return TrainingConfig(
        learning_rate=optim.lr,
        batch_size=config.data.batch_size,
        num_epochs=config.train.epochs or 1,
        weight_decay=optim.weight_decay,
        **{name: getattr(config.loss, name) for name in (*WEIGHTS, "fmri_loss_type")},
        scheduler_type=kinds.get(schedule.name, schedule.name),
        warmup_epochs=schedule.warmup_epochs or 0,
        min_lr=schedule.min_lr,
        gradient_clip_val=optim.clip_norm or 0.0,
        use_mixed_precision=config.precision.policy != "fp32",
        num_workers=config.data.num_workers,
        checkpoint_dir=str(config.run.dir or f"runs/{config.run.name}"),
        save_every=config.checkpoint.every_epochs or 1,
        validate_every=evaluation.every_epochs or 1,
        early_stopping_patience=evaluation.patience or 0,
        early_stopping_delta=evaluation.min_delta,
        compat=config.compat,
    )


def is_checkpoint_file(resume_from: str | None) -> bool:
    """Return True for a checkpoint in the original's format, False for a run folder."""
    return resume_from is not None and pathlib.Path(resume_from).suffix == ".pt"


FLAT = tuple(
    field.name
    for field in dataclasses.fields(TrainingConfig)
    if field.name not in ("compat", "overrides", "pin_memory", "log_dir")
)


def convert(original: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for the original's YAML: its flat keys, `data` and `model`.

    Any option that only the second generation has selects that generation. num_workers is kept, as it means the
    loader's worker processes in both projects.
    """
    config = TrainingConfig(**{name: original[name] for name in FLAT if name in original})
    sections = {name: original.get(name) or {} for name in ("data", "model")}
    data = {name: sections["data"][name] for name in DATA if name in sections["data"]}
    if isinstance(data.get("subjects"), int):
        data["subjects"] = [data["subjects"]]
    model = {name: sections["model"][name] for name in MODEL if name in sections["model"]}
    model = {name: value for name, value in model.items() if value is not None}
    head = bool(HEAD_ONLY & {*data, *model})
    if head:
        frames = frames_per_volume(data.get("fps", 25.0), data.get("tr", 1.5), data.get("frame_skip", 2))
        model = {"audio_mels": 128, "bottleneck_dim": 8000, "video_frames_per_tr": frames} | model
    settings = config.settings(model, head)
    data.pop("fps", None)  # read from the film itself
    settings["data"] |= data | {"num_workers": config.num_workers}
    settings["init_from"] = config.resume_from
    return settings


ORIGINAL = LegacyConfig(
    name="sherlock (giblet)",
    keys=frozenset(
        {field.name for field in dataclasses.fields(TrainingConfig)}
        | {f"data.{name}" for name in (*DATA, "train_split", "val_split")}
        | {f"model.{name}" for name in MODEL}
    ),
    convert=convert,
    replaced={
        "pin_memory": "batches are always put on the devices ahead of their use",
        "log_dir": "logs and curves lie in the run folder, run.dir",
        "distributed*": "the launcher says who takes part (torchrun, srun, mpirun)",
        **dict.fromkeys(("model.*_features", "model.decoder_*", "model.encodec_*"), "the original does not read it"),
        "data.*_split": "the original does not read it; data.train_ratio is the share of volumes that train",
    },
)
