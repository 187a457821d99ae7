"""Types of the attributes that HJEPATrainer sets and its steps read."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.systems.hjepa.original.batch_loss import BatchLoss


class TrainerParts:
    """Attributes of a trainer; `Any` if users may set an object of their own."""

    config: Mapping[str, Any]
    device: Any
    device_type: str
    epochs: int
    steps_per_epoch: int
    accumulation_steps: int
    log_frequency: int
    current_epoch: int
    global_step: int
    epochs_without_improvement: int
    best_val_loss: float
    clip_grad: float | None
    use_amp: bool
    original_procedure: bool
    model: Any
    optimizer: Any
    scaler: Any
    loss_fn: Any
    masking_fn: Any
    train_loader: Any
    val_loader: Any
    lr_scheduler: Any
    ema_scheduler: Any
    early_stopping: Any
    checkpoint_manager: Any
    metrics_logger: Any
    progress_tracker: Any
    online_eval_enabled: bool
    online_eval_frequency: int
    online_eval_k: int
    online_eval_max_samples: int
    _batch_loss: BatchLoss

    def _log(self, line: str) -> None:
        raise NotImplementedError
