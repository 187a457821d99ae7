"""Every kind of bad input gives exit code 2 and one clear message, never a traceback."""

import pathlib

import numpy as np
import pytest
from flax import nnx

from jaxtrain import Trainer, TrainingConfig, UserError, config_io, export, load_config, lr_find, run, tune
from tests.contract.tasks import tiny
from torch_bridge import verify

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs/digits_tiny.yaml")


def message(capsys, *arguments: str) -> str:
    """What a run that ends with exit code 2 prints."""
    assert run.main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.weight_deacy=0.1", "optim.weight_deacy: unknown key, did you mean `weight_decay`?"),
        ("epochz=3", "epochz: unknown key"),
        ("weight_decays=0.1", "weight_decays: unknown key"),
        ("data.batch_size=many", "data.batch_size: input should be a valid integer"),
        ("optim.lr=-1", "optim.lr: input should be greater than or equal to 0, got -1"),
        ("precision.policy=int3", "precision.policy: input should be 'fp32'"),
        ("data.batch_size=0", "data.batch_size: input should be greater than or equal to 1"),
        ("task=digits.clasify", "task: 'digits.clasify' is unknown; known here: "),
        ("nonsense", "override 'nonsense': wanted section.key=value"),
        ("optim.schedule={warmup_steps: 3, warmup_epochs: 1}", "give one of warmup_steps, warmup_epochs"),
        ("optim.groups.heads.lr=0.1", "optim.groups: heads unknown; this task has the groups default"),
        ("shard.devices=99", "shard.devices: 99, but this machine has"),
        ("data.placement=device", "data.placement: device needs a dataset of arrays"),
        ("optim.schedule.min_lr=1", "optim.schedule.min_lr: 1.0 is above optim.lr"),
        ("evaluation.metric=acuracy", "evaluation.metric: acuracy is unknown; this task has loss, accuracy"),
    ],
)
def test_a_wrong_setting_is_named(override, expected, capsys, tmp_path):
    settings = (f"run.dir={tmp_path}", "shard.devices=1", override, "train.steps=5", "data.source=torch")
    assert expected in message(capsys, "--config", CONFIG, *settings)


def test_all_mistakes_are_listed_together(capsys):
    error = message(capsys, "--config", CONFIG, "optim.lrr=1", "train.epochs=x", "model.embed=3")
    assert "3 mistakes" in error
    assert all(key in error for key in ("optim.lrr", "train.epochs", "model.embed"))


def test_a_batch_that_the_devices_cannot_divide_names_the_nearest(capsys, tmp_path):
    error = message(capsys, "--config", CONFIG, "data.batch_size=100", f"run.dir={tmp_path}")
    assert "data.batch_size: 100 is not a multiple of 8 devices; nearest are 96 and 104" in error


def test_a_missing_config_lists_the_ones_there_are(capsys):
    assert "configs/digits.yaml" in message(capsys, "--config", "configs/digitz.yaml")


