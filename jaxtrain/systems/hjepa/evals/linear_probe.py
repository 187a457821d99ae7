"""A linear classifier on frozen features, trained as in the original."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.nn import Activation, Linear, Sequential
from jaxtrain.nn.initializers import normal
from jaxtrain.nn.rows import pick
from jaxtrain.runtime.prng import key_of
from jaxtrain.systems.hjepa.regularizers import normalize


class LinearProbe(nnx.Module):
    """Linear probe: features [batch, token, width] or [batch, width] -> logits [batch, class].

    pooling: "mean", "max", "attention" (a softmax over tokens) or "cls", which takes the mean, as in the original.
    normalize: scale pooled features to length 1.
    """

    def __init__(
        self, input_dim: int, num_classes: int, pooling: str = "mean", normalize: bool = False, *, rngs: nnx.Rngs
    ):
        if pooling not in ("mean", "max", "attention", "cls"):
            raise ValueError(f"pooling={pooling!r} is unknown; known: mean, max, attention, cls")
        self.classifier = Linear(input_dim, num_classes, rngs=rngs)
        self.classifier.weight.set_value(normal(rngs.params(), (num_classes, input_dim), 0.01))
        self.classifier.bias.set_value(jnp.zeros(num_classes))
        hidden = input_dim // 4
        self.attention = (
            Sequential(Linear(input_dim, hidden, rngs=rngs), Activation(jax.nn.relu), Linear(hidden, 1, rngs=rngs))
            if pooling == "attention"
            else None
        )
        self.pooling = pooling
        self.normalize = normalize

    def __call__(self, features):
        x = self._pool(features)
        return self.classifier(normalize(x, 1e-12) if self.normalize else x)

    def _pool(self, x):
        if x.ndim < 3:
            return x
        if self.attention is not None:
            return (x * jax.nn.softmax(self.attention(x), axis=1)).sum(1)
        return x.max(1) if self.pooling == "max" else x.mean(1)

    def fit(
        self,
        features,
        labels,
        *,
        epochs: int = 100,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        scheduler_type: str = "cosine",
        batch_size: int = 256,
        shuffle: bool = True,
        seed: int = 42,
        validation=None,
    ) -> dict[str, list[float]]:
        """Train with SGD on cross-entropy, changing the probe in place.

        The rate follows a cosine to 0 over the epochs, or drops tenfold every third of them ("step").
        validation: (features, labels). Returns the history: train_loss, train_acc, val_loss, val_acc per epoch;
        accuracies in percent.
        """
        definition, params = nnx.split(self)
        velocity = jax.tree.map(jnp.zeros_like, params)
        step = _step(definition, momentum, weight_decay)
        features, labels = np.asarray(features, np.float32), np.asarray(labels, np.int32)
        history: dict[str, list[float]] = {"train_loss": [], "train_acc": [], "val_loss": [], "val_acc": []}
        for epoch in range(epochs):
            order = np.random.default_rng([seed, epoch]).permutation(len(labels)) if shuffle else np.arange(len(labels))
            rate, losses, hits = _rate(lr, epoch, epochs, scheduler_type), [], 0
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                params, velocity, loss, hit = step(params, velocity, features[rows], labels[rows], rate)
                losses.append(loss)
                hits += hit
            history["train_loss"].append(float(np.mean(losses)))
            history["train_acc"].append(100 * int(hits) / len(labels))
            if validation is not None:
                nnx.update(self, params)
                validated = self.evaluate(*validation, batch_size=batch_size)
                history["val_loss"].append(validated["loss"])
                history["val_acc"].append(validated["accuracy"])
        nnx.update(self, params)
        return history

    def evaluate(self, features, labels, top_k: tuple[int, ...] = (), batch_size: int = 256) -> dict:
        """Return loss (mean over batches), accuracy and top_k_accuracy in percent, and confusion_matrix as lists."""
        labels = np.asarray(labels)
        parts = np.arange(0, len(labels), batch_size)
        logits = np.concatenate([np.asarray(self(jnp.asarray(features[i : i + batch_size]))) for i in parts])
        losses = [
            float(cross_entropy(jnp.asarray(logits[i : i + batch_size]), labels[i : i + batch_size])) for i in parts
        ]
        ranked = np.argsort(-logits, axis=1, kind="stable")
        confusion = np.zeros((logits.shape[1],) * 2, int)
        np.add.at(confusion, (labels, ranked[:, 0]), 1)
        metrics: dict = {"loss": float(np.mean(losses)), "accuracy": 100 * float((ranked[:, 0] == labels).mean())}
        for k in top_k:
            if logits.shape[1] > 2:
                metrics[f"top_{k}_accuracy"] = 100 * float((ranked[:, :k] == labels[:, None]).any(1).mean())
        return metrics | {"confusion_matrix": confusion.tolist()}


def cross_entropy(logits, labels):
    """Return the mean cross-entropy over rows, in nats."""
    return -pick(jax.nn.log_softmax(logits), jnp.asarray(labels)).mean()


def _rate(lr: float, epoch: int, epochs: int, kind: str) -> float:
    if kind == "cosine":
        return 0.5 * lr * (1 + math.cos(math.pi * epoch / epochs))
    if kind == "step":
        return lr * 0.1 ** (epoch // max(1, epochs // 3))
    raise ValueError(f"scheduler_type={kind!r} is unknown; known: cosine, step")


@functools.lru_cache(maxsize=8)
def _step(definition, momentum: float, weight_decay: float):
    """Return a function for one SGD update by torch's rule: velocity = momentum * velocity + gradient."""

    @jax.jit
    def step(params, velocity, x, y, rate):
        def value(params):
            logits = nnx.merge(definition, params)(x)
            return cross_entropy(logits, y), (logits.argmax(1) == y).sum()

        (loss, hits), grads = jax.value_and_grad(value, has_aux=True)(params)
        grads = jax.tree.map(lambda g, p: g + weight_decay * p, grads, params)
        velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, grads)
        return jax.tree.map(lambda p, v: p - rate * v, params, velocity), velocity, loss, hits

    return step


def k_fold(features, labels, num_classes: int, folds: int = 5, seed: int = 42, **options) -> dict[str, float]:
    """Return mean and std of the accuracy in percent of a fresh probe on each held-out fold.

    options: arguments of `LinearProbe.fit`.
    """
    from sklearn.model_selection import KFold

    scores = []
    for train, test in KFold(folds, shuffle=True, random_state=seed).split(features):
        probe = LinearProbe(features.shape[-1], num_classes, rngs=nnx.Rngs(key_of(seed)))
        probe.fit(features[train], labels[train], **options)
        scores.append(probe.evaluate(features[test], labels[test])["accuracy"])
    return {"accuracy_mean": float(np.mean(scores)), "accuracy_std": float(np.std(scores))}
