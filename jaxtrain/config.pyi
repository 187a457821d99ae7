"""The settings, as type checkers and editors read them. Written by `python docs/generate_config_stub.py`."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import BaseModel

MOST_STEPS: int

MOST_SAMPLES: int

MOST_LAYERS: int

NUMBERS: tuple[Any, ...]

OPTIMIZERS: tuple[Any, ...]

class ImportPath:
    """Mark a setting that names code: `Annotated[str, ImportPath]`. Code in a stranger's run folder is not imported."""

class _Checked(type(BaseModel)):
    """Class of sections: what Python code gives wrongly is told as a file's mistakes are, in a UserError."""

class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

class RunOptions(TypedDict, total=False):
    name: str | pathlib.PurePath | None
    dir: str | pathlib.PurePath | None
    quiet: bool

class RunConfig(Section):
    name: str | None = ...
    """folder under runs/, one name without `/`; the config file's name if left out"""
    dir: str | None = ...
    """the run folder itself; runs/<name> if left out"""
    quiet: bool = ...
    """no progress bar, warnings only"""

    def __init__(
        self,
        *,
        name: str | pathlib.PurePath | None = None,
        dir: str | pathlib.PurePath | None = None,
        quiet: bool = False,
    ) -> None: ...
    @property
    def folder(self) -> pathlib.Path:
        """The run folder: dir, or runs/<name>."""

class DataOptions(TypedDict, total=False):
    batch_size: int
    eval_batch_size: int | None
    shuffle: bool
    drop_last: bool
    num_workers: int
    start_method: Literal['forkserver', 'spawn', 'fork']
    prefetch_batches: int
    placement: Literal['auto', 'host', 'device']
    device_limit_bytes: int
    shapes: Literal['auto', 'exact', 'one']
    micro_batch: int | Literal['auto'] | None
    memory_limit_bytes: int | None
    pad_values: Mapping[str, float]
    stream_shards: int | None
    shuffle_buffer: int | None
    timeout_s: float

class DataConfig(Section):
    batch_size: int = ...
    """per optimizer step, over all devices and micro-batches"""
    eval_batch_size: int | None = ...
    """per evaluation step; default batch_size"""
    shuffle: bool = ...
    drop_last: bool = ...
    """leave out the last, uneven batch of a training epoch"""
    num_workers: int = ...
    """worker processes that read items; 0 reads in a thread"""
    start_method: Literal['forkserver', 'spawn', 'fork'] = ...
    """of worker processes; fork only before JAX"""
    prefetch_batches: int = ...
    """batches kept ready on the device"""
    placement: Literal['auto', 'host', 'device'] = ...
    """device: the whole dataset lives there, gathered in the step"""
    device_limit_bytes: int = ...
    """auto places a dataset on the device up to this size"""
    shapes: Literal['auto', 'exact', 'one'] = ...
    """batches of many lengths: auto pads them to a few, exact does not"""
    micro_batch: int | Literal['auto'] | None = ...
    """samples of one; auto: as many as fit. Sets train.accumulate_steps"""
    memory_limit_bytes: int | None = ...
    """of a device, for micro_batch=auto; its own if left out"""
    pad_values: dict[str, float] = ...
    """by entry of a batch: the value that pads it, if the collate function does not say"""
    stream_shards: int | None = ...
    """divide an IterableDataset over processes and workers"""
    shuffle_buffer: int | None = ...
    """samples of each shard that are held, and given shuffled"""
    timeout_s: float = ...
    """a batch that takes longer ends the run with the sample's index"""

    def __init__(
        self,
        *,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        start_method: Literal['forkserver', 'spawn', 'fork'] = 'forkserver',
        prefetch_batches: int = 2,
        placement: Literal['auto', 'host', 'device'] = 'auto',
        device_limit_bytes: int = 1073741824,
        shapes: Literal['auto', 'exact', 'one'] = 'auto',
        micro_batch: int | Literal['auto'] | None = None,
        memory_limit_bytes: int | None = None,
        pad_values: Mapping[str, float] = ...,
        stream_shards: int | None = None,
        shuffle_buffer: int | None = None,
        timeout_s: float = 600.0,
    ) -> None: ...