@pytest.mark.parametrize("command", [lr_find, tune, export, verify])
def test_a_folder_that_cannot_be_made_is_refused_before_the_work(command, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    option = "--hf" if command is export else "--output"
    with pytest.raises(SystemExit) as left:
        command.main([option, str(tmp_path / "file/inner/folder")])
    assert left.value.code == 2
    assert f"argument {option}: {tmp_path}/file is a file, wanted a folder" in capsys.readouterr().err


def test_the_help_of_a_config_that_is_none_is_one_sentence(capsys, tmp_path):
    assert run.main(["--config", str(tmp_path), "--help"]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: is a folder, wanted a YAML file\n"


def test_unreadable_yaml_is_named(capsys, tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("optim: {lr: [1\n")
    assert f"{path}: cannot be read as YAML" in message(capsys, "--config", str(path))


def test_an_output_folder_that_cannot_be_written_is_named(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    error = message(capsys, "--config", CONFIG, f"run.dir={folder}", "shard.devices=1")
    assert f"run.dir: cannot write to {folder}" in error


def test_resuming_with_another_model_lists_the_differences(capsys, tmp_path):
    trainer = tiny("digits.classify", tmp_path, "train.steps=3")
    trainer.train()
    before = (tmp_path / "config.yaml").read_text()
    command = ["--config", CONFIG, f"run.dir={tmp_path}", "shard.devices=1", "model.embed_dim=32"]
    assert "holds another run: model.embed_dim was 16 and is 32" in message(capsys, *command)
    error = message(capsys, *command, "--resume", str(tmp_path))
    assert "the checkpoint does not fit this config" in error
    assert "params.blocks.0.attn.in_proj_bias is [48], the config wants [96]" in error
    assert (tmp_path / "config.yaml").read_text() == before


def test_resume_never_refuses_to_start_over_checkpoints(capsys, tmp_path):
    tiny("digits.classify", tmp_path, "train.steps=3").train()
    error = message(capsys, "--config", CONFIG, f"run.dir={tmp_path}", "shard.devices=1", "--resume", "never")
    assert "holds checkpoints up to step 3" in error


class Items:
    """A dataset of the given items; a callable item is called."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        item = self.items[index]
        return item() if callable(item) else item


def broken():
    raise KeyError("no such column")


GOOD = {"image": np.zeros((1, 8, 8), np.float32), "label": np.int32(1)}


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ((), "the dataset is empty"),
        ((GOOD, {**GOOD, "image": np.zeros((1, 8, 7), np.float32)}), "the dataset is ragged: `image` has shape"),
        ((GOOD, {"image": GOOD["image"]}), "the dataset's collate function raised at samples 0, 1: KeyError: 'label'"),
        ((GOOD, {**GOOD, "label": "seven"}), "returns str for `label`"),
        ((GOOD, broken), "the dataset raised at sample 1: KeyError: 'no such column'"),
        ((GOOD, {**GOOD, "label": np.int64(1) << 40}), "does not fit into 32 bits"),
    ],
)
def test_a_bad_dataset_is_named_with_its_sample(items, expected, tmp_path):
    config = load_config(CONFIG, f"run.dir={tmp_path}", "shard.devices=1", "data.batch_size=2", "data.shuffle=false")
    with pytest.raises(UserError, match="dataset") as caught:
        Trainer(None, Items(*items), None, config).train()
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("digits.classify",), "model: got the text 'digits.classify'; a task's name goes to task='digits.classify'"),
        ((nnx.Linear,), "model: got the class Linear; pass an object of it, Linear(...)"),
        (([GOOD], None), "model: got an object of list, wanted a torch.nn.Module, a flax nnx.Module, or None"),
        ((None, [GOOD], TrainingConfig()), "val_dataset: got an object of jaxtrain.config.TrainingConfig"),
        ((None, nnx.Linear(1, 1, rngs=nnx.Rngs(0))), "train_dataset: got an object of flax.nnx"),
        (
            (None, [GOOD], None, CONFIG),
            "config: got an object of str, wanted a TrainingConfig, as jaxtrain.load_config",
        ),
        ((None, [GOOD], None, {"seed": 1}), "as TrainingConfig(**settings) makes one; the order is Trainer(model, "),
    ],
)
def test_swapped_arguments_of_the_trainer_are_named(arguments, expected):
    with pytest.raises(UserError) as caught:
        Trainer(*arguments)
    assert expected in str(caught.value)


def test_printed_config_loads_again(capsys, tmp_path):
    assert run.main(["--config", CONFIG, "--print-config", "optim.lr=0.25"]) == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert config_io.load(path)[1].optim.lr == 0.25


def test_a_dry_run_trains_nothing(capsys, tmp_path):
    assert run.main(["--config", CONFIG, "--dry-run", f"run.dir={tmp_path / 'run'}", "shard.devices=1"]) == 0
    assert "samples: train 1,438, validation 359" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("target", ["float32", "pair"])
def test_a_loss_that_fails_in_torch_is_named_and_not_the_module(target, tmp_path):
    import torch

    labels = torch.zeros(16) if target == "float32" else torch.zeros(16, 5)
    data = torch.utils.data.TensorDataset(torch.randn(16, 3), labels)
    config = TrainingConfig(batch_size=8, run={"dir": str(tmp_path / "run"), "quiet": True})
    loss = torch.nn.CrossEntropyLoss() if target == "float32" else torch.nn.L1Loss()
    with pytest.raises(UserError) as refused:
        Trainer(torch.nn.Linear(3, 2), data, None, config, loss=loss)
    said = f"the loss {type(loss).__name__} fails in torch on the output of Linear()(batch[0]): RuntimeError: "
    assert str(refused.value).startswith(said)
    assert "Mend the module" not in str(refused.value)
