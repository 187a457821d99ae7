"""`from jaxtrain.lightning import Trainer`: Lightning's own loop, curves and checkpoints, the step compiled."""

import csv
import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from jaxtrain import UserError
from torch_bridge.torchvision_operators import declare_torchvision

declare_torchvision()
lightning = pytest.importorskip("lightning")
import torchmetrics  # noqa: E402
from lightning.pytorch import callbacks, loggers  # noqa: E402

import jaxtrain.lightning as ours  # noqa: E402

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
ENGINES = {"lightning": lightning.Trainer, "jaxtrain": ours.Trainer}
DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(50, 6, generator=DRAW), torch.randint(0, 3, (50,), generator=DRAW)


class Classifier(lightning.LightningModule):
    def __init__(self, lr: float = 1e-2, dropout: float = 0.0):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("progress", 0.1 * self.global_step)
        return loss * (1 + 0.01 * self.current_epoch)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log_dict({"val_loss": F.cross_entropy(self(x), y), "val_acc": (self(x).argmax(1) == y).float().mean()})

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(batch: int):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch)


def trainer(engine: str, folder, *more, **options):
    options = {"max_epochs": 3, "log_every_n_steps": 1} | options
    kept = callbacks.ModelCheckpoint(str(folder / "kept"), save_top_k=-1, monitor="val_loss")
    return ENGINES[engine](
        default_root_dir=str(folder), accelerator="cpu", devices=1, enable_progress_bar=False,
        enable_model_summary=False, logger=loggers.CSVLogger(str(folder), version=0),
        callbacks=[kept, *more], **options,
    )  # fmt: skip


def logged(folder) -> list[dict[str, float]]:
    with open(folder / "lightning_logs/version_0/metrics.csv") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def assert_same(theirs, mine) -> None:
    for (key, want), got in zip(theirs.state_dict().items(), mine.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}], ids=["plain", "more"]
)
def test_curves_metrics_and_files_are_lightnings(tmp_path, options):
    modules = {name: Classifier() for name in ENGINES}
    for name, module in modules.items():
        trainer(name, tmp_path / name, **options).fit(module, loader(8), loader(32))
    assert_same(*modules.values())
    theirs, mine = (logged(tmp_path / name) for name in ENGINES)
    assert [list(row) for row in mine] == [list(row) for row in theirs]
    for want, got in zip(theirs, mine, strict=True):
        np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=1e-4, atol=1e-6)
    kept = [sorted(path.name for path in (tmp_path / name / "kept").iterdir()) for name in ENGINES]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(("first", "second"), [("lightning", "jaxtrain"), ("jaxtrain", "lightning")])
def test_20_steps_on_each_side_are_40_of_lightnings(tmp_path, first, second):
    whole = Classifier()
    trainer("lightning", tmp_path / "whole", max_epochs=4).fit(whole, loader(5), loader(32))
    half = trainer(first, tmp_path / "half", max_epochs=2)
    half.fit(Classifier(), loader(5), loader(32))
    assert half.global_step == 20
    half.save_checkpoint(tmp_path / "half.ckpt")
    module = Classifier()
    rest = trainer(second, tmp_path / "rest", max_epochs=4)
    rest.fit(module, loader(5), loader(32), ckpt_path=tmp_path / "half.ckpt")
    assert rest.global_step == 40
    assert_same(whole, module)
    loaded = Classifier.load_from_checkpoint(tmp_path / "half.ckpt")
    assert loaded.hparams.lr == 1e-2


def test_a_resumed_run_with_dropout_has_the_bits_of_an_uninterrupted_one(tmp_path):
    whole, parts = Classifier(dropout=0.2), Classifier(dropout=0.2)
    trainer("jaxtrain", tmp_path / "whole", max_epochs=2).fit(whole, loader(8), loader(32))
    half = trainer("jaxtrain", tmp_path / "half", max_epochs=1)
    half.fit(Classifier(dropout=0.2), loader(8), loader(32))
    half.save_checkpoint(tmp_path / "half.ckpt")
    trainer("jaxtrain", tmp_path / "rest", max_epochs=2).fit(
        parts, loader(8), loader(32), ckpt_path=tmp_path / "half.ckpt"
    )
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))


class Unfreeze(callbacks.BaseFinetuning):
    """Transfer learning: the body joins after an epoch."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer, lr=1e-3)


class HeadOnly(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1)


def test_unfreezing_a_backbone_after_an_epoch(tmp_path):
    modules = {name: HeadOnly() for name in ENGINES}
    for name, module in modules.items():
        trainer(name, tmp_path / name, Unfreeze()).fit(module, loader(8), loader(32))
    assert_same(*modules.values())


class Manual(Classifier):
    """Two optimizers that take turns, as a GAN's."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1, momentum=0.9) for part in (self.body, self.head)]

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        self.toggle_optimizer(optimizer)
        loss = F.cross_entropy(self.head(self.body(batch[0])), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        self.log("train_loss", loss)


class ReadsGradients(Classifier):
    def on_before_optimizer_step(self, optimizer):
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm())


class ClipsByValue(Classifier):
    pass