class ScheduleOptions(TypedDict, total=False):
    name: Literal['constant', 'cosine', 'cosine_with_restarts', 'linear', 'polynomial', 'step', 'wsd', 'plateau']
    warmup_steps: int | None
    warmup_epochs: float | None
    warmup_ratio: float | None
    warmup_start: float
    min_lr: float
    stable_ratio: float
    cycles: int
    power: float
    step_epochs: int
    factor: float
    patience: int
    threshold: float
    metric: str | pathlib.PurePath
    mode: Literal['min', 'max']

class ScheduleConfig(Section):
    name: Literal['constant', 'cosine', 'cosine_with_restarts', 'linear', 'polynomial', 'step', 'wsd', 'plateau'] = ...
    warmup_steps: int | None = ...
    """optimizer steps; one of the three warmup keys"""
    warmup_epochs: float | None = ...
    warmup_ratio: float | None = ...
    """of all steps"""
    warmup_start: float = ...
    """learning rate of step 0, as a fraction of lr"""
    min_lr: float = ...
    """learning rate at the end, absolute"""
    stable_ratio: float = ...
    """wsd: fraction of the steps after warm-up that stay at lr"""
    cycles: int = ...
    """cosine_with_restarts"""
    power: float = ...
    """polynomial"""
    step_epochs: int = ...
    """step: epochs between two drops"""
    factor: float = ...
    """step, plateau: lr is multiplied by it"""
    patience: int = ...
    """plateau: evaluations without improvement before a drop"""
    threshold: float = ...
    """plateau: relative improvement that counts"""
    metric: str = ...
    """plateau: validation metric it watches"""
    mode: Literal['min', 'max'] = ...

    def __init__(
        self,
        *,
        name: Literal['constant', 'cosine', 'cosine_with_restarts', 'linear', 'polynomial', 'step', 'wsd', 'plateau'] = 'cosine',
        warmup_steps: int | None = None,
        warmup_epochs: float | None = None,
        warmup_ratio: float | None = None,
        warmup_start: float = 0.0,
        min_lr: float = 0.0,
        stable_ratio: float = 0.8,
        cycles: int = 1,
        power: float = 1.0,
        step_epochs: int = 30,
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 0.0001,
        metric: str | pathlib.PurePath = 'loss',
        mode: Literal['min', 'max'] = 'min',
    ) -> None: ...

class GroupOptions(TypedDict, total=False):
    match: str | pathlib.PurePath | Sequence[str | pathlib.PurePath] | None
    lr: float | None
    weight_decay: float | None
    freeze: bool
    freeze_until_epoch: int | None
    freeze_after_epoch: int | None

class GroupConfig(Section):
    """Overrides for one group of parameters: those whose names match, or that the task calls so."""

    match: str | tuple[str, ...] | None = ...
    """patterns of parameter names, as encoder.*; the first group that fits"""
    lr: float | None = ...
    weight_decay: float | None = ...
    freeze: bool = ...
    """never train it"""
    freeze_until_epoch: int | None = ...
    """frozen for so many epochs at first"""
    freeze_after_epoch: int | None = ...
    """frozen once so many epochs have passed"""

    def __init__(
        self,
        *,
        match: str | pathlib.PurePath | Sequence[str | pathlib.PurePath] | None = None,
        lr: float | None = None,
        weight_decay: float | None = None,
        freeze: bool = False,
        freeze_until_epoch: int | None = None,
        freeze_after_epoch: int | None = None,
    ) -> None: ...
    @property
    def patterns(self) -> tuple[str, ...]: ...

