"""The original's optimizers, schedulers, losses and Evaluator, under its names and in torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence import metrics as scores
from jaxtrain.systems.criteria_evidence.original.schedules import transformers
from torch_bridge.datasets import to_numpy

NO_DECAY = ("LayerNorm.weight", "layer_norm.weight")


def _at(config: Any, *names: str, default: Any = None) -> Any:
    """Return the config's value for the first of the dotted names that it has, under `training` or at the top level.

    If the config has neither `training` nor the named section, it is taken to be that section: {"name": "adam"} has
    `optimizer.name`.
    """
    sections = {name.partition(".")[0] for name in names if "." in name}
    if hasattr(config, "get") and not any(config.get(one) is not None for one in ("training", *sections)):
        names = (*names, *(name.partition(".")[2] for name in names if "." in name))
    for path in (path for name in names for path in (f"training.{name}", name)):
        value = config
        for part in path.split("."):
            value = (
                value.get(part) if isinstance(value, Mapping) or hasattr(value, "get") else getattr(value, part, None)
            )
            if value is None:
                break
        if value is not None:
            return value
    return default


def create_optimizer(model: nn.Module, training_cfg: Any) -> torch.optim.Optimizer:
    """Return AdamW or Adam with the config's learning_rate, weight_decay and optimizer.{name, betas, eps}.

    It has two parameter groups; the second one (biases and LayerNorm weights) has no weight decay. Raises UserError, a
    ValueError, for another name.
    """
    config = training_cfg
    name = str(_at(config, "optimizer.name", default="adamw")).lower()
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
    if name not in kinds:
        raise UserError(f"Unknown optimizer: {name}, wanted one of {', '.join(kinds)}")
    trained = [(key, p) for key, p in model.named_parameters() if p.requires_grad]
    spared = {key for key, _ in trained if key.endswith("bias") or any(part in key for part in NO_DECAY)}
    decay = _at(config, "weight_decay", "optimizer.weight_decay", default=0.01)
    groups = [
        {"params": [p for key, p in trained if key not in spared], "weight_decay": decay},
        {"params": [p for key, p in trained if key in spared], "weight_decay": 0.0},
    ]
    return kinds[name](
        groups,
        lr=_at(config, "learning_rate", "lr", "optimizer.lr", default=2e-5),
        betas=tuple(_at(config, "optimizer.betas", default=(0.9, 0.999))),
        eps=_at(config, "optimizer.eps", default=1e-8),
    )


def create_scheduler(optimizer: torch.optim.Optimizer, scheduler_cfg: Any, total_training_steps: int) -> Any:
    """Return transformers' schedule as a torch LambdaLR; None for `none`, `constant` and a run without steps.

    Reads scheduler.{type or name, warmup_ratio or warmup_steps, num_cycles}. Raises UserError for an unknown name.
    """
    config, total_steps = scheduler_cfg, total_training_steps
    name = str(_at(config, "scheduler.type", "scheduler.name", default="linear")).lower()
    if name in ("none", "constant") or not total_steps:
        return None
    warmup = _at(config, "scheduler.warmup_steps")
    if warmup is None:
        warmup = int(total_steps * _at(config, "scheduler.warmup_ratio", "warmup_ratio", default=0.0))
    return get_scheduler(name, optimizer, warmup, total_steps, _at(config, "scheduler.num_cycles"))


def get_scheduler(
    name: str,
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int = 0,
    num_training_steps: int = 0,
    num_cycles: float | None = None,
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return transformers' schedule of that name for a torch optimizer. Raises UserError for an unknown name."""
    rate = optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0]["lr"])
    cycles = num_cycles if name == "cosine_with_restarts" else None
    try:
        factor = transformers(name, num_training_steps, num_warmup_steps, lr=rate, cycles=cycles)
    except ValueError as error:
        raise UserError(str(error)) from None
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# --- losses ------------------------------------------------------------------------------------------------------


class FocalLoss(nn.Module):
    """Focal loss of (logits [batch, class], labels [batch]): cross-entropy times (1 - p of the label) ** gamma.

    alpha: a weight per class. label_smoothing: as in torch. gamma 0 is plain cross-entropy. Raises UserError for an
    unknown reduction. Source: Lin et al. 2017.
    """

    def __init__(
        self,
        gamma: float = 2.0,
        alpha: Sequence[float] | torch.Tensor | None = None,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
    ):
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise UserError(f"reduction: {reduction!r}, wanted mean, sum or none")
        self.gamma, self.label_smoothing, self.reduction = gamma, label_smoothing, reduction
        self.register_buffer("alpha", None if alpha is None else torch.as_tensor(alpha, dtype=torch.float32))

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = functional.cross_entropy(logits, labels, label_smoothing=self.label_smoothing, reduction="none")
        rows = rows * (1 - logits.softmax(-1).gather(-1, labels[:, None])[:, 0]) ** self.gamma
        if self.alpha is not None:
            rows = rows * self.alpha.to(rows.dtype)[labels]
        return rows if self.reduction == "none" else getattr(rows, self.reduction)()


