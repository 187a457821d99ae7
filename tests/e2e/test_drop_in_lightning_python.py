"""Lightning modules whose steps and hooks keep values in Python: the numbers are Lightning's, in one program or not."""

import copy
import time

import numpy as np
import pytest
import torch

from tests.e2e import test_drop_in_lightning as base
from tests.e2e.test_drop_in_lightning import Classifier, F, Metrics, assert_same, loader, logged

pytestmark = pytest.mark.slow

ours = base.ours


class Returns(Classifier):
    """Hands more than the loss to its hook."""

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "predicted": logits.argmax(1), "name": "train"}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["name"] == "train"
        self.log("seen", outputs["predicted"].float().mean() + outputs["loss"])


class ReadsItem(Classifier):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("item", loss.item())
        return loss


class Averages(Classifier):
    """A buffer assigned anew, and averaged weights moved by a hook through `.data`."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.mean = 0.9 * self.mean + 0.1 * batch[0].mean(0)
        hidden = self.body(batch[0] - self.mean)
        return F.cross_entropy(self.head(hidden), batch[1]) + F.mse_loss(self.head(hidden), self.teacher(hidden))

    def on_train_batch_end(self, *_):
        for mine, own in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            mine.data.mul_(0.9).add_(own.data, alpha=0.1)


class Names(Classifier):
    """What is logged, and under which name, depends on the batch's size and on attributes that hooks set."""

    def __init__(self):
        super().__init__()
        self.stage, self.round = "warm", 0

    def on_train_epoch_start(self):
        self.stage, self.round = ("warm", "cold")[self.current_epoch % 2], self.current_epoch % 2

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log(self.stage, loss, on_step=True, on_epoch=True, batch_size=len(batch[0]))
        self.log(f"round{self.round}", loss, on_epoch=True, batch_size=batch[0].size(0))
        return {"loss": loss, "rows": batch[0].shape[0], "stage": self.stage}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert type(outputs["rows"]) is int
        assert outputs["stage"] == self.stage
        self.log("rows", float(outputs["rows"]))


class UsesLogger(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.logger.log_metrics({"own": loss}, step=self.global_step)
        if batch_idx % 2:
            self.trainer.logger.experiment.log_metrics({"odd": batch_idx}, self.global_step)
        return loss


def with_texts(samples):
    """A batch of tensors, texts and numbers of Python's, none of them the same in the next batch."""
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    names = [f"{float(row.sum()):.3f}.png" for row in x]
    return {"x": x, "y": y, "names": names, "kind": "odd" if len(names) < 8 else "full", "share": len(names) / 8}


class Texts(Classifier):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["x"]), batch["y"]) * (2 if batch["kind"] == "odd" else batch["share"])
        self.log("train_loss", loss, batch_size=len(batch["names"]))
        return {"loss": loss, "names": batch["names"]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["names"] == batch["names"]


class ReadsTexts(Classifier):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch["x"]), batch["y"]) * float(batch["names"][0].removesuffix(".png"))


class AsksForTypes(Classifier):
    """The number of a batch, and what Python computes of it, are numbers."""

    def training_step(self, batch, batch_idx):
        plain = isinstance(batch_idx, int) and type(batch_idx) is int and isinstance(batch_idx / 2, float)
        self.log("number", batch_idx)
        return super().training_step(batch, batch_idx) * (1 + batch_idx / 10) * (1 if plain else 100)


class Collects(Classifier):
    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("mean_loss", torch.stack(self.losses).mean())
        self.losses.clear()


class Counts(Collects):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + 0.1 * len(self.losses))


class Skips(Classifier):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class AsksForEach(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * float(batch_idx)


class UsesMetric(Metrics):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.acc(self(batch[0]), batch[1]))


class WithLbfgs(Classifier):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=1e-3, max_iter=2)


def compare(kind, folder, monkeypatch) -> list[str]:
    """Train under both; why ours left whole steps, if it did."""
    reasons: list[str] = []
    go_apart = ours.Trainer.go_apart
    keep = lambda trainer, module, reason: reasons.append(reason) or go_apart(trainer, module, reason)
    monkeypatch.setattr(ours.Trainer, "go_apart", keep)
    modules = {name: kind() for name in base.ENGINES}
    for name, module in modules.items():
        data = loader(8 if kind is Names else 5)
        if kind in (Texts, ReadsTexts):
            data = torch.utils.data.DataLoader(data.dataset, 8, collate_fn=with_texts)
        base.trainer(name, folder / name).fit(module, data, loader(32))
    assert_same(*modules.values())
    theirs, mine = (logged(folder / name) for name in base.ENGINES)
    assert len(theirs) == len(mine)
    for want, got in zip(theirs, mine, strict=True):
        assert got == pytest.approx(want, rel=1e-4, abs=1e-6)
    return reasons


@pytest.mark.parametrize(
    "kind", [Returns, ReadsItem, Averages, Names, UsesLogger, Texts, AsksForTypes, ReadsTexts, AsksForEach]
)
def test_a_step_with_further_values_stays_compiled(kind, tmp_path, monkeypatch):
    assert compare(kind, tmp_path, monkeypatch) == []


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Collects, "a container that it writes to grows from call to call"),
        (Counts, "a container that it writes to grows from call to call"),
        (Skips, "training_step returned NoneType"),
        (UsesMetric, "training_step computes with what a metric or logger returns"),
        (WithLbfgs, "LBFGS has no counterpart"),
    ],
)
def test_a_step_that_python_takes_part_in_runs_compiled_modules_and_says_why(kind, why, tmp_path, monkeypatch):
    reasons = compare(kind, tmp_path, monkeypatch)
    assert len(reasons) == 1
    assert why in reasons[0]


class TimesItself(Classifier):
    def training_step(self, batch, batch_idx):
        self.logger.log_metrics({"clock": time.perf_counter()}, step=self.global_step)
        return super().training_step(batch, batch_idx)


def test_a_clock_goes_on_where_the_logger_gets_it(tmp_path):
    base.trainer("jaxtrain", tmp_path, max_epochs=1).fit(TimesItself(), loader(16))
    clocks = [row["clock"] for row in logged(tmp_path) if "clock" in row]
    assert len(set(clocks)) == len(clocks) == 4


class Noisy(torch.utils.data.Dataset):
    """Draws from a generator of its own, and counts what it has given."""

    def __init__(self):
        self.given, self.generator = [], np.random.default_rng(0)

    def __len__(self):
        return 16

    def __getitem__(self, index):
        self.given.append(index)
        return torch.as_tensor(self.generator.normal(size=6), dtype=torch.float32), index % 3


def test_a_data_set_with_generators_of_its_own_gives_what_lightning_gets(tmp_path):
    modules, given = [], []
    for name in base.ENGINES:
        data, module = Noisy(), Classifier()
        part = torch.utils.data.Subset(data, range(12))
        base.trainer(name, tmp_path / name, max_epochs=2).fit(module, torch.utils.data.DataLoader(part, 4))
        modules.append(module)
        given.append(data.given)
    assert given[0] == given[1]
    assert_same(*modules)