class OptimOptions(TypedDict, total=False):
    name: str | pathlib.PurePath
    lr: float | Literal['auto']
    auto_lr: bool
    weight_decay: float
    decay_bias_and_norm: bool
    beta1: float
    beta2: float
    eps: float
    momentum: float
    nesterov: bool
    clip_norm: float | None
    groups: Mapping[str, GroupConfig | GroupOptions]
    layer_decay: float | None
    ema_decay: float | None
    schedule: ScheduleConfig | ScheduleOptions

class OptimConfig(Section):
    name: Annotated[str, ImportPath] = ...
    """adam, sgd, lion, muon, adafactor; or my_package.function (optax)"""
    lr: float = ...
    """peak value, per optimizer step, after warm-up; auto: see auto_lr"""
    auto_lr: bool = ...
    """also `lr: auto`: a range test before the first step finds lr (jaxtrain.lr_find's steepest)"""
    weight_decay: float = ...
    """decoupled for adamw, lion, muon; L2 for adam and sgd, as in torch"""
    decay_bias_and_norm: bool = ...
    """torch decays everything; False spares biases and normalisation gains"""
    beta1: float = ...
    beta2: float = ...
    eps: float = ...
    momentum: float = ...
    """sgd; for muon, 0 means 0.95"""
    nesterov: bool = ...
    """sgd"""
    clip_norm: float | None = ...
    """global L2 norm of the gradients; null: no clipping"""
    groups: dict[str, GroupConfig] = ...
    """by name: your own with `match`, or those that the task gives"""
    layer_decay: float | None = ...
    """lr of each layer, times that of the layer above it"""
    ema_decay: float | None = ...
    """keep an average of the weights, evaluate and export it"""
    schedule: ScheduleConfig = ...

    def __init__(
        self,
        *,
        name: str | pathlib.PurePath = 'adamw',
        lr: float | Literal['auto'] = 0.001,
        auto_lr: bool = False,
        weight_decay: float = 0.01,
        decay_bias_and_norm: bool = True,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-08,
        momentum: float = 0.0,
        nesterov: bool = False,
        clip_norm: float | None = 1.0,
        groups: Mapping[str, GroupConfig | GroupOptions] = ...,
        layer_decay: float | None = None,
        ema_decay: float | None = None,
        schedule: ScheduleConfig | ScheduleOptions = ...,
    ) -> None: ...
    def group(self, name: str) -> GroupConfig:
        """Return what overrides the settings for this group; nothing for one that is not listed."""

class TrainOptions(TypedDict, total=False):
    epochs: int | None
    steps: int | None
    overfit_batches: int | None
    fast_dev_run: bool
    accumulate_steps: int
    accumulate_mean: Literal['weighted', 'micro']
    steps_per_call: int
    remat: Literal['none', 'dots', 'full']
    log_every_steps: int
    nan_policy: Literal['stop', 'skip', 'ignore']
    max_skipped_steps: int
    hang_timeout_s: float | None
    spike_factor: float | None

class TrainConfig(Section):
    epochs: int | None = ...
    """passes over the training data; steps wins if both are set"""
    steps: int | None = ...
    """optimizer steps"""
    overfit_batches: int | None = ...
    """train and evaluate on the first n batches, over and over"""
    fast_dev_run: bool = ...
    """one batch of training and of evaluation, everything else as ever, nothing kept"""
    accumulate_steps: int = ...
    """micro-batches per optimizer step"""
    accumulate_mean: Literal['weighted', 'micro'] = ...
    """micro: mean of the micro-batch means, as the originals"""
    steps_per_call: int = ...
    """optimizer steps in one compiled call"""
    remat: Literal['none', 'dots', 'full'] = ...
    """what the backward pass recomputes"""
    log_every_steps: int = ...
    nan_policy: Literal['stop', 'skip', 'ignore'] = ...
    max_skipped_steps: int = ...
    """nan_policy skip: more than this ends the run"""
    hang_timeout_s: float | None = ...
    """no progress for longer ends the run; null learns it"""
    spike_factor: float | None = ...
    """skip a step whose gradient norm exceeds factor x average"""

    def __init__(
        self,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        overfit_batches: int | None = None,
        fast_dev_run: bool = False,
        accumulate_steps: int = 1,
        accumulate_mean: Literal['weighted', 'micro'] = 'weighted',
        steps_per_call: int = 1,
        remat: Literal['none', 'dots', 'full'] = 'none',
        log_every_steps: int = 10,
        nan_policy: Literal['stop', 'skip', 'ignore'] = 'stop',
        max_skipped_steps: int = 10,
        hang_timeout_s: float | None = None,
        spike_factor: float | None = None,
    ) -> None: ...

