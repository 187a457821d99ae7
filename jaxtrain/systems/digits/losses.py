"""Loss and metrics of the digits task."""

from jaxtrain.losses import cross_entropy
from jaxtrain.metrics import correct, ratio
from jaxtrain.task import Loss, Statistics


def loss(model, batch, config, rngs) -> Loss:
    """Return the cross-entropy in nats per digit."""
    logits = model(batch["image"], rngs=rngs)
    value, weight = cross_entropy(logits, batch["label"], batch["valid"])
    return Loss(value, weight)


def outputs(model, batch):
    """Return the logits [batch, 10]."""
    return model(batch["image"])


def eval_statistics(logits, batch, config) -> Statistics:
    return Statistics(sums={"correct": correct(logits, batch["label"], batch["valid"]), "count": batch["valid"].sum()})


def compute(sums, rows, config) -> dict[str, float]:
    return {"accuracy": ratio(sums["correct"], sums["count"])}