def class_weights(
    labels: Sequence[int] | torch.Tensor, num_classes: int = 2, kind: str = "weighted", beta: float = 0.999
):
    """Return class weights for a loss, float [class], scaled to a mean of 1 over the rows.

    kind: `weighted` is the inverse of the class's number of rows, `effective_num` follows Cui et al. 2019, `none` is 1
    for all. Raises UserError for another kind.
    """
    counts = np.maximum(np.bincount(np.asarray(labels), minlength=num_classes), 1).astype(float)
    known = {"none": np.ones_like(counts), "weighted": 1 / counts, "effective_num": (1 - beta) / (1 - beta**counts)}
    if kind not in known:
        raise UserError(f"class weights {kind!r} are unknown, wanted one of {', '.join(known)}")
    weights = known[kind] / (known[kind] * counts).sum() * counts.sum()
    return torch.tensor(weights, dtype=torch.float32)


def span_loss(
    start_logits: torch.Tensor,
    end_logits: torch.Tensor,
    start_positions: torch.Tensor,
    end_positions: torch.Tensor,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the mean of start and end cross-entropy over all positions, padding included, as in the original."""
    pairs = ((start_logits, start_positions), (end_logits, end_positions))
    return sum(functional.cross_entropy(x, y, label_smoothing=label_smoothing) for x, y in pairs) / 2


def multi_task_loss(outputs: Any, batch: Mapping[str, torch.Tensor], loss_weights: Mapping[str, float] | None = None):
    """Return criteria weight x cross-entropy + evidence weight x span_loss of a share or joint model's outputs.

    outputs: (logits, start_logits, end_logits), or a mapping with these names. Missing weights are 1.
    """
    named = (
        outputs
        if hasattr(outputs, "keys")
        else dict(zip(("logits", "start_logits", "end_logits"), outputs, strict=True))
    )
    weights = loss_weights or {}
    spans = span_loss(named["start_logits"], named["end_logits"], batch["start_positions"], batch["end_positions"])
    classes = functional.cross_entropy(named["logits"], batch["labels"])
    return weights.get("criteria", 1.0) * classes + weights.get("evidence", 1.0) * spans


# --- evaluation --------------------------------------------------------------------------------------------------


class Evaluator:
    """Metrics of a model on a loader whose batches hold input_ids, attention_mask, labels, optional criterion_id.

    task_type: criteria or evidence, selects the metrics; another one raises TypeError, as in the original.
    """

    def __init__(
        self, model: nn.Module, device: torch.device | str, task_type: str = "criteria", criterion: Any = None
    ):
        self.model, self.device = model.to(device), torch.device(device)
        self.task_type, self.criterion = task_type, criterion

    @torch.no_grad()
    def evaluate(self, data_loader: Any, class_names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return accuracy, precision, recall, F1, AUROC, per_criterion_f1, confusion_matrix and loss of the loader.

        With class_names, classification_report too. Raises UserError if the loader is empty.
        """
        logits, labels, ids, losses = [], [], [], []
        for batch, out in self._outputs(data_loader):
            target = batch["labels"].to(self.device)
            losses.append(float((self.criterion or functional.cross_entropy)(out, target)))
            logits.append(to_numpy(out))
            labels.append(to_numpy(target))
            ids += list(batch.get("criterion_id", []))
        criteria = ids if len(ids) == sum(map(len, labels)) else ()
        metrics = scores.evaluator_scores(
            self.task_type, np.concatenate(logits), np.concatenate(labels), 1, criteria, class_names
        )
        return metrics | {"loss": float(np.mean(losses))}

    def predict(self, data_loader: Any) -> np.ndarray:
        """Return the most likely class of every row, int [row]. Raises UserError if the loader is empty."""
        return self.predict_proba(data_loader).argmax(1)

    @torch.no_grad()
    def predict_proba(self, data_loader: Any) -> np.ndarray:
        """Return the probabilities of every row, float [row, class]. Raises UserError if the loader is empty."""
        return np.concatenate([to_numpy(out.float().softmax(-1)) for _, out in self._outputs(data_loader)])

    def _outputs(self, data_loader: Any) -> Iterator[tuple[Mapping[str, Any], torch.Tensor]]:
        """Yield (batch, logits) in evaluation mode."""
        self.model.eval()
        batch = None
        for batch in data_loader:
            yield batch, self.model(batch["input_ids"].to(self.device), batch["attention_mask"].to(self.device))
        if batch is None:
            raise UserError("the loader gave no batch")


class EarlyStopping:
    """Early stopping after `patience` values in a row that are not better than the best by more than min_delta.

    step(value) returns True to stop. The first value always counts as an improvement; a later NaN never does.
    """

    def __init__(self, patience: int = 20, min_delta: float = 0.0, mode: str = "max"):
        if mode not in ("max", "min"):
            raise UserError(f"mode: {mode!r}, wanted max or min")
        self.patience, self.min_delta, self.mode = patience, min_delta, mode
        self.best: float | None = None
        self.bad_epochs = 0

    def step(self, value: float) -> bool:
        improved = self.best is None or scores.improved(value, self.best, self.mode, self.min_delta)
        self.best = value if improved else self.best
        self.bad_epochs = 0 if improved else self.bad_epochs + 1
        return self.should_stop

    __call__ = step

    @property
    def should_stop(self) -> bool:
        return self.bad_epochs >= self.patience