class EvaluationOptions(TypedDict, total=False):
    every_epochs: int | None
    every_steps: int | None
    metric: str | pathlib.PurePath
    mode: Literal['min', 'max']
    patience: int | None
    min_delta: float
    averaged: bool
    test: bool

class EvaluationConfig(Section):
    every_epochs: int | None = ...
    every_steps: int | None = ...
    """wins over every_epochs"""
    metric: str = ...
    """decides "best", early stopping and best-N"""
    mode: Literal['min', 'max'] = ...
    patience: int | None = ...
    """evaluations without improvement before a stop; null: never"""
    min_delta: float = ...
    """improvement over the best ever seen that counts"""
    averaged: bool = ...
    """with optim.ema_decay: evaluate the averaged weights; false: those that train"""
    test: bool = ...
    """at the end of `jaxtrain.run`: the best checkpoint's metrics on the test split, too"""

    def __init__(
        self,
        *,
        every_epochs: int | None = 1,
        every_steps: int | None = None,
        metric: str | pathlib.PurePath = 'loss',
        mode: Literal['min', 'max'] = 'min',
        patience: int | None = None,
        min_delta: float = 0.0,
        averaged: bool = True,
        test: bool = False,
    ) -> None: ...

class CheckpointOptions(TypedDict, total=False):
    every_epochs: int | None
    every_steps: int | None
    keep_last: int
    keep_best: int
    grace_s: float
    retry_s: float
    mirror: str | pathlib.PurePath | None
    write_back: bool
    save_precision: Literal['fp32', 'bf16', 'fp16'] | None
    export: bool
    torch: Literal['original'] | None

class CheckpointConfig(Section):
    every_epochs: int | None = ...
    every_steps: int | None = ...
    keep_last: int = ...
    keep_best: int = ...
    grace_s: float = ...
    """time to save in after a preemption signal"""
    retry_s: float = ...
    """how long the end of a run tries to write its last checkpoint"""
    mirror: str | None = ...
    """a second copy of every checkpoint: a folder on another disk, or s3://, gs://, ..."""
    write_back: bool = ...
    """a model given to Trainer takes the weights at every checkpoint, not only at the end"""
    save_precision: Literal['fp32', 'bf16', 'fp16'] | None = ...
    """of exported weights; null: as trained"""
    export: bool = ...
    """write the best weights to exports/best.pt at the end of a run"""
    torch: Literal['original'] | None = ...
    """original: also write the torch project's own checkpoint files"""

    def __init__(
        self,
        *,
        every_epochs: int | None = None,
        every_steps: int | None = None,
        keep_last: int = 2,
        keep_best: int = 1,
        grace_s: float = 30.0,
        retry_s: float = 300.0,
        mirror: str | pathlib.PurePath | None = None,
        write_back: bool = False,
        save_precision: Literal['fp32', 'bf16', 'fp16'] | None = None,
        export: bool = True,
        torch: Literal['original'] | None = None,
    ) -> None: ...

class PrecisionOptions(TypedDict, total=False):
    policy: Literal['fp32', 'bf16', 'bf16_params', 'fp16', 'fp8']
    loss_scale: float
    matmul: Literal['default', 'high', 'highest']

