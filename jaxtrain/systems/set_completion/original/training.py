"""The original's training functions on torch objects: every step is one compiled call, the loop is yours."""

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
from torch_bridge.from_torch import unwrapped
from torch_bridge.lowering.recording.ready import is_mock

METRICS = ("loss", "f1", "precision", "recall", "hamming")
COUNTS = ("tp", "fp", "fn")
MULTIPLE = 8  # SetCompletionModel's inputs are padded to a multiple of it: few shapes, few compilations
STEPS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> reference to its last Step


class EmptyLoader(UserError, ZeroDivisionError):
    """Raised for a pass without a batch, where the original divides by their number."""


def convert_ddp_state(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Strip one leading `module.` from every key, order kept."""
    return OrderedDict((key.removeprefix("module."), value) for key, value in state.items())


@dataclasses.dataclass
class TrainingConfig:
    """The original's settings of `train_model`. device: `auto` becomes cuda where there is one, else cpu."""

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


def create_multi_hot_targets(targets: torch.Tensor | Sequence, vocab: Mapping[str, int], pad_token: str = "<PAD>"):
    """float [batch, len(vocab)]: 1 where an id is in the row; the padding counts nowhere."""
    pad = vocab.get(pad_token)
    if not isinstance(targets, torch.Tensor):
        rows = [torch.as_tensor(row, dtype=torch.long) for row in targets]
        targets = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1 if pad is None else pad)
    kept = (targets >= 0) & (targets != (-1 if pad is None else pad))
    found = torch.zeros(len(targets), len(vocab), device=targets.device)
    return found.scatter_add_(1, targets.clamp(min=0), kept.float()).clamp_(max=1)


