"""Numbers of Lightning's loop wherever Python takes a number: the losses are Lightning's own."""

import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torch_bridge.torchvision_operators import declare_torchvision

declare_torchvision()
lightning = pytest.importorskip("lightning.pytorch")

import jaxtrain.lightning as ours  # noqa: E402

ROWS = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
COMPILED = {  # forms for which one program holds at every step
    "tensor": lambda n, x: torch.clamp(torch.tensor(n) / 10, max=1.0),
    "tensor of a list": lambda n, x: torch.tensor([n, 2 * n, 1.0]).sum(),
    "tensor with a dtype": lambda n, x: torch.tensor(n, dtype=torch.float32),
    "full": lambda n, x: torch.full((2,), n).float().mean(),
    "new_tensor": lambda n, x: x.new_tensor(n),
    "bits": lambda n, x: (n >> 1) & 3,
    "exp": lambda n, x: torch.exp(-torch.tensor(float(1)) * n),
}
ANY = {  # forms for which Python needs the value: torch runs the steps at last
    "as_tensor": lambda n, x: torch.as_tensor(n + 1) * 0.5,
    "divmod": lambda n, x: divmod(n, 4)[1],
    "numpy's scalar": lambda n, x: np.float32(0.5) * n,
    "range": lambda n, x: sum(0.1 for _ in range(n)),
    "f-string": lambda n, x: float(f"{n:03d}") / 10,
    "format": lambda n, x: float(f"{n / 3:.2f}"),
    "percent": lambda n, x: float("%d" % n),  # noqa: UP031
    "math": lambda n, x: math.exp(-n / 10),
    "numpy": lambda n, x: float(np.cos(n)),
    "array": lambda n, x: float(np.array([n, 1]).sum()),
    "key": lambda n, x: {number: 0.1 * number for number in range(20)}[n],
    "method": lambda n, x: n.bit_length(),
    "bool": lambda n, x: 1.0 if n else 2.0,
}


class Net(lightning.LightningModule):
    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.form, self.seen = torch.nn.Linear(3, 1), form, []

    def training_step(self, batch, batch_idx):
        loss = (self.linear(batch[0]).pow(2) * (1 + self.form(self.global_step, batch[0]))).mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def losses(trainer, form, folder) -> tuple[list[float], object]:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    made = trainer(
        max_steps=12,
        accelerator="cpu",
        enable_model_summary=False,
        default_root_dir=folder,
        log_every_n_steps=1,
        **quiet,
    )
    module = Net(form)
    made.fit(module, DataLoader(TensorDataset(ROWS), batch_size=4))
    return module.seen, made


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMPILED, *ANY])
def test_the_losses_are_lightnings(name, tmp_path):
    form = (COMPILED | ANY)[name]
    want, _ = losses(lightning.Trainer, form, tmp_path)
    got, trainer = losses(ours.Trainer, form, tmp_path)
    assert got == pytest.approx(want, rel=1e-5)
    step = getattr(trainer.fit_loop.epoch_loop.automatic_optimization, "step", None)
    if name in COMPILED:
        assert step is not None
        assert len(step.programs) <= 2  # for the first number, and for all
