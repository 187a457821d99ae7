"""The original's training functions on torch objects; every step is one compiled call, the loop is plain Python."""

import copy
import dataclasses
import math
import pathlib
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import torch

from jaxtrain.compiled_step.or_torch import StepOrTorch
from jaxtrain.errors import UserError
from jaxtrain.systems.set_completion.original.early_stopping import EarlyStopping
from jaxtrain.systems.set_completion.torch_model import SetCompletionModel
from jaxtrain.systems.set_completion.vocabulary import PAD
from torch_bridge.from_torch import unwrapped

METRICS = ("loss", "f1", "precision", "recall", "hamming")
COUNTS = ("tp", "fp", "fn")
MULTIPLE = 8  # pad SetCompletionModel's inputs to a multiple of it, so that few shapes are compiled
SCALERS = (torch.amp.GradScaler, torch.cuda.amp.GradScaler)
STEPS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> reference to its last Step


class EmptyLoader(UserError, ZeroDivisionError):
    """Raised for an epoch without batches, where the original raises ZeroDivisionError."""


def convert_ddp_state(state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Strip one leading `module.` from every key, keeping the order."""
    return OrderedDict((key.removeprefix("module."), value) for key, value in state_dict.items())


@dataclasses.dataclass
class TrainingConfig:
    """The original's settings of `train_model`. device: `auto` becomes cuda if available, else cpu."""

    num_epochs: int = 10
    patience: int = 3
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    clip_grad_norm: float = 1.0
    scheduler_factor: float = 0.1
    scheduler_patience: int = 2
    device: str = "auto"
    distributed: bool = False

    def __post_init__(self) -> None:
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"


def create_multi_hot_targets(
    batch_targets: torch.Tensor | Sequence, vocab: Mapping[str, int], device: Any, pad_token: str = PAD
) -> torch.Tensor:
    """Return float [batch, len(vocab)] on `device`, with 1 for each id of the row; padding is ignored.

    Raises ValueError if the vocabulary lacks pad_token.
    """
    if pad_token not in vocab:
        raise ValueError(f"pad_token: the vocabulary lacks {pad_token!r}, so padding would count as a target")
    pad, targets = vocab[pad_token], batch_targets
    if not isinstance(targets, torch.Tensor):
        rows = [torch.as_tensor(row, dtype=torch.long) for row in targets]
        targets = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    targets = targets.to(device)
    known = (targets >= 0) & (targets != pad)
    hot = torch.zeros(len(targets), len(vocab), device=targets.device)
    return hot.scatter_add_(1, targets.clamp(min=0), known.float()).clamp_(max=1)


def batch_of(batch: Sequence, vocab: Mapping[str, int], pad_token: str, padded: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a loader's batch (inputs, weapons, targets, ...) by name, with the padding mask.

    Rows without a visible token are left out because their logits would be NaN. padded: pad inputs to a multiple of
    MULTIPLE tokens, which does not change SetCompletionModel's result.
    """
    inputs, weapons, targets = batch[:3]
    pad = vocab[pad_token]
    hidden = inputs == pad
    shown = ~hidden.all(1)
    rows = {
        "inputs": inputs,
        "weapons": weapons,
        "targets": create_multi_hot_targets(targets, vocab, inputs.device, pad_token),
    }
    if not bool(shown.all()):
        rows = {name: value[shown] for name, value in rows.items()}
    if padded:
        width = -(-inputs.shape[1] // MULTIPLE) * MULTIPLE
        rows["inputs"] = torch.nn.functional.pad(rows["inputs"], (0, width - inputs.shape[1]), value=pad)
    return {**rows, "mask": rows["inputs"] == pad}


def counts_of(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the numbers of true positives, false positives and false negatives at a probability threshold of 0.5."""
    predicted, relevant = logits >= 0, targets > 0.5
    pairs = {"tp": predicted & relevant, "fp": predicted & ~relevant, "fn": ~predicted & relevant}
    return {name: value.sum().float() for name, value in pairs.items()}


class Step(StepOrTorch):
    """Optimizer step of a model: one compiled call, or torch's own step if something cannot be recorded."""

    def __init__(self, model: Any, optimizer: Any, criterion: Any, clip_norm: float | None, scaler: Any):
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.clip_norm, self.scaling = clip_norm, scaling_of(scaler)
        self.padded = type(unwrapped(model)) is SetCompletionModel if isinstance(model, torch.nn.Module) else False
        say = lambda line: warnings.warn(f"train_epoch: {line}", stacklevel=4)
        precision = "fp32" if scaler is None else "bf16"
        options = {"clip_norm": clip_norm, "precision": precision, "say": say, "scaler": scaler}
        super().__init__(model, self._loss, optimizer, **options)
        self.hooked = hooked(model)
        if self.hooked and not self.in_torch:
            self._give_up(UserError("the model has hooks, which a compiled step would call once"))
        if self.scaling is scaler and not self.in_torch:
            self._give_up(UserError("the scaler is your own, which a compiled step would not call"))

    def _loss(self, module: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logits = module(batch["inputs"], batch["weapons"], batch["mask"])
        return self.criterion(logits, batch["targets"]), counts_of(logits, batch["targets"])

    def logits(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.forward(batch["inputs"], batch["weapons"], batch["mask"])


def _logits_in_torch(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    first = next(iter(model.parameters()), None) if isinstance(model, torch.nn.Module) else None
    moved = lambda value: value if first is None else value.to(first.device)
    return model(*(moved(batch[name]) for name in ("inputs", "weapons", "mask")))


def hooked(model: Any) -> bool:
    """Return True if a module of the model has forward hooks, such as a SetCompletionHook."""
    inside = model.modules() if isinstance(model, torch.nn.Module) else ()
    return any(inner._forward_hooks or inner._forward_pre_hooks for inner in inside)


def scaling_of(scaler: Any) -> Any:
    """Return False for no scaler, True for torch's, which bf16 makes superfluous, and one of another class itself."""
    return scaler is not None if scaler is None or type(scaler) in SCALERS else scaler


def step_of(model: Any, optimizer: Any, criterion: Any, clip_norm: float | None, scaler: Any) -> Step:
    """Return the cached step for these objects, or make a new one if one of them changed; sets the step's scaler."""
    step = last_step(model)
    parts = (optimizer, criterion, scaling_of(scaler), hooked(model))
    step_parts = () if step is None else (step.optimizer, step.criterion, step.scaling, step.hooked)
    if step is None or step.clip_norm != clip_norm or any(a is not b for a, b in zip(step_parts, parts, strict=True)):
        step = Step(model, optimizer, criterion, clip_norm, scaler)
        optimizer.compiled_step = step  # keeps the step alive as long as the optimizer
        STEPS[model] = weakref.ref(step)
    step.eager.scaler = scaler
    return step


def last_step(model: Any) -> Step | None:
    """Return the step that trained this model last, if its optimizer still exists."""
    reference = STEPS.get(model)
    return None if reference is None else reference()


class Sums:
    """Accumulated losses and counts of an epoch."""

    def __init__(self):
        self.loss: Any = 0.0
        self.counts: dict[str, Any] = dict.fromkeys(COUNTS, 0.0)
        self.batches = self.cells = 0

    def add(self, loss: Any, counts: Mapping[str, Any] | None, cells: int) -> None:
        self.loss, self.batches = self.loss + loss, self.batches + 1
        if counts is not None:
            self.counts = {name: self.counts[name] + counts[name] for name in COUNTS}
            self.cells += cells

    def metrics(self) -> dict[str, float]:
        """Return the batches' mean loss, micro-averaged f1, precision, recall, and hamming (share of wrong labels)."""
        tp, fp, fn = (float(self.counts[name]) for name in COUNTS)
        share = lambda part, whole: part / whole if whole else 0.0
        return {
            "loss": share(float(self.loss), self.batches),
            "f1": share(2 * tp, 2 * tp + fp + fn),
            "precision": share(tp, tp + fp),
            "recall": share(tp, tp + fn),
            "hamming": share(fp + fn, self.cells),
        }


def train_epoch(
    model,
    train_dl: Iterable,
    optimizer,
    criterion,
    config: TrainingConfig,
    vocab: Mapping[str, int],
    pad_token: str = PAD,
    verbose: bool = True,
    scaler: Any = None,
    metric_update_interval: int = 1,
    ddp: bool = False,
    global_step: int = 0,
    step_callback: Callable[[int, dict[str, float]], None] | None = None,
) -> tuple[dict[str, float], int]:
    """Train on the loader's batches (inputs, weapons, targets, ...) once; return (metrics, global_step).

    model: called with (inputs, weapons, key_padding_mask). optimizer, criterion: torch's, or your own. A step is one
    compiled call; if it cannot be recorded, a warning says why and torch runs it. scaler: if given, the forward pass is
    bfloat16; it scales the loss only in steps that torch runs. metric_update_interval: every so many batches, and at
    the last one, a batch counts in the metrics and step_callback is called with (global_step, {"train/loss_step",
    "train/loss_running", "train/lr"}). ddp: no effect in one process. Raises UserError among several processes.
    """
    _single_process()
    model.train()
    step = step_of(model, optimizer, criterion, getattr(config, "clip_grad_norm", None), scaler)
    sums, batches = Sums(), _shown(train_dl, verbose, "Training")
    count = len(train_dl) if hasattr(train_dl, "__len__") else math.inf
    for number, rows in enumerate(batches, 1):
        batch = batch_of(rows, vocab, pad_token, step.padded)
        if not len(batch["inputs"]):
            continue
        rate = None if step_callback is None else float(optimizer.param_groups[0]["lr"])
        loss, counts = step(batch)
        global_step += 1
        counted = number % metric_update_interval == 0 or number == count
        sums.add(loss, counts if counted else None, batch["targets"].numel())
        if counted and step_callback is not None:
            losses = {"train/loss_step": float(loss), "train/loss_running": float(sums.loss) / sums.batches}
            step_callback(global_step, {**losses, "train/lr": rate})
    step.sync()
    if not sums.batches:
        raise EmptyLoader(
            "train_dl gave no batch with a visible token; are there fewer rows than batch_size, with drop_last?"
        )
    return sums.metrics(), global_step


@torch.no_grad()
def validate(
    model,
    val_dl: Iterable,
    criterion,
    config: TrainingConfig,
    vocab: Mapping[str, int],
    pad_token: str = PAD,
    verbose: bool = True,
    metric_update_interval: int = 1,
    ddp: bool = False,
) -> dict[str, float]:
    """Return loss, f1, precision, recall and hamming; leaves the model in eval mode, as originally.

    metric_update_interval: every so many batches, and at the last one, a batch counts in the metrics; all count in the
    loss. ddp: raise UserError among several processes, whose metrics the original averages.
    """
    if ddp:
        _single_process()
    model.eval()
    step = None if hooked(model) else last_step(model)  # its weights are already in the model
    padded = step.padded if step is not None else False
    sums = Sums()
    last = len(val_dl) if hasattr(val_dl, "__len__") else math.inf
    for number, rows in enumerate(_shown(val_dl, verbose, "Validation"), 1):
        batch = batch_of(rows, vocab, pad_token, padded)
        if not len(batch["inputs"]):
            continue
        logits = _logits_in_torch(model, batch) if step is None else step.logits(batch)
        targets = batch["targets"].to(logits.device)
        counted = number % metric_update_interval == 0 or number == last
        sums.add(criterion(logits, targets), counts_of(logits, targets) if counted else None, targets.numel())
    return sums.metrics()


def test_model(
    model,
    test_dl: Iterable,
    config: TrainingConfig,
    vocab: Mapping[str, int],
    pad_token: str = PAD,  # noqa: PT028 no test
    verbose: bool = True,  # noqa: PT028
    ddp: bool = False,  # noqa: PT028
) -> dict[str, float]:
    """Return the metrics of the test split, with the loss of `train_model`."""
    return validate(model, test_dl, torch.nn.BCEWithLogitsLoss(), config, vocab, pad_token, verbose, ddp=ddp)


test_model.__test__ = False  # not a test; pytest would collect it by its name


def train_model(
    model,
    train_dl: Iterable,
    val_dl: Iterable,
    config: TrainingConfig,
    vocab: Mapping[str, int],
    pad_token: str = PAD,
    verbose: bool = True,
    scaler: Any = None,
    metric_update_interval: int = 1,
    ddp: bool = False,
    checkpoint_dir: str | pathlib.Path | None = None,
    checkpoint_interval: int = 1,
    epoch_callback: Callable[[int, dict, dict], None] | None = None,
    step_callback: Callable[[int, dict[str, float]], None] | None = None,
) -> tuple[dict[str, dict[str, list[float]]], Any]:
    """Train with AdamW, ReduceLROnPlateau and early stopping; return (history, model with the best F1's weights).

    checkpoint_dir: folder for state dicts epoch_001.pth, ..., every checkpoint_interval epochs. epoch_callback: called
    with (epoch from 1, training metrics, validation metrics). The original returns the last epoch's weights instead.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="min", factor=config.scheduler_factor, patience=config.scheduler_patience
    )
    criterion, stopping = torch.nn.BCEWithLogitsLoss(), EarlyStopping(config.patience)
    history: dict[str, dict[str, list[float]]] = {split: {name: [] for name in METRICS} for split in ("train", "val")}
    best, best_f1, global_step = None, 0.0, 0
    shared = (config, vocab, pad_token, verbose)
    for epoch in range(config.num_epochs):
        sampler = getattr(train_dl, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        trained, global_step = train_epoch(
            model,
            train_dl,
            optimizer,
            criterion,
            *shared,
            scaler,
            metric_update_interval,
            ddp,
            global_step=global_step,
            step_callback=step_callback,
        )
        validated = validate(model, val_dl, criterion, *shared, metric_update_interval, ddp)
        for split, metrics in (("train", trained), ("val", validated)):
            for name in METRICS:
                history[split][name].append(metrics[name])
        if verbose:
            rate = optimizer.param_groups[0]["lr"]
            losses = (
                f"loss {trained['loss']:.4f} / {validated['loss']:.4f}  f1 {trained['f1']:.4f} / {validated['f1']:.4f}"
            )
            print(f"Epoch {epoch + 1}/{config.num_epochs}  train / val {losses}  lr {rate:.2e}")
        if epoch_callback is not None:
            epoch_callback(epoch + 1, trained, validated)
        if validated["f1"] > best_f1:
            best, best_f1 = copy.deepcopy(model.state_dict()), validated["f1"]
        scheduler.step(validated["loss"])
        if checkpoint_dir is not None and (epoch + 1) % checkpoint_interval == 0:
            folder = pathlib.Path(checkpoint_dir)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), folder / f"epoch_{epoch + 1:03d}.pth")
        if stopping(validated["loss"]):
            break
    if best is not None:
        model.load_state_dict(best)
    return history, model


def _shown(batches: Iterable, verbose: bool, what: str) -> Iterable:
    from tqdm import tqdm

    return tqdm(batches, desc=what, leave=False) if verbose else batches


def _single_process() -> None:
    """Raise UserError among several processes, JAX's or torch's: metrics and gradients would be this one's alone."""
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    if jax.process_count() > 1 or (joined and torch.distributed.get_world_size() > 1):
        raise UserError(
            "train_epoch, validate, test_model: there are several processes, and this loop works in each alone; use "
            "`torchrun -m jaxtrain.run` or jaxtrain.Trainer, which share the work"
        )
