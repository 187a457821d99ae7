"""The original's evaluations on other data: fine-tuning with a classifier on top, and few-shot classification."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.original.features import pool_tokens
from jaxtrain.systems.hjepa.original.linear_probes import run_epoch, schedule_of
from jaxtrain.systems.hjepa.original.torch_checkpoint import available


class TransferHead(nn.Module):
    """Classifier of pooled features: Linear, ReLU and Dropout for each of hidden_dims, then Linear to the classes."""

    def __init__(
        self,
        input_dim: int,
        num_classes: int,
        hidden_dims: Sequence[int] = (),
        dropout: float = 0.0,
        pooling: str = "mean",
    ):
        super().__init__()
        if pooling not in ("mean", "max", "cls"):
            raise UserError(f"pooling={pooling!r} is unknown; known: mean, max, cls")
        self.pooling = pooling
        layers, width = [], input_dim
        for hidden in hidden_dims:
            layers += [nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(dropout)]
            width = hidden
        self.mlp = nn.Sequential(*layers, nn.Linear(width, num_classes))

    def pool_features(self, features):
        """Return [batch, width] from features [batch, token, width]; features without tokens pass through."""
        return pool_tokens(features, self.pooling)

    def forward(self, features):
        return self.mlp(self.pool_features(features))


class FineTuneEvaluator:
    """A TransferHead, `classifier`, trained on the features of one level, with or without the model under it.

    freeze_encoder=False trains the target encoder and the level's projection, too, at a tenth of the rate, and changes
    `model`. The original means to and does not: its features carry no gradient.
    """

    def __init__(
        self,
        model: Any,
        num_classes: int,
        hierarchy_level: int = 0,
        freeze_encoder: bool = False,
        hidden_dims: Sequence[int] = (),
        dropout: float = 0.0,
        device: str = "cuda",
    ):
        self.device, self.hierarchy_level, self.freeze_encoder = available(device), hierarchy_level, freeze_encoder
        self.model = model.to(self.device)
        self.classifier = TransferHead(model.embed_dim, num_classes, hidden_dims, dropout).to(self.device)
        for parameter in self._parameters():
            parameter.requires_grad_(True)

    def _parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the model that are trained."""
        if self.freeze_encoder:
            return []
        parts = (self._encoder, self.model.hierarchy_projections[self.hierarchy_level])
        return [parameter for part in parts for parameter in part.parameters()]

    @property
    def _encoder(self) -> Any:
        return self.model.context_encoder if self.model.target_encoder is None else self.model.target_encoder

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, class] of images."""
        images, level = images.to(self.device), self.hierarchy_level
        if self.freeze_encoder:
            return self.classifier(self.model.extract_features(images, level=level))
        return self.classifier(self.model.level_features(self._encoder.vit(images)[:, 1:], level))

    __call__ = forward

    def train_epoch(
        self,
        train_loader: Iterable,
        optimizer: torch.optim.Optimizer,
        criterion: nn.Module,
        epoch: int,
        verbose: bool = True,
    ) -> dict[str, float]:
        """Train for one epoch; return loss (mean over batches) and accuracy in percent. epoch: for the line printed."""
        self.model.train(not self.freeze_encoder)
        return self._epoch(train_loader, criterion, optimizer, f"epoch {epoch + 1}" if verbose else "")

    def evaluate(self, test_loader: Iterable, criterion: nn.Module, verbose: bool = True) -> dict[str, float]:
        """Return loss (mean over batches) and accuracy in percent."""
        self.model.eval()
        return self._epoch(test_loader, criterion, None, "test" if verbose else "")

    def _epoch(self, loader: Iterable, criterion: nn.Module, optimizer: Any, label: str) -> dict[str, float]:
        self.classifier.train(optimizer is not None)
        rows = run_epoch(self.forward, loader, criterion, self.device, optimizer)
        if label:
            print(f"{label}: loss {rows.loss:.4f}, accuracy {rows.accuracy:.2f} %")
        return {"loss": rows.loss, "accuracy": rows.accuracy}

    def fine_tune(
        self,
        train_loader: Iterable,
        val_loader: Iterable | None = None,
        epochs: int = 50,
        lr: float = 1e-3,
        weight_decay: float = 1e-4,
        scheduler_type: str = "cosine",
        verbose: bool = True,
    ) -> dict[str, list[float]]:
        """Train by AdamW; return train_loss, train_acc and, with val_loader, val_loss and val_acc, one per epoch."""
        groups: list[dict] = [{"params": list(self.classifier.parameters())}]
        if not self.freeze_encoder:
            groups.append({"params": self._parameters(), "lr": 0.1 * lr})
        optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay)
        schedule, criterion = schedule_of(scheduler_type, optimizer, epochs), nn.CrossEntropyLoss()
        history: dict[str, list[float]] = {}
        for epoch in range(epochs):
            results = {"train": self.train_epoch(train_loader, optimizer, criterion, epoch, verbose)}
            schedule.step()
            if val_loader is not None:
                results["val"] = self.evaluate(val_loader, criterion, verbose)
            for split, values in results.items():
                history.setdefault(f"{split}_loss", []).append(values["loss"])
                history.setdefault(f"{split}_acc", []).append(values["accuracy"])
        return history


def fine_tune_eval(
    model: Any,
    train_loader: Iterable,
    val_loader: Iterable,
    num_classes: int,
    hierarchy_level: int = 0,
    freeze_encoder: bool = False,
    epochs: int = 50,
    lr: float = 1e-3,
    device: str = "cuda",
    verbose: bool = True,
) -> dict[str, Any]:
    """Fine-tune and return the last epoch's loss and accuracy of val_loader, and `history`."""
    evaluator = FineTuneEvaluator(model, num_classes, hierarchy_level, freeze_encoder, device=device)
    history = evaluator.fine_tune(train_loader, val_loader, epochs, lr, verbose=verbose)
    return {"loss": history["val_loss"][-1], "accuracy": history["val_acc"][-1], "history": history}


