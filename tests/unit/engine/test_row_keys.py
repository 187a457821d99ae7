"""Entries of a dataset that bear the names of the loader's own, `valid` and `index`."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain import Trainer, TrainingConfig
from jaxtrain.data import row_keys
from jaxtrain.data.index_stream import IndexStream
from jaxtrain.data.loader import Loader
from jaxtrain.data.row_keys import gather
from jaxtrain.data.sources import ArraySource
from jaxtrain.errors import UserError
from jaxtrain.task import Loss, Task


class Net(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.zeros(()))


COLUMNS = {"x": np.arange(6.0), "valid": np.arange(6) % 2 == 0, "index": np.arange(100, 106)}
ITEMS = [{name: column[i] for name, column in COLUMNS.items()} for i in range(6)]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("source", [ITEMS, ArraySource(COLUMNS)], ids=["items", "arrays"])
def test_the_datasets_own_entries_keep_their_names_and_padding_is_still_known(source, on_device):
    if on_device and isinstance(source, list):
        pytest.skip("items do not live on the device")
    loader = Loader(source, IndexStream(6, 4, shuffle=False), None, np.arange(4), on_device=on_device)
    batch = loader.host_batch(1)
    batch = gather(batch, source.columns) if on_device else batch
    assert batch["valid"].tolist() == [True, False, True, True]
    assert batch["index"].tolist() == [104, 105, 104, 104]
    assert row_keys.valid(batch).tolist() == [True, True, False, False]
    assert row_keys.index(batch).tolist() == [4, 5, 4, 4]
    assert list(row_keys.without(batch)) == list(COLUMNS)


def test_one_entry_may_be_taken_and_the_other_not():
    batch = Loader(ArraySource({"valid": np.arange(4)}), IndexStream(4, 4, shuffle=False), None, np.arange(4))
    batch = batch.host_batch(0)
    assert batch["valid"].tolist() == row_keys.index(batch).tolist() == batch["index"].tolist() == [0, 1, 2, 3]
    assert row_keys.valid(batch).all()
    assert list(row_keys.without(batch)) == ["valid"]


def test_a_task_which_reads_the_loaders_entries_by_name_refuses_the_datasets(tmp_path):
    task = Task(build_model=lambda config, rngs: None, loss=lambda m, b, c, r: Loss((m.w[...] - b["x"]).mean(), 1.0))
    config = TrainingConfig(
        run={"dir": str(tmp_path), "quiet": True}, data={"batch_size": 8}, train={"steps": 1}
    )  # fmt: skip
    with pytest.raises(UserError, match="the dataset has an entry `valid`"):
        Trainer(Net(), {"x": np.arange(8.0), "valid": np.ones(8, bool)}, None, config, task=task).train()


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x, valid):
        return self.weight * valid.float() + x


class Labelled(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return {"name": f"{i}.png", "x": torch.tensor(float(i)), "valid": torch.tensor(i % 2), "y": torch.tensor(0.0)}


def test_a_torch_module_gets_the_datasets_entry_and_no_strings(tmp_path):
    module = TorchNet()
    config = TrainingConfig(
        run={"dir": str(tmp_path), "quiet": True}, data={"batch_size": 8, "shuffle": False}, train={"epochs": 1},
        optim={"name": "sgd", "lr": 0.1, "weight_decay": 0, "clip_norm": None, "schedule": {"name": "constant"}},
    )  # fmt: skip
    Trainer(module, Labelled(), None, config, loss=torch.nn.MSELoss()).train()
    twin, batches = TorchNet(), torch.utils.data.DataLoader(Labelled(), 8)
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(twin(batch["x"], batch["valid"]), batch["y"]).backward()
        optimizer.step()
    assert float(module.weight.detach()) == pytest.approx(float(twin.weight.detach()), rel=1e-6)
