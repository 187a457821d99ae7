"""The original's training and evaluation of a linear probe."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.original.features import LinearProbe, extract_features
from jaxtrain.systems.hjepa.original.torch_checkpoint import available


class Epoch:
    """Sums over the batches of an epoch: loss (mean over batches), accuracies in percent, confusion matrix."""

    def __init__(self, top_k: int = 1):
        self.top_k, self.losses, self.rows, self.hits, self.top = top_k, [], 0, 0, 0
        self.pairs: list[np.ndarray] = []

    def add(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.losses.append(loss.item())
        ranked = logits.topk(self.top_k, dim=1).indices
        self.rows += len(labels)
        self.hits += int((ranked[:, 0] == labels).sum())
        self.top += int((ranked == labels[:, None]).any(1).sum())
        self.pairs.append(torch.stack([labels, ranked[:, 0]]).cpu().numpy())

    @property
    def loss(self) -> float:
        return float(np.mean(self.losses))

    @property
    def accuracy(self) -> float:
        return 100 * self.hits / self.rows

    def confusion(self, classes: int) -> np.ndarray:
        matrix = np.zeros((classes, classes), int)
        np.add.at(matrix, tuple(np.concatenate(self.pairs, axis=1)), 1)
        return matrix


def run_epoch(
    logits_of: Callable, loader: Iterable, criterion: Callable, device: Any, optimizer: Any = None, top_k: int = 1
) -> Epoch:
    """Run a classifier over a loader of (images, labels), and update it after each batch if there is an optimizer."""
    epoch = Epoch(top_k)
    with torch.set_grad_enabled(optimizer is not None):
        for images, labels in loader:
            labels = torch.as_tensor(labels, device=device)
            logits = logits_of(images.to(device))
            loss = criterion(logits, labels)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            epoch.add(loss.detach(), logits.detach(), labels)
    if not epoch.rows:
        raise UserError("the loader is empty; check its Dataset, batch size and drop_last")
    return epoch


def schedule_of(kind: str, optimizer: torch.optim.Optimizer, epochs: int) -> Any:
    if kind == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    if kind == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, max(1, epochs // 3), 0.1)
    raise UserError(f"scheduler_type={kind!r} is unknown; known: cosine, step")


class LinearProbeEvaluator:
    """A LinearProbe, `probe`, on the frozen features of one level of `model`. input_dim: their width."""

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        input_dim: int,
        hierarchy_level: int = 0,
        pooling: str = "mean",
        normalize: bool = False,
        device: str = "cuda",
    ):
        self.device, self.hierarchy_level = available(device), hierarchy_level
        self.model: Any = model.to(self.device)
        self.probe = LinearProbe(input_dim, num_classes, pooling, normalize).to(self.device)

    def extract_features(
        self, dataloader: Iterable, desc: str = "Extracting features"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the target encoder's features [row, token, width] and labels [row]."""
        return extract_features(self.model, dataloader, self.hierarchy_level, self.device, desc=desc)

    def train_probe(
        self,
        train_loader: Iterable,
        val_loader: Iterable | None = None,
        epochs: int = 100,
        lr: float = 0.1,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        scheduler_type: str = "cosine",
        verbose: bool = True,
    ) -> dict[str, list[float]]:
        """Train the probe by SGD and return train_loss, train_acc and, with val_loader, val_loss and val_acc.

        One entry per epoch, accuracies in percent. scheduler_type: cosine, or step (a tenth after each third).
        """
        optimizer = torch.optim.SGD(self.probe.parameters(), lr, momentum, weight_decay=weight_decay)
        schedule = schedule_of(scheduler_type, optimizer, epochs)
        history: dict[str, list[float]] = {"train_loss": [], "train_acc": []}
        history |= {} if val_loader is None else {"val_loss": [], "val_acc": []}
        for epoch in range(epochs):
            self.probe.train()
            results = {"train": self._epoch(train_loader, optimizer)}
            schedule.step()
            if val_loader is not None:
                results["val"] = self._epoch(val_loader)
            for split, rows in results.items():
                history[f"{split}_loss"].append(rows.loss)
                history[f"{split}_acc"].append(rows.accuracy)
            if verbose:
                said = ", ".join(
                    f"{name} loss {rows.loss:.4f}, {rows.accuracy:.2f} %" for name, rows in results.items()
                )
                print(f"epoch {epoch + 1}/{epochs}: {said}")
        return history

    def _epoch(self, loader: Iterable, optimizer: torch.optim.Optimizer | None = None, top_k: int = 1) -> Epoch:
        self.model.eval()
        self.probe.train(optimizer is not None)
        return run_epoch(self._logits, loader, functional.cross_entropy, self.device, optimizer, top_k)

    def _logits(self, images: torch.Tensor) -> torch.Tensor:
        return self.probe(self.model.extract_features(images, level=self.hierarchy_level))

    def evaluate(
        self, dataloader: Iterable, compute_confusion: bool = False, top_k: int = 5, verbose: bool = True
    ) -> dict[str, Any]:
        """Return loss (mean over batches), accuracy and, for more than two classes, top_{k}_accuracy, in percent.

        compute_confusion: add confusion_matrix int [class, class], true classes first.
        """
        classes = self.probe.classifier.out_features
        top_k = min(top_k, classes)
        rows = self._epoch(dataloader, top_k=top_k)
        metrics: dict[str, Any] = {"loss": rows.loss, "accuracy": rows.accuracy}
        if classes > 2:
            metrics[f"top_{top_k}_accuracy"] = 100 * rows.top / rows.rows
        if verbose:
            print(", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        return metrics | ({"confusion_matrix": rows.confusion(classes)} if compute_confusion else {})

    def k_fold_cross_validation(
        self,
        dataset: Any,
        k_folds: int = 5,
        epochs: int = 100,
        batch_size: int = 256,
        lr: float = 0.1,
        num_workers: int = 4,
        verbose: bool = True,
    ) -> dict[str, Any]:
        """Return accuracy_mean, accuracy_std and fold_accuracies, in percent, of a fresh probe for each fold.

        Folds are scikit-learn's KFold(shuffle=True, random_state=42). The last fold's probe stays.
        """
        from sklearn.model_selection import KFold

        scores = []
        for train, test in KFold(k_folds, shuffle=True, random_state=42).split(range(len(dataset))):
            old, width = self.probe, self.probe.classifier.in_features
            self.probe = LinearProbe(width, old.classifier.out_features, old.pooling, old.normalize).to(self.device)
            options: dict[str, Any] = {"batch_size": batch_size, "num_workers": num_workers}
            train_loader = DataLoader(Subset(dataset, train.tolist()), shuffle=True, **options)
            self.train_probe(train_loader, epochs=epochs, lr=lr, verbose=False)
            scores.append(self._epoch(DataLoader(Subset(dataset, test.tolist()), **options)).accuracy)
            if verbose:
                print(f"fold {len(scores)}/{k_folds}: {scores[-1]:.2f} %")
        mean, deviation = float(np.mean(scores)), float(np.std(scores))
        return {"accuracy_mean": mean, "accuracy_std": deviation, "fold_accuracies": scores}


def linear_probe_eval(
    model: Any,
    train_loader: Iterable,
    val_loader: Iterable,
    num_classes: int,
    hierarchy_level: int = 0,
    epochs: int = 100,
    lr: float = 0.1,
    device: str = "cuda",
    verbose: bool = True,
) -> dict[str, Any]:
    """Train a LinearProbe on train_loader and return LinearProbeEvaluator.evaluate of val_loader."""
    evaluator = LinearProbeEvaluator(model, num_classes, model.embed_dim, hierarchy_level, device=device)
    evaluator.train_probe(train_loader, epochs=epochs, lr=lr, verbose=verbose)
    return evaluator.evaluate(val_loader, verbose=verbose)