class FewShotEvaluator:
    """Nearest class centroid of a few labelled images. Features are mean-pooled and scaled to length 1.

    Source: Snell et al. 2017 (prototypical networks), without training.
    """

    def __init__(self, model: Any, num_classes: int, hierarchy_level: int = 0, device: str = "cuda"):
        self.model, self.num_classes, self.hierarchy_level = model, num_classes, hierarchy_level
        self.device = available(device)

    def sample_few_shot_episodes(
        self, dataset: Any, n_way: int, k_shot: int, n_query: int, n_episodes: int
    ) -> list[dict[str, list]]:
        """Draw episodes from numpy's generator: {"classes", "support", "query"}, rows by class.

        Raises ValueError if fewer than n_way classes have k_shot + 1 rows; n_query is the most per class.
        """
        labels = _labels(dataset)
        rows = {label: np.flatnonzero(labels == label) for label in np.unique(labels)}
        rows = {label: members for label, members in rows.items() if len(members) > k_shot}
        if len(rows) < n_way:
            raise UserError(f"{len(rows)} classes have more than {k_shot} rows; n_way={n_way} needs as many")
        episodes = []
        for _ in range(n_episodes):
            classes = np.random.permutation(list(rows))[:n_way].tolist()
            drawn = [np.random.permutation(rows[label]).tolist() for label in classes]
            support, query = [one[:k_shot] for one in drawn], [one[k_shot : k_shot + n_query] for one in drawn]
            episodes.append({"classes": classes, "support": support, "query": query})
        return episodes

    def evaluate_episode(self, dataset: Any, episode: Mapping[str, list], metric: str = "cosine") -> float:
        """Return the accuracy in percent of the episode's queries. metric: cosine or euclidean."""
        if metric not in ("cosine", "euclidean"):
            raise UserError(f"metric={metric!r} is unknown; known: cosine, euclidean")
        centroids = torch.stack([self._embed(dataset, rows).mean(0) for rows in episode["support"]])
        queries = [self._embed(dataset, rows) for rows in episode["query"]]
        answers = torch.arange(len(queries)).repeat_interleave(torch.tensor([len(query) for query in queries]))
        distances = torch.cdist(torch.cat(queries), centroids)
        if metric == "cosine":
            distances = -torch.cat(queries) @ functional.normalize(centroids, dim=-1).T
        return 100 * float((distances.argmin(1).cpu() == answers).float().mean())

    @torch.no_grad()
    def _embed(self, dataset: Any, rows: Sequence[int]) -> torch.Tensor:
        images = torch.stack([torch.as_tensor(dataset[row][0]) for row in rows]).to(self.device)
        model = self.model.to(self.device).eval()
        return functional.normalize(model.extract_features(images, level=self.hierarchy_level).mean(1), dim=-1)

    def evaluate_few_shot(
        self,
        dataset: Any,
        n_way: int = 5,
        k_shot: int = 5,
        n_query: int = 15,
        n_episodes: int = 100,
        verbose: bool = True,
    ) -> dict[str, float]:
        """Return mean_accuracy, std_accuracy and confidence_interval (1.96 standard errors), in percent."""
        episodes = self.sample_few_shot_episodes(dataset, n_way, k_shot, n_query, n_episodes)
        scores = [self.evaluate_episode(dataset, episode) for episode in episodes]
        mean, deviation = float(np.mean(scores)), float(np.std(scores))
        interval = 1.96 * deviation / np.sqrt(n_episodes)
        if verbose:
            print(f"{n_way}-way {k_shot}-shot: {mean:.2f} +- {interval:.2f} %")
        return {"mean_accuracy": mean, "std_accuracy": deviation, "confidence_interval": float(interval)}


def _labels(dataset: Any) -> np.ndarray:
    for name in ("targets", "labels"):
        if hasattr(dataset, name):
            return np.asarray(getattr(dataset, name))
    return np.array([int(dataset[row][1]) for row in range(len(dataset))])


def few_shot_eval(
    model: nn.Module,
    dataset: Any,
    num_classes: int,
    n_way: int = 5,
    k_shot_list: Sequence[int] = (1, 5, 10),
    n_episodes: int = 100,
    hierarchy_level: int = 0,
    device: str = "cuda",
    verbose: bool = True,
) -> dict[str, dict[str, float]]:
    """Return FewShotEvaluator.evaluate_few_shot of each k as {"1_shot": ..., "5_shot": ...}."""
    evaluator = FewShotEvaluator(model, num_classes, hierarchy_level, device)
    options = {"n_episodes": n_episodes, "verbose": verbose}
    return {f"{k}_shot": evaluator.evaluate_few_shot(dataset, n_way, k, **options) for k in k_shot_list}