def batch_of(batch: Sequence, vocab: Mapping[str, int], pad_token: str, padded: bool) -> dict[str, torch.Tensor]:
    """The tensors of a loader's batch (inputs, weapons, targets, ...). Rows without a visible token are left out: their
    logits would be NaN. padded: to a multiple of MULTIPLE tokens, which SetCompletionModel does not see."""
    inputs, weapons, targets = batch[:3]
    pad = vocab[pad_token]
    hidden = inputs == pad
    shown = ~hidden.all(1)
    rows = {"inputs": inputs, "weapons": weapons, "targets": create_multi_hot_targets(targets, vocab, pad_token)}
    if not bool(shown.all()):
        rows = {name: value[shown] for name, value in rows.items()}
    if padded:
        width = -(-inputs.shape[1] // MULTIPLE) * MULTIPLE
        rows["inputs"] = torch.nn.functional.pad(rows["inputs"], (0, width - inputs.shape[1]), value=pad)
    return {**rows, "mask": rows["inputs"] == pad}


def counts_of(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """True positives, false positives, false negatives at a probability of one half."""
    predicted, wanted = logits >= 0, targets > 0.5
    pairs = {"tp": predicted & wanted, "fp": predicted & ~wanted, "fn": ~predicted & wanted}
    return {name: value.sum().float() for name, value in pairs.items()}


class Step(StepOrTorch):
    """One optimizer step of a model: a compiled call, or torch's own where something of it cannot be recorded."""

    def __init__(self, model: Any, optimizer: Any, criterion: Any, clip_norm: float | None, scaler: Any):
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.clip_norm, self.scaling = clip_norm, scaling_of(scaler)
        self.padded = type(unwrapped(model)) is SetCompletionModel if isinstance(model, torch.nn.Module) else False
        say = lambda line: warnings.warn(f"train_epoch: {line}", stacklevel=4)
        precision = "fp32" if scaler is None else "bf16"
        own = {"clip_norm": clip_norm, "precision": precision, "say": say, "called": (criterion,), "scaler": scaler}
        super().__init__(model, self._loss, optimizer, **own)
        self.hooked = hooked(model)
        if self.hooked and not self.in_torch:
            self._give_up(UserError("the model has hooks, which a compiled step would call once"))

    def _loss(self, module: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logits = module(batch["inputs"], batch["weapons"], batch["mask"])
        return self.criterion(logits, batch["targets"]), counts_of(logits, batch["targets"])

    def logits(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.forward(batch["inputs"], batch["weapons"], batch["mask"])


def _logits_in_torch(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    first = next(iter(model.parameters()), None) if isinstance(model, torch.nn.Module) else None
    place = lambda value: value if first is None else value.to(first.device)
    return model(*(place(batch[name]) for name in ("inputs", "weapons", "mask")))


def hooked(model: Any) -> bool:
    """Return whether a module of the model has forward hooks, as a SetCompletionHook that keeps what it sees."""
    inside = model.modules() if isinstance(model, torch.nn.Module) else ()
    return any(inner._forward_hooks or inner._forward_pre_hooks for inner in inside)


def scaling_of(scaler: Any) -> Any:
    """A mock itself, whose calls are counted; else True where there is a scaler."""
    return scaler if is_mock(scaler) else scaler is not None


def step_of(model: Any, optimizer: Any, criterion: Any, clip_norm: float | None, scaler: Any) -> Step:
    """The step over these very objects, made once; a new scaler takes the place of the former."""
    step = last_step(model)
    given = (optimizer, criterion, scaling_of(scaler), hooked(model))
    own = () if step is None else (step.optimizer, step.criterion, step.scaling, step.hooked)
    if step is None or step.clip_norm != clip_norm or any(a is not b for a, b in zip(own, given, strict=True)):
        step = Step(model, optimizer, criterion, clip_norm, scaler)
        optimizer.compiled_step = step  # which lives as long as the optimizer does
        STEPS[model] = weakref.ref(step)
    step.eager.scaler = scaler
    return step


def last_step(model: Any) -> Step | None:
    """The step that trained this model last, if its optimizer is still there."""
    reference = STEPS.get(model)
    return None if reference is None else reference()


class Sums:
    """Losses and counts of an epoch."""

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
        """Mean loss of the batches; micro-averaged f1, precision, recall; hamming, the share of wrong labels."""
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
    pad_token: str = "<PAD>",
    verbose: bool = False,
    scaler: Any = None,
    metric_update_interval: int = 1,
    ddp: bool = False,
    global_step: int = 0,
    step_callback: Callable[[int, dict[str, float]], None] | None = None,
) -> tuple[dict[str, float], int]:
    """One pass over the loader's batches (inputs, weapons, targets, ...): (metrics, global_step).

    model: called with (inputs, weapons, key_padding_mask). optimizer, criterion: torch's, or your own. A step is one
    compiled call; where one of them cannot be recorded, a warning says why and torch runs it. scaler: given, the
    forward pass is bfloat16; it scales the steps that torch runs. metric_update_interval: batches between two that are
    counted in the metrics; the last one is. step_callback: called there with (global_step, {"train/loss_step",
    "train/loss_running", "train/lr"}). ddp: not used; several processes train with `jaxtrain run`.
    """
    _single_process()
    model.train()
    step = step_of(model, optimizer, criterion, getattr(config, "clip_grad_norm", None), scaler)
    sums, batches = Sums(), _shown(train_dl, verbose, "Training")
    count = len(train_dl) if hasattr(train_dl, "__len__") else math.inf
    for number, given in enumerate(batches, 1):
        batch = batch_of(given, vocab, pad_token, step.padded)
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
    pad_token: str = "<PAD>",
    verbose: bool = False,
    ddp: bool = False,
) -> dict[str, float]:
    """Metrics over every batch, in evaluation mode: loss, f1, precision, recall, hamming. The model is in evaluation
    mode afterwards, as in the original."""
    model.eval()
    step = None if hooked(model) else last_step(model)  # which has put its weights back into the model
    padded = step.padded if step is not None else False
    sums = Sums()
    for given in _shown(val_dl, verbose, "Validation"):
        batch = batch_of(given, vocab, pad_token, padded)
        if not len(batch["inputs"]):
            continue
        logits = _logits_in_torch(model, batch) if step is None else step.logits(batch)
        targets = batch["targets"].to(logits.device)
        sums.add(criterion(logits, targets), counts_of(logits, targets), targets.numel())
    return sums.metrics()


def test_model(
    model,
    test_dl: Iterable,
    config: TrainingConfig,
    vocab: Mapping[str, int],
    pad_token: str = "<PAD>",  # noqa: PT028 no test
    verbose: bool = False,  # noqa: PT028
) -> dict[str, float]:
    """Metrics of the test split, with the loss that `train_model` trains."""
    return validate(model, test_dl, torch.nn.BCEWithLogitsLoss(), config, vocab, pad_token, verbose)


test_model.__test__ = False  # no test, whatever its name: pytest collects by it


def train_model(
    model,
    train_dl: Iterable,
    val_dl: Iterable,
    config: TrainingConfig,
    vocab: Mapping[str, int],
    pad_token: str = "<PAD>",
    verbose: bool = False,
    scaler: Any = None,
    metric_update_interval: int = 1,
    ddp: bool = False,
    checkpoint_dir: str | pathlib.Path | None = None,
    checkpoint_interval: int = 1,
    epoch_callback: Callable[[int, dict, dict], None] | None = None,
    step_callback: Callable[[int, dict[str, float]], None] | None = None,
) -> tuple[dict[str, dict[str, list[float]]], Any]:
    """Train with AdamW, ReduceLROnPlateau and early stopping: (history, model with the weights of the best F1).

    checkpoint_dir: epoch_001.pth, ... every checkpoint_interval epochs: bare state dicts. epoch_callback: called with
    (epoch from 1, training metrics, validation metrics). The original returns the last epoch's weights for the best.
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
        validated = validate(model, val_dl, criterion, *shared, ddp)
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
    if jax.process_count() > 1:
        raise UserError(
            "train_epoch: there are several processes, and this loop trains in each alone; use `torchrun -m "
            "jaxtrain.run` or jaxtrain.Trainer, which share the work"
        )
