"""One training run of each drop-in, as a process of its own: python -m tests.e2e.drop_in_runs KIND FOLDER [KILLED_AT].

Trains 3 epochs of 4 steps, saves its state after each, goes on from the newest there is, and writes the weights. With
dropout, but for accelerate's: there the loader's iterator draws from torch's generator after load_state has set it.
KILLED_AT: the step at whose end the process kills itself.
"""

import os
import pathlib
import signal
import sys

import torch
from torch import nn
from torch.nn import functional as F

STEPS, EVERY, BATCH = 12, 4, 4


class Net(nn.Module):
    def __init__(self, dropout: float = 0.2):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(16, 3)

    def forward(self, x, labels=None):
        logits = self.head(self.body(x))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return EVERY * BATCH

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return {"x": torch.randn(6, generator=draw), "labels": index % 3}


def kill_at(step: int, killed_at: int) -> None:
    if step == killed_at:
        os.kill(os.getpid(), signal.SIGKILL)


def lightning(folder: pathlib.Path, killed_at: int) -> nn.Module:
    import lightning as L
    from lightning.pytorch.callbacks import Callback

    from jaxtrain.lightning import Trainer

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, batch_idx):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    class Kill(Callback):
        def on_train_batch_end(self, trainer, *arguments):
            kill_at(trainer.global_step, killed_at)

    def trainer(epochs: int) -> Trainer:
        return Trainer(
            max_epochs=epochs, accelerator="cpu", devices=1, callbacks=[Kill()], logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip

    first = folder / "first.ckpt"  # after a fit: from one inside a fit Lightning's loop goes on with a step too many
    if not first.exists():
        made = trainer(1)
        made.fit(Module(), torch.utils.data.DataLoader(Rows(), BATCH))
        made.save_checkpoint(first)
    module = Module()
    trainer(STEPS // EVERY).fit(module, torch.utils.data.DataLoader(Rows(), BATCH), ckpt_path=first)
    return module.net


def transformers(folder: pathlib.Path, killed_at: int) -> nn.Module:
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint

    from jaxtrain.transformers import Trainer, TrainingArguments

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            kill_at(state.global_step, killed_at)

    arguments = TrainingArguments(
        output_dir=str(folder / "kept"), max_steps=STEPS, save_steps=EVERY, per_device_train_batch_size=BATCH,
        report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-2,
    )  # fmt: skip
    made = Trainer(Net(), arguments, train_dataset=Rows(), callbacks=[Kill()])
    found = get_last_checkpoint(folder / "kept") if (folder / "kept").exists() else None
    made.train(resume_from_checkpoint=found)
    return made.model


def accelerate(folder: pathlib.Path, killed_at: int) -> nn.Module:
    from accelerate.utils import set_seed

    from jaxtrain.accelerate import Accelerator

    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model = Net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = torch.utils.data.DataLoader(Rows(), BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    states = sorted((folder / "kept").glob("step_*"), key=lambda path: int(path.name[5:]))
    done = int(states[-1].name[5:]) if states else 0
    if states:
        accelerator.load_state(str(states[-1]))
    while done < STEPS:
        for batch in loader:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            kill_at(done, killed_at)
        accelerator.save_state(str(folder / f"kept/step_{done}"))
    return accelerator.unwrap_model(model)


def main() -> None:
    from torch_bridge.torchvision_operators import declare_torchvision

    declare_torchvision()
    kind, folder, killed_at = sys.argv[1], pathlib.Path(sys.argv[2]), int([*sys.argv, 0][3])
    folder.mkdir(parents=True, exist_ok=True)
    module = globals()[kind](folder, killed_at)
    torch.save(module.state_dict(), folder / "weights.pt")


if __name__ == "__main__":
    main()
