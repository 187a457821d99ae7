"""What training_step reads and sets through self.trainer: as Lightning has it, in one program or with a line."""

import pytest
import torch

from tests.e2e import test_drop_in_lightning as base
from tests.e2e.test_drop_in_lightning import Classifier, F, loader

pytestmark = pytest.mark.slow

ours, pl = base.ours, pytest.importorskip("lightning.pytorch")


class Data(pl.LightningDataModule):
    classes, weight, seen = 3, 1.0, 0

    def train_dataloader(self):
        return loader(5)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


class Moves(pl.Callback):
    """Changes the datamodule between steps, and keeps what a step has left behind."""

    def __init__(self):
        self.kept = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        trainer.datamodule.weight += 1.0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        data, rate = trainer.datamodule, trainer.optimizers[0].param_groups[0]["lr"]
        labels = outputs["labels"].dtype if "labels" in outputs else None
        self.kept.append((float(outputs["loss"]), float(rate), data.seen, labels, trainer.should_stop))


class ReadsConstant(Classifier):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1]) / self.trainer.datamodule.classes
        return {"loss": loss * self.trainer.num_training_batches / self.trainer.max_epochs, "labels": batch[1]}


class ReadsLoader(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * len(self.trainer.train_dataloader)


class ReadsRate(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.lr_schedulers().get_last_lr()[0]


class SetsRate(Classifier):
    def training_step(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] = 0.01 * (self.global_step + 1)
        return super().training_step(batch, batch_idx)


class StepsSchedule(ReadsRate):
    def training_step(self, batch, batch_idx):
        self.lr_schedulers().step()
        return super().training_step(batch, batch_idx)


class Stops(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_step >= 2:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class ReadsMoving(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.trainer.datamodule.weight


class Leaves(Classifier):
    def training_step(self, batch, batch_idx):
        self.trainer.datamodule.seen = batch_idx
        return super().training_step(batch, batch_idx)


class Fetches(Classifier):
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return F.cross_entropy(self(batch[0]), batch[1])


def compare(kind, monkeypatch) -> list[str]:
    """Train under both; why ours left whole steps, if it did."""
    reasons: list[str] = []
    go_apart = ours.Trainer.go_apart
    keep = lambda trainer, module, reason: reasons.append(reason) or go_apart(trainer, module, reason)
    monkeypatch.setattr(ours.Trainer, "go_apart", keep)
    kept = []
    for engine in (pl.Trainer, ours.Trainer):
        torch.manual_seed(0)
        moves, quiet = Moves(), dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        trainer = engine(max_epochs=2, accelerator="cpu", callbacks=[moves], enable_model_summary=False, **quiet)
        trainer.fit(kind(), datamodule=Data())
        assert trainer.callbacks[0] is moves
        kept.append(moves.kept)
    assert len(kept[0]) == len(kept[1])
    for want, got in zip(*kept, strict=True):
        assert got[:2] == pytest.approx(want[:2], rel=1e-4)
        assert got[2:] == want[2:]
    return reasons


@pytest.mark.parametrize("kind", [ReadsConstant, ReadsRate, Stops, ReadsMoving, Leaves])
def test_what_a_step_reads_and_sets_of_the_trainer_is_lightnings_in_compiled_steps(kind, monkeypatch):
    assert compare(kind, monkeypatch) == []


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (SetsRate, "TorchDynamo fails on it"),
        (StepsSchedule, "calls LRScheduler.step, which TorchDynamo does not capture"),
        (ReadsLoader, "calls DataLoader.__len__, which TorchDynamo does not capture"),
        (Fetches, "takes dataloader_iter"),
    ],
)
def test_what_dynamo_does_not_capture_is_left_to_torch(kind, why, monkeypatch):
    reasons = compare(kind, monkeypatch)
    assert len(reasons) == 1
    assert why in reasons[0]
