"""train.overfit_batches and train.fast_dev_run."""

import numpy as np
import pytest
import torch
from torch import nn

from jaxtrain import Trainer, TrainingConfig, UserError

ROWS = 8


class Seen(torch.utils.data.Dataset):
    """Remembers which samples were read."""

    def __init__(self, count: int = 40):
        draw = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(count, 3, generator=draw), torch.randn(count, 1, generator=draw)
        self.read: list[int] = []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.read.append(index)
        return {"x": self.x[index], "y": self.y[index]}


def trainer(folder, dataset, validation=None, **train) -> Trainer:
    torch.manual_seed(0)
    config = TrainingConfig(
        run={"dir": str(folder), "quiet": True},
        data={"batch_size": ROWS},
        train=train,
        optim={"lr": 0.05, "schedule": {"name": "constant"}},
        tracking={"tensorboard": False},
    )
    return Trainer(nn.Linear(3, 1), dataset, validation, config, loss=nn.MSELoss())


def test_overfitting_trains_and_evaluates_on_the_first_batches_alone(tmp_path):
    dataset, validation = Seen(), Seen()
    run = trainer(tmp_path, dataset, validation, overfit_batches=2, epochs=3)
    dataset.read.clear()
    validation.read.clear()
    run.train()
    assert run.total_steps == 6
    assert set(dataset.read) == set(range(2 * ROWS))
    assert validation.read == []
    with torch.no_grad():
        wanted = nn.MSELoss()(run.user_model(dataset.x[: 2 * ROWS]), dataset.y[: 2 * ROWS]).item()
    assert run.evaluate()["loss"] == pytest.approx(wanted, rel=1e-5)


def test_an_iterable_dataset_cannot_be_overfitted(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([{"x": torch.ones(3), "y": torch.ones(1)}] * 16)

    with pytest.raises(UserError, match="train.overfit_batches: an iterable dataset"):
        trainer(tmp_path, Stream(), overfit_batches=1, steps=2)


def test_a_rehearsal_takes_one_batch_of_everything_and_keeps_nothing(tmp_path):
    dataset, validation = Seen(), Seen()
    run = trainer(tmp_path / "run", dataset, validation, fast_dev_run=True, epochs=30)
    validation.read.clear()
    before = {name: value.clone() for name, value in run.user_model.state_dict().items()}
    history = run.train()
    assert len(history["val_history"]) == 1
    assert run.total_steps == 1
    assert not (tmp_path / "run").exists()
    assert len(set(validation.read)) == ROWS
    for name, value in run.user_model.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


def test_each_epoch_of_a_run_without_validation_data_is_a_line(tmp_path):
    history = trainer(tmp_path / "run", Seen(), epochs=3).train()
    lines = [line for line in (tmp_path / "run/train.log").read_text().splitlines() if "train loss" in line]
    assert [line.partition("epoch ")[2].split("  ")[0] for line in lines] == ["1", "2", "3"]
    for line, means in zip(lines, history["train_history"], strict=True):
        assert line.endswith(f"train loss {means['loss']:.4f}")