class PrecisionConfig(Section):
    policy: Literal['fp32', 'bf16', 'bf16_params', 'fp16', 'fp8'] = ...
    """compute there, with fp32 master weights"""
    loss_scale: float = ...
    """fp16: initial dynamic loss scale (GradScaler's init_scale)"""
    matmul: Literal['default', 'high', 'highest'] = ...
    """of fp32 products: float32's, as torch's; others: TF32's"""

    def __init__(
        self,
        *,
        policy: Literal['fp32', 'bf16', 'bf16_params', 'fp16', 'fp8'] = 'fp32',
        loss_scale: float = 65536.0,
        matmul: Literal['default', 'high', 'highest'] = 'highest',
    ) -> None: ...

class ShardOptions(TypedDict, total=False):
    strategy: Literal['ddp', 'ddp_local', 'fsdp', 'shard_grad_op', 'hsdp']
    replicas: int | None
    tensor: int
    rules: Mapping[str, Sequence[Literal['tensor'] | None]]
    sequence: int
    devices: int | None
    threads: int | None

class ShardConfig(Section):
    strategy: Literal['ddp', 'ddp_local', 'fsdp', 'shard_grad_op', 'hsdp'] = ...
    replicas: int | None = ...
    """hsdp: groups that each hold one copy of the model"""
    tensor: int = ...
    """devices that split one layer, by rules of the task and of `rules`"""
    rules: dict[str, tuple[Literal['tensor'] | None, ...]] = ...
    """{pattern of a parameter: [tensor, null]}: its axes"""
    sequence: int = ...
    """devices that share the tokens of one sample, for tasks that can"""
    devices: int | None = ...
    """use the first n of this process's devices; all if left out"""
    threads: int | None = ...
    """of a CPU; one per core if left out. 1 suits small models"""

    def __init__(
        self,
        *,
        strategy: Literal['ddp', 'ddp_local', 'fsdp', 'shard_grad_op', 'hsdp'] = 'ddp',
        replicas: int | None = None,
        tensor: int = 1,
        rules: Mapping[str, Sequence[Literal['tensor'] | None]] = ...,
        sequence: int = 1,
        devices: int | None = None,
        threads: int | None = None,
    ) -> None: ...

class TrackingOptions(TypedDict, total=False):
    tensorboard: bool
    histograms_every_steps: int | None
    wandb: bool
    wandb_project: str | pathlib.PurePath
    mlflow: bool
    mlflow_uri: str | pathlib.PurePath | None
    mlflow_model: str | pathlib.PurePath | None
    mlflow_parent: str | pathlib.PurePath | None

class TrackingConfig(Section):
    tensorboard: bool = ...
    histograms_every_steps: int | None = ...
    wandb: bool = ...
    wandb_project: str = ...
    mlflow: bool = ...
    mlflow_uri: str | None = ...
    """sqlite:///... or http://...; default MLFLOW_TRACKING_URI, or a store in the run folder"""
    mlflow_model: str | None = ...
    """log the exported model and register it in MLflow under this name"""
    mlflow_parent: str | None = ...
    """id of the MLflow run that this one is nested in; a search sets it"""

    def __init__(
        self,
        *,
        tensorboard: bool = True,
        histograms_every_steps: int | None = None,
        wandb: bool = False,
        wandb_project: str | pathlib.PurePath = 'jaxtrain',
        mlflow: bool = False,
        mlflow_uri: str | pathlib.PurePath | None = None,
        mlflow_model: str | pathlib.PurePath | None = None,
        mlflow_parent: str | pathlib.PurePath | None = None,
    ) -> None: ...

class LoraOptions(TypedDict, total=False):
    rank: int
    alpha: float
    dropout: float
    match: str | pathlib.PurePath | Sequence[str | pathlib.PurePath]
    modules_to_save: Sequence[str | pathlib.PurePath]

