"""Changes that a callback makes in the data between two epochs hold from the next one on, as in torch's own loop."""

import numpy as np
import pytest
import torch
from flax import nnx
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from jaxtrain import Trainer, TrainingConfig, UserError

TEN = torch.arange(10.0)


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(np.zeros((), np.float32))


class Shifted(Dataset):
    """Ten numbers, moved by a hundred times `shift`."""

    shift = 0

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return TEN[index] + 100 * self.shift


class ShiftedStream(IterableDataset):
    shift = 0

    def __len__(self):
        return 10

    def __iter__(self):
        return iter(TEN + 100 * self.shift)


class Shrinking(Dataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 10 - 4 * self.epoch

    def __getitem__(self, index):
        return TEN[index]


class AfterEpochs:
    """Calls `change(epoch)` after every epoch; `losses` has every step's mean of its batch."""

    def __init__(self, change):
        self.change, self.losses = change, []

    def on_step_end(self, trainer, step, metrics):
        self.losses.append(float(metrics["loss"]))

    def on_epoch_end(self, trainer, epoch):
        self.change(epoch)


def losses_of(folder, data, change, epochs=3):
    config = TrainingConfig(
        run={"dir": str(folder), "quiet": True},
        data={"batch_size": 5, "shuffle": False},
        shard={"devices": 1},
        train={"epochs": epochs, "steps_per_call": 4},
        optim={"name": "sgd", "lr": 0.0, "weight_decay": 0, "clip_norm": None, "schedule": {"name": "constant"}},
        evaluation={"every_epochs": None},
        tracking={"tensorboard": False},
    )
    seen = AfterEpochs(change)
    loss = lambda model, batch, rngs: batch["0"] + 0 * model.w[...]
    Trainer(Model(), data, None, config, loss=loss, callbacks=[seen]).train()
    return seen.losses


def in_torch(loader, change, epochs=3):
    means = []
    for epoch in range(1, epochs + 1):
        means += [float((batch[0] if isinstance(batch, list) else batch).mean()) for batch in loader]
        change(epoch)
    return means


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Shifted, ShiftedStream])
def test_an_attribute_of_the_dataset(kind, workers, tmp_path):
    own, torchs = kind(), kind()
    wanted = in_torch(DataLoader(torchs, 5), lambda epoch: setattr(torchs, "shift", epoch))
    loader = DataLoader(own, 5, num_workers=workers)
    assert losses_of(tmp_path, loader, lambda epoch: setattr(own, "shift", epoch)) == wanted


def test_a_tensor_in_place(tmp_path):
    own, torchs = TEN.clone(), TEN.clone()
    wanted = in_torch(DataLoader(TensorDataset(torchs), 5), lambda epoch: torchs.add_(epoch))
    assert losses_of(tmp_path, DataLoader(TensorDataset(own), 5), lambda epoch: own.add_(epoch)) == wanted


def test_columns_that_lie_on_the_device(tmp_path):
    columns = {"0": TEN.double().numpy().copy()}
    assert losses_of(tmp_path, columns, lambda epoch: columns["0"].__iadd__(10)) == [2, 7, 12, 17, 22, 27]


@pytest.mark.parametrize("seed", [None, 3])
def test_the_weights_of_a_sampler(seed, tmp_path):
    def parts():
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        sampler = WeightedRandomSampler([1.0] * 10, 10, generator=generator)
        change = lambda epoch: (sampler.weights.zero_(), sampler.weights[epoch : epoch + 1].fill_(1))
        return DataLoader(TensorDataset(TEN), 5, sampler=sampler), change

    wanted, found = in_torch(*parts()), losses_of(tmp_path, *parts())
    assert found[2:] == wanted[2:] == [1, 1, 2, 2]
    assert seed is None or found == pytest.approx(wanted)


def test_the_generator_of_a_sampler(tmp_path):
    def parts():
        generator = torch.Generator().manual_seed(0)
        loader = DataLoader(TensorDataset(TEN), 5, shuffle=True, generator=generator)
        return loader, lambda epoch: generator.manual_seed(epoch)

    assert losses_of(tmp_path, *parts()) == pytest.approx(in_torch(*parts()))


def test_another_length_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"len\(Shrinking\) is 6 in epoch 1, and was 10 before the run"):
        losses_of(tmp_path, DataLoader(Shrinking(), 5), lambda epoch: None)
    columns = {"0": TEN.numpy()}
    with pytest.raises(UserError, match="the train data had 10 samples as the run began"):
        losses_of(tmp_path / "columns", columns, lambda epoch: columns.update({"0": TEN[:6].numpy()}))
