"""Metrics of the user's own in a Trainer give what the same code gives on torch's outputs of a whole split."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from jaxtrain import Trainer, TrainingConfig, UserError, WholeSplit
from torch_bridge.torchvision_operators import declare_torchvision

pytestmark = pytest.mark.slow

CLASSES = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Linear(6, CLASSES)

    def forward(self, x):
        return {"logits": self.layers(x)}


def split(count: int, seed: int):
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 6, generator=draw), torch.randint(0, CLASSES, (count,), generator=draw)
    return [{"x": row, "y": label} for row, label in zip(x, y, strict=True)]


class IgnoresClassThree(nn.Module):
    """Cross-entropy without the rows of class 3 and those that torch ignores anyway."""

    def __init__(self):
        super().__init__()
        self.entropy = nn.CrossEntropyLoss(ignore_index=3)

    def forward(self, output, target):
        return self.entropy(output, torch.where(target < 0, 3, target))


TRAIN, VALIDATION = split(32, 0), split(28, 1)  # the last batch of an evaluation has 4 rows


def trainer(folder, metrics=None, validation=VALIDATION, metric="loss", mode="min", **given) -> Trainer:
    config = TrainingConfig(
        run={"dir": str(folder), "quiet": True},
        data={"batch_size": 8},
        train={"steps": 2},
        evaluation={"metric": metric, "mode": mode},
        tracking={"tensorboard": False},
    )
    return Trainer(Net(), TRAIN, validation, config, loss=nn.CrossEntropyLoss(), metrics=metrics, **given)


def whole():
    x = torch.stack([item["x"] for item in VALIDATION])
    return Net()(x)["logits"].detach(), torch.stack([item["y"] for item in VALIDATION])


def margin(outputs, batch):
    """torch's own: topk and a boolean index, per row."""
    first, second = outputs.logits.topk(2, -1).values.unbind(-1)
    gap = first - second
    gap[gap < 0.1] = 0.0
    return gap


def test_functions_of_a_batch_in_torch_and_jax_numpy(tmp_path):
    metrics = {
        "margin": margin,
        "spread": lambda outputs, batch: outputs["logits"].std(),  # unbiased, as torch's
        "nll": lambda outputs, batch: F.cross_entropy(outputs.logits, batch["y"], reduction="none"),
        "norm": lambda outputs, batch: jnp.sqrt(jnp.sum(outputs["logits"] ** 2, -1)),
    }
    found = trainer(tmp_path, metrics).evaluate()
    logits, labels = whole()
    gap = margin(type("", (), {"logits": logits.clone()}), None)
    batches = logits.split(8)
    wanted = {
        "margin": gap.mean(),
        "spread": sum(part.std() * len(part) for part in batches) / len(logits),
        "nll": F.cross_entropy(logits, labels),
        "norm": logits.norm(dim=-1).mean(),
    }
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value.item(), rel=1e-5), name


def test_torchmetrics_and_functions_of_the_whole_split(tmp_path):
    declare_torchvision()
    torchmetrics = pytest.importorskip("torchmetrics")
    from sklearn.metrics import f1_score

    multiclass = {"task": "multiclass", "num_classes": CLASSES}
    second = lambda outputs, batch: (outputs.logits[:, :2].argmax(-1), batch["y"] % 2)
    metrics = {
        "precision": torchmetrics.Precision(**multiclass, average="macro"),
        "both": torchmetrics.MetricCollection([torchmetrics.Accuracy(**multiclass), torchmetrics.AUROC(**multiclass)]),
        "pair": (torchmetrics.Accuracy(task="binary"), second),
        "f1": WholeSplit(lambda outputs, batch: f1_score(batch["y"], outputs.logits.argmax(-1), average="macro")),
    }
    run = trainer(tmp_path, metrics)
    found, again = run.evaluate(), run.evaluate()
    logits, labels = whole()
    assert found == again
    assert found["f1"] == pytest.approx(f1_score(labels, logits.argmax(-1), average="macro"))
    assert found["both/MulticlassAUROC"] == pytest.approx(
        torchmetrics.AUROC(**multiclass)(logits, labels).item(), rel=1e-5
    )
    precision = torchmetrics.Precision(**multiclass, average="macro")(logits, labels).item()
    assert found["precision"] == pytest.approx(precision)
    assert found["pair"] == pytest.approx((logits[:, :2].argmax(-1) == labels % 2).float().mean().item())


def test_compute_metrics_of_transformers(tmp_path):
    def compute_metrics(prediction):
        logits, labels = prediction
        assert prediction.predictions is logits
        assert prediction.label_ids is labels
        return {"exact": float(np.mean(logits.argmax(-1) == labels)), "count": len(labels)}

    found = trainer(tmp_path, compute_metrics=compute_metrics).evaluate()
    logits, labels = whole()
    assert found["exact"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())
    assert found["count"] == 28


def test_a_metric_decides_what_is_best(tmp_path):
    run = trainer(tmp_path, {"margin": margin}, metric="margin", mode="max")
    history = run.train()
    assert [metrics["margin"] for metrics in history["val_history"]] == [run.evaluate()["margin"]]
    assert '"margin"' in (tmp_path / "summary.json").read_text()


def test_what_is_wrong_is_told_before_the_first_step(tmp_path):
    refused = {
        "evaluation.metric: margn is unknown; this task has loss, accuracy, margin; did you mean margin": (
            {"margin": margin},
            {"metric": "margn"},
        ),
        r"metrics: wide returned shape \[2, 4\] for a batch of 2 rows": ({"wide": lambda o, b: o.logits}, {}),
        "metrics: `loss` is the loss's own name": ({"loss": margin}, {}),
        "metrics: name is str, wanted a function": ({"name": "accuracy"}, {}),
        "metrics: silent returned None, wanted a scalar": ({"silent": lambda outputs, batch: None}, {}),
    }
    for sentence, (metrics, options) in refused.items():
        with pytest.raises(UserError, match=sentence):
            trainer(tmp_path, metrics, **options)


def test_a_metric_that_raises_is_named(tmp_path):
    def broken(outputs, batch):
        raise ZeroDivisionError("no rows")

    with pytest.raises(UserError, match="metrics: broken raised ZeroDivisionError: no rows"):
        trainer(tmp_path, {"broken": broken}).evaluate()


def test_accuracy_leaves_out_the_rows_that_the_loss_ignores(tmp_path):
    right = whole()[0].argmax(-1)
    ignored = [-100, 3]  # torch's own ignore_index, and this loss's
    rows = [
        {"x": item["x"], "y": torch.tensor(ignored[i % 4]) if i % 4 < 2 else right[i]}
        for i, item in enumerate(VALIDATION)
    ]
    counted = [int(row["y"]) for row in rows if int(row["y"]) not in ignored]
    assert 0 < len(counted) < len(rows)
    run = Trainer(
        Net(),
        rows,
        rows,
        TrainingConfig(run={"dir": str(tmp_path), "quiet": True}, data={"batch_size": 8}, train={"steps": 1}),
        loss=IgnoresClassThree(),
    )
    assert run.evaluate()["accuracy"] == 1.0