class LoraConfig(Section):
    """Low-rank adapters for a torch module (`task: torch_module`, or one given to Trainer)."""

    rank: int = ...
    """of the adapters; 0: none"""
    alpha: float = ...
    """an adapter counts by alpha / rank"""
    dropout: float = ...
    """of what an adapter reads"""
    match: str | tuple[str, ...] = ...
    """names of layers, whole or their ends, as query; every Linear if left out"""
    modules_to_save: tuple[str, ...] = ...
    """names of submodules that train whole, as classifier"""

    def __init__(
        self,
        *,
        rank: int = 0,
        alpha: float = 16.0,
        dropout: float = 0.0,
        match: str | pathlib.PurePath | Sequence[str | pathlib.PurePath] = ...,
        modules_to_save: Sequence[str | pathlib.PurePath] = ...,
    ) -> None: ...
    @property
    def patterns(self) -> tuple[str, ...]: ...

class ProfileOptions(TypedDict, total=False):
    start: int
    steps: int

class ProfileConfig(Section):
    start: int = ...
    """steps of this start of the run that go before the trace"""
    steps: int = ...
    """traced steps; 0: no trace"""

    def __init__(
        self,
        *,
        start: int = 10,
        steps: int = 0,
    ) -> None: ...

FLAT_NAMES: dict[str, str]

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

    task: str | None = ...
    """a system's task ("digits.classify") or an importable one ("my_package.my_task")"""
    seed: int = ...
    """the bits of JAX's keys"""
    compat: Literal['correct', 'original'] = ...
    """original: the torch original's training procedure, faults too"""
    deterministic: bool = ...
    """XLA's deterministic operations on GPU"""
    init_from: str | None = ...
    """start from these weights: a .pt, a .safetensors, a Hugging Face or a run folder"""
    init_optimizer: bool = ...
    """if that file holds an optimizer's state, go on with it and at its step"""
    init_strict: bool = ...
    """false: take the weights of init_from that fit, name those that do not"""
    run: RunConfig = ...
    data: DataConfig = ...
    optim: OptimConfig = ...
    train: TrainConfig = ...
    evaluation: EvaluationConfig = ...
    checkpoint: CheckpointConfig = ...
    precision: PrecisionConfig = ...
    shard: ShardConfig = ...
    tracking: TrackingConfig = ...
    lora: LoraConfig = ...
    profile: ProfileConfig = ...

    def __init__(
        self,
        *,
        task: str | pathlib.PurePath | None = None,
        seed: int = 0,
        compat: Literal['correct', 'original'] = 'correct',
        deterministic: bool = True,
        init_from: str | pathlib.PurePath | None = None,
        init_optimizer: bool = True,
        init_strict: bool = True,
        run: RunConfig | RunOptions = ...,
        data: DataConfig | DataOptions = ...,
        optim: OptimConfig | OptimOptions = ...,
        train: TrainConfig | TrainOptions = ...,
        evaluation: EvaluationConfig | EvaluationOptions = ...,
        checkpoint: CheckpointConfig | CheckpointOptions = ...,
        precision: PrecisionConfig | PrecisionOptions = ...,
        shard: ShardConfig | ShardOptions = ...,
        tracking: TrackingConfig | TrackingOptions = ...,
        lora: LoraConfig | LoraOptions = ...,
        profile: ProfileConfig | ProfileOptions = ...,
        learning_rate: float | Literal['auto'] = ...,
        lr: float | Literal['auto'] = ...,
        weight_decay: float = ...,
        gradient_clip_val: float | None = ...,
        max_grad_norm: float | None = ...,
        clip_grad_norm: float | None = ...,
        num_epochs: int | None = ...,
        epochs: int | None = ...,
        max_steps: int | None = ...,
        batch_size: int = ...,
        num_workers: int = ...,
        gradient_accumulation_steps: int = ...,
        warmup_epochs: float | None = ...,
        warmup_steps: int | None = ...,
        min_lr: float = ...,
        scheduler_type: Literal['constant', 'cosine', 'cosine_with_restarts', 'linear', 'polynomial', 'step', 'wsd', 'plateau'] = ...,
        use_mixed_precision: bool | Literal['no'] | Literal['fp32', 'bf16', 'bf16_params', 'fp16', 'fp8'] = ...,
        mixed_precision: bool | Literal['no'] | Literal['fp32', 'bf16', 'bf16_params', 'fp16', 'fp8'] = ...,
        early_stopping_patience: int | None = ...,
        early_stopping_delta: float = ...,
        save_every: int | None = ...,
        validate_every: int | None = ...,
        checkpoint_dir: str | pathlib.PurePath | None = ...,
        output_dir: str | pathlib.PurePath | None = ...,
    ) -> None: ...
    @classmethod
    def plain(
        cls,
        *,
        task: str | pathlib.PurePath | None = None,
        seed: int = 0,
        compat: Literal['correct', 'original'] = 'correct',
        deterministic: bool = True,
        init_from: str | pathlib.PurePath | None = None,
        init_optimizer: bool = True,
        init_strict: bool = True,
        run: RunConfig | RunOptions = ...,
        data: DataConfig | DataOptions = ...,
        optim: OptimConfig | OptimOptions = ...,
        train: TrainConfig | TrainOptions = ...,
        evaluation: EvaluationConfig | EvaluationOptions = ...,
        checkpoint: CheckpointConfig | CheckpointOptions = ...,
        precision: PrecisionConfig | PrecisionOptions = ...,
        shard: ShardConfig | ShardOptions = ...,
        tracking: TrackingConfig | TrackingOptions = ...,
        lora: LoraConfig | LoraOptions = ...,
        profile: ProfileConfig | ProfileOptions = ...,
        learning_rate: float | Literal['auto'] = ...,
        lr: float | Literal['auto'] = ...,
        weight_decay: float = ...,
        gradient_clip_val: float | None = ...,
        max_grad_norm: float | None = ...,
        clip_grad_norm: float | None = ...,
        num_epochs: int | None = ...,
        epochs: int | None = ...,
        max_steps: int | None = ...,
        batch_size: int = ...,
        num_workers: int = ...,
        gradient_accumulation_steps: int = ...,
        warmup_epochs: float | None = ...,
        warmup_steps: int | None = ...,
        min_lr: float = ...,
        scheduler_type: Literal['constant', 'cosine', 'cosine_with_restarts', 'linear', 'polynomial', 'step', 'wsd', 'plateau'] = ...,
        use_mixed_precision: bool | Literal['no'] | Literal['fp32', 'bf16', 'bf16_params', 'fp16', 'fp8'] = ...,
        mixed_precision: bool | Literal['no'] | Literal['fp32', 'bf16', 'bf16_params', 'fp16', 'fp8'] = ...,
        early_stopping_patience: int | None = ...,
        early_stopping_delta: float = ...,
        save_every: int | None = ...,
        validate_every: int | None = ...,
        checkpoint_dir: str | pathlib.PurePath | None = ...,
        output_dir: str | pathlib.PurePath | None = ...,
    ) -> 'TrainingConfig':
        """Return the config of a plain torch loop: a constant rate, no clipping, no decay, but for what is given."""
    @property
    def decode(self) -> Any:
        """Section of tasks that have it."""
    @property
    def lesion(self) -> Any:
        """Section of tasks that have it."""
    @property
    def loss(self) -> Any:
        """Section of tasks that have it."""
    @property
    def masking(self) -> Any:
        """Section of tasks that have it."""
    @property
    def memory(self) -> Any:
        """Section of tasks that have it."""
    @property
    def model(self) -> Any:
        """Section of tasks that have it."""
    @property
    def probe(self) -> Any:
        """Section of tasks that have it."""
    @property
    def sae(self) -> Any:
        """Section of tasks that have it."""

def nest_flat_names(values: dict) -> dict:
    """`{"learning_rate": 1e-4}` -> `{"optim": {"lr": 1e-4}}`; sections pass through.

    Raises ValueError where two names of one setting have different values.
    """

