"""Class ids of the integer types that torch trains, and validation streams that give nothing."""

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from jaxtrain import Trainer, TrainingConfig, UserError


def first_loss(folder, net, x, y, loss) -> float:
    config = TrainingConfig(
        max_steps=1,
        data={"batch_size": len(x), "shuffle": False},
        run={"dir": str(folder), "quiet": True},
        checkpoint={"export": False},
    )
    return Trainer(net, TensorDataset(x, y), None, config, loss=loss).train()["train_history"][0]["loss"]


CLASSES = torch.arange(8) % 4
MAPS = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Unflatten(1, (4, 2, 2)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
@pytest.mark.parametrize(
    ("net", "classes", "loss"),
    [
        (torch.nn.Linear(6, 4), CLASSES, torch.nn.CrossEntropyLoss(label_smoothing=0.1)),
        (torch.nn.Linear(6, 4), torch.where(CLASSES == 2, 255, CLASSES), torch.nn.CrossEntropyLoss(ignore_index=255)),
        (torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LogSoftmax(1)), CLASSES, torch.nn.NLLLoss()),
    ],
)
def test_class_ids_of_both_types_that_torch_takes_have_torchs_loss(dtype, net, classes, loss, tmp_path):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = loss(net(x), classes.to(dtype)).item()
    assert first_loss(tmp_path, net, x, classes.to(dtype), loss) == pytest.approx(expected, abs=1e-5)


def test_uint8_classes_in_a_function_of_the_batch_are_refused_with_what_to_write(tmp_path):
    loss = lambda output, batch: torch.nn.functional.cross_entropy(output, batch["1"])
    with pytest.raises(UserError, match=r"class ids of uint8.*write target\.long\(\)"):
        first_loss(tmp_path, torch.nn.Linear(6, 4), torch.randn(8, 6), CLASSES.to(torch.uint8), loss)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_class_ids_that_torch_refuses_are_refused_in_its_words(dtype, tmp_path):
    x, maps = torch.randn(8, 6), CLASSES.repeat(4).reshape(8, 2, 2).to(dtype)
    with pytest.raises(RuntimeError) as refused:
        torch.nn.functional.cross_entropy(MAPS(x), maps)
    with pytest.raises(UserError, match=str(refused.value)):
        first_loss(tmp_path, MAPS, x, maps, torch.nn.CrossEntropyLoss())


class ReadOnce(IterableDataset):
    """A stream whose iterator is made once, so that a second reading gives nothing."""

    def __init__(self, rows: int):
        self.rows = iter([(torch.ones(6), torch.tensor(1)) for _ in range(rows)])

    def __iter__(self):
        return self.rows


@pytest.mark.parametrize("rows", [0, 4])
def test_a_validation_stream_without_samples_is_called_so(rows, tmp_path):
    config = TrainingConfig(num_epochs=2, batch_size=8, run={"dir": str(tmp_path), "quiet": True})
    data = TensorDataset(torch.randn(8, 6), CLASSES)
    trainer = Trainer(torch.nn.Linear(6, 4), data, ReadOnce(rows), config, loss=torch.nn.CrossEntropyLoss())
    with pytest.raises(UserError, match="validation dataset gave no sample"):
        trainer.train()
