"""float64 buffers: exact where training leaves them alone; told where it changes them in float32."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import jaxtrain
from jaxtrain import Trainer, TrainingConfig
from torch_bridge import files

TENTH = torch.tensor(0.1, dtype=torch.float64)
DATA = TensorDataset(torch.randn(16, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(16, 1))


class Scaled(nn.Module):
    def __init__(self, counts=False):
        super().__init__()
        torch.manual_seed(0)
        self.counts, self.linear = counts, nn.Linear(3, 1)
        self.register_buffer("scale", TENTH.clone())
        self.register_buffer("sum", TENTH.clone())

    def forward(self, x):
        if self.counts:
            self.sum += 1
        return self.linear(x) * self.scale.float()


def loss_of(module, batch):
    return F.mse_loss(module(batch[0]), batch[1])


def trainer_of(module, folder):
    config = TrainingConfig(learning_rate=1e-2, num_epochs=1, batch_size=8, run={"dir": str(folder)})
    return Trainer(module, DATA, None, config, loss=nn.MSELoss())


def test_a_float64_buffer_that_nothing_changes_is_exported_with_its_own_bits(tmp_path):
    trainer = trainer_of(Scaled(), tmp_path / "run")
    trainer.train()
    files.save(trainer.state_dict(), tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert saved["scale"].dtype == torch.float64
    assert saved["scale"] == TENTH


def test_a_float64_value_that_is_loaded_into_a_trainer_comes_back_with_its_own_bits(tmp_path):
    trainer, third = trainer_of(module := Scaled(), tmp_path / "run"), torch.tensor(1 / 3, dtype=torch.float64)
    trainer.load_state_dict({**module.state_dict(), "scale": third})
    trainer.train()
    assert module.scale == third
    assert trainer.state_dict()["scale"] == third.numpy()


def test_a_compiled_step_leaves_a_float64_buffer_that_nothing_changes_alone():
    module = Scaled()
    step = jaxtrain.compile(module, loss_of, torch.optim.SGD(module.parameters(), 0.1))
    step(DATA[:8])
    step.sync()
    assert module.scale == TENTH


def test_float64_buffers_that_are_changed_in_float32_are_told(tmp_path, caplog):
    module = Scaled(counts=True)
    trainer_of(module, tmp_path)
    assert "Scaled changes float64 buffers, which are computed in float32: sum" in caplog.text
