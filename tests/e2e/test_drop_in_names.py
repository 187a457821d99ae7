"""The drop-ins hand on every public name of their library, so that the import is the one change."""

import inspect
import os

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
lightning = pytest.importorskip("lightning")
accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.callbacks import LambdaCallback  # noqa: E402

import jaxtrain.accelerate  # noqa: E402
import jaxtrain.lightning as L  # noqa: E402
import jaxtrain.transformers  # noqa: E402

REPLACED = {
    "lightning": {"Trainer"},
    "lightning.pytorch": {"Trainer"},
    "transformers": {"Trainer", "Seq2SeqTrainer"},
    "accelerate": {"Accelerator"},
}
OURS = {
    "lightning": L,
    "lightning.pytorch": L,
    "transformers": jaxtrain.transformers,
    "accelerate": jaxtrain.accelerate,
}
LIBRARIES = {"lightning": lightning, "lightning.pytorch": pl, "transformers": transformers, "accelerate": accelerate}


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_public_name_is_the_librarys_but_for_what_is_compiled(library):
    theirs, mine = LIBRARIES[library], OURS[library]
    names = list(getattr(theirs, "__all__", ())) or [name for name in dir(theirs) if not name.startswith("_")]
    if library == "transformers":  # 6,000 names, each of which loads a module
        names = [
            "Trainer",
            "Seq2SeqTrainer",
            "AutoModelForCausalLM",
            "TrainingArguments",
            "pipeline",
            "set_seed",
            "trainer_utils",
            "BertConfig",
        ]
    assert len(names) > 4
    other = [name for name in names if getattr(mine, name) is not getattr(theirs, name)]
    assert set(other) == REPLACED[library]
    assert all(issubclass(getattr(mine, name), getattr(theirs, name)) for name in other)
    assert set(names) <= set(dir(mine)) | {"__version__"}
    assert mine.__version__ == theirs.__version__


def test_submodules_are_lightnings_and_the_trainer_is_compiled_by_every_way():
    assert L.callbacks is pl.callbacks
    assert L.loggers.CSVLogger is pl.loggers.CSVLogger
    assert L.pytorch.Trainer is L.Trainer
    assert L.pytorch.callbacks.ModelCheckpoint is pl.callbacks.ModelCheckpoint
    from jaxtrain.lightning.cli import LightningCLI, SaveConfigCallback

    assert LightningCLI is L.LightningCLI is L.cli.LightningCLI
    assert SaveConfigCallback is pl.cli.SaveConfigCallback


def test_a_star_import_gives_the_librarys_names():
    names: dict = {}
    exec("from jaxtrain.lightning import *", names)
    assert names["Trainer"] is L.Trainer
    assert names["LightningModule"] is lightning.LightningModule
    assert "host_memory" not in names


@pytest.mark.parametrize("module", ["lightning", "transformers", "accelerate"])
def test_a_name_that_no_library_has_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match=f"'jaxtrain.{module}' has no attribute 'Trainr', nor has"):
        getattr(OURS[module], "Trainr")  # noqa: B009


def test_signatures_are_the_librarys():
    for mine, theirs in (
        (L.Trainer, pl.Trainer),
        (L.Trainer.fit, pl.Trainer.fit),
        (jaxtrain.transformers.Trainer, transformers.Trainer),
        (jaxtrain.transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainer),
        (jaxtrain.transformers.Trainer.save_model, transformers.Trainer.save_model),
        (jaxtrain.accelerate.Accelerator, accelerate.Accelerator),
    ):
        assert inspect.signature(mine) == inspect.signature(theirs)
        assert len(inspect.signature(mine).parameters) > 2


class Line(L.LightningModule):
    def __init__(self, width: int = 4, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams["lr"])


class Rows(L.LightningDataModule):
    def __init__(self, rows: int = 24):
        super().__init__()
        self.rows = rows

    def train_dataloader(self):
        x = torch.randn(self.rows, 3, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 6)


def test_lightning_cli_trains_with_the_compiled_trainer(tmp_path, monkeypatch):
    pytest.importorskip("jsonargparse", reason="LightningCLI's parser")
    monkeypatch.chdir(tmp_path)
    runs = {}
    for engine in (pl.cli.LightningCLI, L.LightningCLI):
        losses: list[float] = []
        seen = lambda *_, losses=losses: losses.append(float(_[2]["loss"]))
        flags = ["--model.width=5", "--model.lr=0.05", "--data.rows=30", "--trainer.max_epochs=2"]
        flags += ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
        flags += ["--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
        command = ["fit", "--seed_everything=3", *flags]
        monkeypatch.setattr("sys.argv", ["train.py", *command])
        made = engine(
            Line, Rows, trainer_defaults={"callbacks": [LambdaCallback(on_train_batch_end=seen)]},
            save_config_callback=None,
        )  # fmt: skip
        assert made.trainer.global_step == 10
        runs[engine] = losses, made
    (theirs, _), (mine, made) = runs.values()
    assert isinstance(made.trainer, L.Trainer)
    assert made.trainer.fit_loop.epoch_loop.automatic_optimization.step.count == 10  # compiled, every step
    np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_lightning_cli_takes_a_config_file_and_a_trainer_class_of_the_users(tmp_path, monkeypatch):
    pytest.importorskip("jsonargparse", reason="LightningCLI's parser")
    monkeypatch.chdir(tmp_path)

    class Mine(L.Trainer):
        pass

    (tmp_path / "config.yaml").write_text(
        "seed_everything: 1\nmodel: {width: 7}\ntrainer: {accelerator: cpu, max_steps: 3, logger: false}\n"
    )
    made = L.LightningCLI(Line, Rows, trainer_class=Mine, run=False, args=["--config=config.yaml"])
    assert type(made.trainer) is Mine
    assert made.trainer.max_steps == 3
    assert made.model.net[0].out_features == 7
    positional = L.LightningCLI(Line, Rows, None, None, Mine, run=False, args=["--config=config.yaml"])
    assert type(positional.trainer) is Mine