@pytest.mark.parametrize("make", [Manual, ReadsGradients, ClipsByValue])
def test_a_step_that_cannot_be_one_program_trains_on_compiled_modules(tmp_path, make):
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"} if make is ClipsByValue else {}
    theirs, mine = make(), make()
    trainer("lightning", tmp_path / "a", **options).fit(theirs, loader(8), loader(32))
    trainer("jaxtrain", tmp_path / "b", **options).fit(mine, loader(8), loader(32))
    assert_same(theirs, mine)
    for want, got in zip(logged(tmp_path / "a"), logged(tmp_path / "b"), strict=True):
        assert got == pytest.approx(want, rel=1e-4, abs=1e-6)
    assert "forward" not in vars(mine.body)  # a plain module again


class UsesNumbers(Classifier):
    """Computes with the loop's numbers and branches on them."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * (1 + 0.1 * batch_idx / 7)
        if batch_idx % 3 == 0:
            self.log("third", loss)
        if self.current_epoch >= 1 and self.trainer.global_step < 12:
            loss = 0.5 * loss
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        self.log("below float32", (1 - (1 - 1e-9 * (batch_idx + 1))) * 1e9)
        return {"loss": loss / (1 - 0.999 ** (self.global_step + 1)) / 1000}


def test_numbers_of_the_loop_count_as_lightnings(tmp_path):
    modules = {name: UsesNumbers() for name in ENGINES}
    for name, module in modules.items():
        made = trainer(name, tmp_path / name)
        made.fit(module, loader(8), loader(32))
    assert_same(*modules.values())
    for want, got in zip(*(logged(tmp_path / name) for name in ENGINES), strict=True):
        assert got == pytest.approx(want, rel=1e-4, abs=1e-6)
    assert 1 <= len(made.fit_loop.epoch_loop.automatic_optimization.step.programs) <= 9


class Metrics(Classifier):
    """torchmetrics as members, in a collection and as functions."""

    def __init__(self):
        super().__init__()
        one = lambda name: torchmetrics.classification.__dict__[name](num_classes=3)
        self.acc = one("MulticlassAccuracy")
        self.more = torchmetrics.MetricCollection([one("MulticlassF1Score"), one("MulticlassPrecision")], prefix="m_")

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("acc", self.acc(logits, y), on_step=True)
        self.log("epoch_acc", self.acc, on_step=False, on_epoch=True)
        self.log_dict(self.more(logits, y))
        self.log("functional", torchmetrics.functional.accuracy(logits, y, "multiclass", num_classes=3))
        return F.cross_entropy(logits, y)


def test_metrics_of_torchmetrics_are_lightnings(tmp_path):
    for name in ENGINES:
        made = trainer(name, tmp_path / name)
        made.fit(Metrics(), loader(8), loader(32))
    graphs = made.fit_loop.epoch_loop.automatic_optimization.step.capture.graphs
    assert len(graphs) == 2  # one for each size of a batch: the metrics' counts ask for no other
    theirs, mine = (logged(tmp_path / name) for name in ENGINES)
    assert {"acc", "epoch_acc", "m_MulticlassF1Score", "functional"} <= {key for row in theirs for key in row}
    for want, got in zip(theirs, mine, strict=True):
        assert got == pytest.approx(want, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "why"), [({"detect_anomaly": True}, "detect_anomaly"), ({"precision": "64-true"}, "precision")]
)
def test_a_flag_without_counterpart_is_named_before_training(tmp_path, options, why):
    with pytest.raises(UserError, match=why):
        trainer("jaxtrain", tmp_path, **options)


class Sentences(torch.utils.data.Dataset):
    """Sequences of 3 to 40 numbers, padded with zeros to the longest of a batch."""

    def __len__(self):
        return 120

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        length = int(torch.randint(3, 41, (), generator=draw))
        return torch.randint(1, 9, (length,), generator=draw), index % 3


def padded(samples):
    ids = nn.utils.rnn.pad_sequence([ids for ids, _ in samples], batch_first=True)
    return [ids, torch.tensor([label for _, label in samples])]


class OverLengths(Classifier):
    """masked: padding does not enter the mean."""

    def __init__(self, masked: bool = True):
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.masked = masked

    def forward(self, ids):
        if ids.is_floating_point():
            return super().forward(ids)
        kept = (ids > 0).float()[..., None] if self.masked else torch.ones(*ids.shape, 1)
        return super().forward((self.table(ids) * kept).sum(1) / kept.sum(1))


@pytest.mark.slow
@pytest.mark.parametrize(("masked", "least", "most"), [(True, 1, 9), (False, 10, 36)], ids=["rounded", "exact"])
def test_batches_of_many_lengths_are_rounded_where_padding_changes_nothing(tmp_path, masked, least, most):
    modules = {name: OverLengths(masked) for name in ENGINES}
    for name, module in modules.items():
        made = trainer(name, tmp_path / name, max_epochs=2)
        data = torch.utils.data.DataLoader(Sentences(), 4, collate_fn=padded)
        made.fit(module, data, data)
    assert_same(*modules.values())
    assert least <= len(made.fit_loop.epoch_loop.automatic_optimization.step.programs) <= most
