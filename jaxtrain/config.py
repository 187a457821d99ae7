"""Every setting of the core, with its unit: the one page of knobs. A task adds its own sections (`model`, `loss`, more
`data` keys) in `systems/<name>/config.py`. Values are frozen; unknown keys are refused."""

import pathlib
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from jaxtrain import config_mistakes

MOST_STEPS = 100_000_000  # of a run: the schedule keeps a number for each
MOST_SAMPLES = 1 << 24  # of a batch
MOST_LAYERS = 10_000  # of a model; every one is traced
NUMBERS = (int, float, int | None, float | None)  # kinds of settings
OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "muon", "adafactor")


class ImportPath:
    """Mark a setting that names code: `Annotated[str, ImportPath]`. Code in a stranger's run folder is not imported."""


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


class _Checked(type(BaseModel)):
    """Class of sections: what Python code gives wrongly is told as a file's mistakes are, in a UserError."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            raise config_mistakes.told(cast(Any, cls), error, cls.__name__, FLAT_NAMES) from None


class Section(BaseModel, metaclass=_Checked):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _plain_values(cls, values: Any) -> Any:
        """Give a section that a file leaves empty its defaults; take `true` for no number and a Path for its text."""
        if isinstance(values, BaseModel):
            return values
        if not isinstance(values, dict):
            named = f", such as {{name: {values}}}" if isinstance(values, str) and "name" in cls.model_fields else ""
            raise ValueError(f"wanted a section of settings{named}")
        sections = {name for name, field in cls.model_fields.items() if isinstance(field.default, Section)}
        sections |= {name for name, field in cls.model_fields.items() if _is_section(field.annotation)}
        numbers = {name for name, field in cls.model_fields.items() if field.annotation in NUMBERS}
        kept = {key: value for key, value in values.items() if value is not None or key not in sections}
        kept |= {key: str(value) for key, value in kept.items() if isinstance(value, pathlib.PurePath)}
        return {
            k: str(value).lower() if isinstance(value, bool) and k in numbers else value for k, value in kept.items()
        }

    @model_validator(mode="before")
    @classmethod
    def _within_reason(cls, values: Any) -> Any:
        """Numbers that 64 bits hold, texts that a file system and a terminal take."""
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"{key}: an integer of {value.bit_length()} bits, wanted at most 63 and a sign")
            if isinstance(value, str) and any(c < " " and c not in "\t\n\r" or "\ud800" <= c < "\ue000" for c in value):
                raise ValueError(f"{key}: holds a character that is none of a text, as a NUL")
        return values

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """Show the settings that differ from their defaults: all of them fill a screen."""
        fields = type(self).model_fields
        return [(name, value) for name, value in super().__repr_args__() if value != fields[str(name)].get_default()]

    def __hash__(self) -> int:
        """Hash the settings' text: pydantic's own hash refuses a section with a dict."""
        return hash(self.model_dump_json())


class RunConfig(Section):
    name: str | None = None  # folder under runs/, one name without `/`; the config file's name if left out
    dir: str | None = None  # the run folder itself; runs/<name> if left out
    quiet: bool = False  # no progress bar, warnings only

    @property
    def folder(self) -> pathlib.Path:
        """The run folder: dir, or runs/<name>."""
        return pathlib.Path(self.dir or pathlib.Path("runs") / (self.name or "run")).expanduser()

    @field_validator("name")
    @classmethod
    def _one_name(cls, name: str | None) -> str | None:
        if name is not None and (name in ("", ".", "..") or "/" in name or len(name.encode()) > 200):
            raise ValueError("wanted one name of at most 200 bytes without `/`; run.dir takes a whole path")
        return name


class DataConfig(Section):
    batch_size: int = Field(default=64, ge=1, le=MOST_SAMPLES)  # per optimizer step, over all devices and micro-batches
    eval_batch_size: int | None = Field(default=None, ge=1, le=MOST_SAMPLES)  # per evaluation step; default batch_size
    shuffle: bool = True
    drop_last: bool = False  # leave out the last, uneven batch of a training epoch
    num_workers: int = Field(default=0, ge=0, le=1024)  # worker processes that read items; 0 reads in a thread
    start_method: Literal["forkserver", "spawn", "fork"] = "forkserver"  # of worker processes; fork only before JAX
    prefetch_batches: int = Field(default=2, ge=1, le=10_000)  # batches kept ready on the device
    placement: Literal["auto", "host", "device"] = "auto"  # device: the whole dataset lives there, gathered in the step
    device_limit_bytes: int = Field(default=1 << 30, ge=0)  # auto places a dataset on the device up to this size
    shapes: Literal["auto", "exact", "one"] = "auto"  # batches of many lengths: auto pads them to a few, exact does not
    micro_batch: int | Literal["auto"] | None = (
        None  # samples of one; auto: as many as fit. Sets train.accumulate_steps
    )
    memory_limit_bytes: int | None = Field(default=None, ge=1)  # of a device, for micro_batch=auto; its own if left out
    pad_values: dict[
        str, float
    ] = {}  # by entry of a batch: the value that pads it, if the collate function does not say
    stream_shards: int | None = Field(default=None, ge=1)  # divide an IterableDataset over processes and workers
    shuffle_buffer: int | None = Field(default=None, ge=2)  # samples of each shard that are held, and given shuffled
    timeout_s: float = Field(default=600.0, gt=0)  # a batch that takes longer ends the run with the sample's index

    @field_validator("micro_batch")
    @classmethod
    def _at_least_one(cls, micro_batch: int | str | None) -> int | str | None:
        if isinstance(micro_batch, int) and micro_batch < 1:
            raise ValueError("wanted a number of samples from 1 on, or auto")
        return micro_batch

    @model_validator(mode="after")
    def _buffers_are_of_shards(self):
        if self.shuffle_buffer is None:
            return self
        if self.stream_shards is None:
            raise ValueError("shuffle_buffer holds samples of each shard; set stream_shards too (1: the whole stream)")
        if not self.shuffle:
            raise ValueError("shuffle_buffer shuffles; leave it out with shuffle: false")
        return self


class ScheduleConfig(Section):
    name: Literal["constant", "cosine", "cosine_with_restarts", "linear", "polynomial", "step", "wsd", "plateau"] = (
        "cosine"
    )
    warmup_steps: int | None = Field(default=None, ge=0)  # optimizer steps; one of the three warmup keys
    warmup_epochs: float | None = Field(default=None, ge=0)
    warmup_ratio: float | None = Field(default=None, ge=0, le=1)  # of all steps
    warmup_start: float = Field(default=0.0, ge=0)  # learning rate of step 0, as a fraction of lr
    min_lr: float = Field(default=0.0, ge=0)  # learning rate at the end, absolute
    stable_ratio: float = Field(default=0.8, ge=0, le=1)  # wsd: fraction of the steps after warm-up that stay at lr
    cycles: int = Field(default=1, ge=1)  # cosine_with_restarts
    power: float = Field(default=1.0, gt=0)  # polynomial
    step_epochs: int = Field(default=30, ge=1)  # step: epochs between two drops
    factor: float = Field(default=0.1, gt=0, le=1)  # step, plateau: lr is multiplied by it
    patience: int = Field(default=10, ge=0)  # plateau: evaluations without improvement before a drop
    threshold: float = Field(default=1e-4, ge=0)  # plateau: relative improvement that counts
    metric: str = "loss"  # plateau: validation metric it watches
    mode: Literal["min", "max"] = "min"

    @model_validator(mode="after")
    def _one_warmup(self):
        given = [k for k in ("warmup_steps", "warmup_epochs", "warmup_ratio") if getattr(self, k) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of {', '.join(given)}, not {len(given)}")
        return self


class GroupConfig(Section):
    """Overrides for one group of parameters: those whose names match, or that the task calls so."""

    match: str | tuple[str, ...] | None = None  # patterns of parameter names, as encoder.*; the first group that fits
    lr: float | None = Field(default=None, ge=0)
    weight_decay: float | None = Field(default=None, ge=0)
    freeze: bool = False  # never train it
    freeze_until_epoch: int | None = Field(default=None, ge=1)  # frozen for so many epochs at first
    freeze_after_epoch: int | None = Field(default=None, ge=1)  # frozen once so many epochs have passed

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.match,) if isinstance(self.match, str) else self.match or ()

    @model_validator(mode="after")
    def _trains_some_time(self):
        until, after = self.freeze_until_epoch, self.freeze_after_epoch
        if self.freeze and (until or after):
            raise ValueError("freeze fixes the group for the whole run; leave it out with freeze_..._epoch")
        if until and after and until >= after:
            raise ValueError(f"frozen until epoch {until} and after epoch {after}: it never trains; freeze says so")
        return self


class OptimConfig(Section):
    name: Annotated[str, ImportPath] = "adamw"  # adam, sgd, lion, muon, adafactor; or my_package.function (optax)
    lr: float = Field(default=1e-3, ge=0)  # peak value, per optimizer step, after warm-up; auto: see auto_lr
    auto_lr: bool = False  # also `lr: auto`: a range test before the first step finds lr (jaxtrain.lr_find's steepest)
    weight_decay: float = Field(default=0.01, ge=0)  # decoupled for adamw, lion, muon; L2 for adam and sgd, as in torch
    decay_bias_and_norm: bool = True  # torch decays everything; False spares biases and normalisation gains
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)  # sgd; for muon, 0 means 0.95
    nesterov: bool = False  # sgd
    clip_norm: float | None = Field(default=1.0, gt=0)  # global L2 norm of the gradients; null: no clipping
    groups: dict[str, GroupConfig] = {}  # by name: your own with `match`, or those that the task gives
    layer_decay: float | None = Field(default=None, gt=0, le=1)  # lr of each layer, times that of the layer above it
    ema_decay: float | None = Field(default=None, ge=0, lt=1)  # keep an average of the weights, evaluate and export it
    schedule: ScheduleConfig = ScheduleConfig()

    @model_validator(mode="before")
    @classmethod
    def _lr_to_be_found(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("lr") == "auto":
            return {key: value for key, value in values.items() if key != "lr"} | {"auto_lr": True}
        return values

    def group(self, name: str) -> GroupConfig:
        """Return what overrides the settings for this group; nothing for one that is not listed."""
        return self.groups.get(name) or GroupConfig()

    @field_validator("groups")
    @classmethod
    def _plain_names(cls, groups: dict[str, GroupConfig]) -> dict[str, GroupConfig]:
        if strange := [name for name in groups if "@" in name]:
            raise ValueError(f"{strange[0]!r}: a group's name has no @, which marks depths")
        return groups

    @field_validator("name")
    @classmethod
    def _known_or_imported(cls, name: str) -> str:
        imported = "." in name and all(part.isidentifier() for part in name.split("."))
        if name not in OPTIMIZERS and not imported:
            raise ValueError(f"{name!r} is unknown; wanted {', '.join(OPTIMIZERS)}, or my_package.my_function")
        return name


class TrainConfig(Section):
    epochs: int | None = Field(default=None, ge=1)  # passes over the training data; steps wins if both are set
    steps: int | None = Field(default=None, ge=1, le=MOST_STEPS)  # optimizer steps
    overfit_batches: int | None = Field(default=None, ge=1)  # train and evaluate on the first n batches, over and over
    fast_dev_run: bool = False  # one batch of training and of evaluation, everything else as ever, nothing kept
    accumulate_steps: int = Field(default=1, ge=1, le=MOST_SAMPLES)  # micro-batches per optimizer step
    accumulate_mean: Literal["weighted", "micro"] = "weighted"  # micro: mean of the micro-batch means, as the originals
    steps_per_call: int = Field(default=1, ge=1, le=100_000)  # optimizer steps in one compiled call
    remat: Literal["none", "dots", "full"] = "none"  # what the backward pass recomputes
    log_every_steps: int = Field(default=10, ge=1)
    nan_policy: Literal["stop", "skip", "ignore"] = "stop"
    max_skipped_steps: int = Field(default=10, ge=0)  # nan_policy skip: more than this ends the run
    hang_timeout_s: float | None = Field(default=None, gt=0)  # no progress for longer ends the run; null learns it
    spike_factor: float | None = Field(default=None, gt=1)  # skip a step whose gradient norm exceeds factor x average


class EvaluationConfig(Section):
    every_epochs: int | None = Field(default=1, ge=1)
    every_steps: int | None = Field(default=None, ge=1)  # wins over every_epochs
    metric: str = "loss"  # decides "best", early stopping and best-N
    mode: Literal["min", "max"] = "min"
    patience: int | None = Field(default=None, ge=1)  # evaluations without improvement before a stop; null: never
    min_delta: float = Field(default=0.0, ge=0)  # improvement over the best ever seen that counts
    averaged: bool = True  # with optim.ema_decay: evaluate the averaged weights; false: those that train
    test: bool = False  # at the end of `jaxtrain.run`: the best checkpoint's metrics on the test split, too


class CheckpointConfig(Section):
    every_epochs: int | None = Field(default=None, ge=1)
    every_steps: int | None = Field(default=None, ge=1)
    keep_last: int = Field(default=2, ge=1)
    keep_best: int = Field(default=1, ge=0)
    grace_s: float = Field(default=30.0, gt=0)  # time to save in after a preemption signal
    retry_s: float = Field(default=300.0, ge=0)  # how long the end of a run tries to write its last checkpoint
    mirror: str | None = None  # a second copy of every checkpoint: a folder on another disk, or s3://, gs://, ...
    write_back: bool = False  # a model given to Trainer takes the weights at every checkpoint, not only at the end
    save_precision: Literal["fp32", "bf16", "fp16"] | None = None  # of exported weights; null: as trained
    export: bool = True  # write the best weights to exports/best.pt at the end of a run
    torch: Literal["original"] | None = None  # original: also write the torch project's own checkpoint files


class PrecisionConfig(Section):
    policy: Literal["fp32", "bf16", "bf16_params", "fp16", "fp8"] = "fp32"  # compute there, with fp32 master weights
    loss_scale: float = Field(default=2.0**16, gt=0)  # fp16: initial dynamic loss scale (GradScaler's init_scale)
    matmul: Literal["default", "high", "highest"] = "highest"  # of fp32 products: float32's, as torch's; others: TF32's


class ShardConfig(Section):
    strategy: Literal["ddp", "ddp_local", "fsdp", "shard_grad_op", "hsdp"] = "ddp"
    replicas: int | None = Field(default=None, ge=1)  # hsdp: groups that each hold one copy of the model
    tensor: int = Field(default=1, ge=1)  # devices that split one layer, by rules of the task and of `rules`
    rules: dict[str, tuple[Literal["tensor"] | None, ...]] = {}  # {pattern of a parameter: [tensor, null]}: its axes
    sequence: int = Field(default=1, ge=1)  # devices that share the tokens of one sample, for tasks that can
    devices: int | None = Field(default=None, ge=1)  # use the first n of this process's devices; all if left out
    threads: int | None = Field(default=None, ge=1, le=1024)  # of a CPU; one per core if left out. 1 suits small models


class TrackingConfig(Section):
    tensorboard: bool = True
    histograms_every_steps: int | None = Field(default=None, ge=1)
    wandb: bool = False
    wandb_project: str = "jaxtrain"
    mlflow: bool = False
    mlflow_uri: str | None = (
        None  # sqlite:///... or http://...; default MLFLOW_TRACKING_URI, or a store in the run folder
    )
    mlflow_model: str | None = None  # log the exported model and register it in MLflow under this name
    mlflow_parent: str | None = None  # id of the MLflow run that this one is nested in; a search sets it


class LoraConfig(Section):
    """Low-rank adapters for a torch module (`task: torch_module`, or one given to Trainer)."""

    rank: int = Field(default=0, ge=0, le=MOST_LAYERS)  # of the adapters; 0: none
    alpha: float = Field(default=16.0, gt=0)  # an adapter counts by alpha / rank
    dropout: float = Field(default=0.0, ge=0, lt=1)  # of what an adapter reads
    match: str | tuple[str, ...] = ()  # names of layers, whole or their ends, as query; every Linear if left out
    modules_to_save: tuple[str, ...] = ()  # names of submodules that train whole, as classifier

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.match,) if isinstance(self.match, str) else self.match


class ProfileConfig(Section):
    start: int = Field(default=10, ge=0, le=MOST_STEPS)  # steps of this start of the run that go before the trace
    steps: int = Field(default=0, ge=0, le=1000)  # traced steps; 0: no trace

    @model_validator(mode="before")
    @classmethod
    def _asked_for(cls, values: Any) -> Any:
        """Trace three steps where only their start is given."""
        return {"steps": 3, **values} if isinstance(values, dict) and "start" in values else values


FLAT_NAMES = {  # names that users of the five originals know -> where the setting lives
    "learning_rate": "optim.lr",
    "lr": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "gradient_clip_val": "optim.clip_norm",
    "max_grad_norm": "optim.clip_norm",
    "clip_grad_norm": "optim.clip_norm",
    "num_epochs": "train.epochs",
    "epochs": "train.epochs",
    "max_steps": "train.steps",
    "batch_size": "data.batch_size",
    "num_workers": "data.num_workers",
    "gradient_accumulation_steps": "train.accumulate_steps",
    "warmup_epochs": "optim.schedule.warmup_epochs",
    "warmup_steps": "optim.schedule.warmup_steps",
    "min_lr": "optim.schedule.min_lr",
    "scheduler_type": "optim.schedule.name",
    "use_mixed_precision": "precision.policy",
    "mixed_precision": "precision.policy",
    "early_stopping_patience": "evaluation.patience",
    "early_stopping_delta": "evaluation.min_delta",
    "save_every": "checkpoint.every_epochs",
    "validate_every": "evaluation.every_epochs",
    "checkpoint_dir": "run.dir",
    "output_dir": "run.dir",
}


class TrainingConfig(Section):
    """The sections of a run, each a frozen object or a dict; all keys and defaults are in docs/reference.md.

    The names of plain torch projects are accepted too: learning_rate, num_epochs, batch_size, ...

    Examples:
        >>> import jaxtrain
        >>> config = jaxtrain.TrainingConfig(learning_rate=1e-2, optim={"clip_norm": None})
        >>> config.optim.lr, config.optim.clip_norm, config.data.batch_size
        (0.01, None, 64)
        >>> config  # what differs from the defaults
        TrainingConfig(optim=OptimConfig(lr=0.01, clip_norm=None))
    """

    task: str | None = None  # a system's task ("digits.classify") or an importable one ("my_package.my_task")
    seed: int = Field(default=0, ge=0, lt=2**32)  # the bits of JAX's keys
    compat: Literal["correct", "original"] = "correct"  # original: the torch original's training procedure, faults too
    deterministic: bool = True  # XLA's deterministic operations on GPU
    init_from: str | None = None  # start from these weights: a .pt, a .safetensors, a Hugging Face or a run folder
    init_optimizer: bool = True  # if that file holds an optimizer's state, go on with it and at its step
    init_strict: bool = True  # false: take the weights of init_from that fit, name those that do not
    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    precision: PrecisionConfig = PrecisionConfig()
    shard: ShardConfig = ShardConfig()
    tracking: TrackingConfig = TrackingConfig()
    lora: LoraConfig = LoraConfig()
    profile: ProfileConfig = ProfileConfig()

    @classmethod
    def plain(cls, **settings: Any) -> "TrainingConfig":
        """Return the config of a plain torch loop: a constant rate, no clipping, no decay, but for what is given."""
        try:
            values = nest_flat_names(settings)
        except ValueError:
            return cls(**settings)  # which tells the mistake
        settings_of = lambda one: one.model_dump(exclude_unset=True) if isinstance(one, BaseModel) else one or {}
        optim = settings_of(values.get("optim"))
        if isinstance(optim, dict) and isinstance(schedule := settings_of(optim.get("schedule")), dict):
            schedule = {"name": "constant", **schedule}
            values["optim"] = {"weight_decay": 0.0, "clip_norm": None, **optim, "schedule": schedule}
        return cls(**values)

    @model_validator(mode="before")
    @classmethod
    def _accept_flat_names(cls, values: Any) -> Any:
        return nest_flat_names(values) if isinstance(values, dict) else values


def nest_flat_names(values: dict) -> dict:
    """`{"learning_rate": 1e-4}` -> `{"optim": {"lr": 1e-4}}`; sections pass through.

    Raises ValueError where two names of one setting have different values.
    """
    result = {key: value for key, value in values.items() if key not in FLAT_NAMES}
    given: dict[str, str] = {}
    for key in (key for key in values if key in FLAT_NAMES):
        value, full = values[key], FLAT_NAMES[key]
        if key.endswith("mixed_precision"):  # accelerate writes "no"
            value = {True: "bf16", False: "fp32", "no": "fp32"}.get(value, value)
        *sections, leaf = full.split(".")
        target = result
        for section in sections:
            inner = target.get(section) or {}
            if not isinstance(inner, (dict, BaseModel)):
                break  # its own mistake, which the section tells
            target[section] = dict(inner) if isinstance(inner, dict) else inner.model_dump(exclude_unset=True)
            target = target[section]
        else:
            if leaf in target and target[leaf] != value:
                other = given.get(full, full)
                raise ValueError(f"{key} and {other} are one setting, got {value!r} and {target[leaf]!r}; keep one")
            target[leaf], given[full] = value, key
    return result
