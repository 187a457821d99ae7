"""A run folder goes on with its own run, and with no other."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from flax import nnx
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from jaxtrain import Trainer, TrainingConfig, nn
from jaxtrain.errors import UserError
from jaxtrain.train.resume import fingerprint, object_digest

pytestmark = pytest.mark.slow

ROWS = torch.arange(48.0).reshape(16, 3) / 10


class Net(nnx.Module):
    def __init__(self, width=4, activation=nnx.relu):
        self.activation = activation
        self.fc = nn.Linear(3, width, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.activation(self.fc(x)).sum(-1)


def squares(model, batch, rngs):
    return (model(batch["x"]) - 1) ** 2


def distances(model, batch, rngs):
    return abs(model(batch["x"]) - 1)


def weighted(alpha):
    return lambda model, batch, rngs: alpha * (model(batch["x"]) - 1) ** 2


def trainer(folder=None, model=None, data=None, loss=squares, **settings):
    sections = {
        "data": {"batch_size": 8},
        "shard": {"devices": 1},
        "train": {"epochs": 1},
        "tracking": {"tensorboard": False},
    }
    sections["run"] = {"quiet": True} | ({} if folder is None else {"dir": str(folder)})
    for key, value in settings.items():
        section, _, name = key.partition("__")
        sections = sections | {section: {**sections.get(section, {}), name: value} if name else value}
    data = {"x": ROWS.numpy()} if data is None else data
    return Trainer(model or Net(), data, None, TrainingConfig(**sections), loss=loss)


def torch_trainer(folder=None, module=None, data=None, loss=None, **settings):
    data = TensorDataset(ROWS, ROWS.sum(1, keepdim=True)) if data is None else data
    return trainer(folder, module or torch.nn.Linear(3, 1), data, loss or torch.nn.MSELoss(), **settings)


def difference(first, second, names=fingerprint.DECIDING):
    return second.fingerprint.differences(first.fingerprint, names)


@pytest.mark.parametrize(
    "changes",
    [
        {"optim__lr": 0.5},
        {"data__batch_size": 4},
        {"seed": 1},
        {"precision__policy": "bf16"},
        {"model": Net(5)},
        {"model": Net(activation=nnx.gelu)},
        {"loss": distances},
        {"loss": weighted(2.0)},
        {"data": {"x": ROWS.numpy() + 1}},
        {"data": {"x": ROWS.numpy()[:8]}},
    ],
    ids=["lr", "batch", "seed", "precision", "width", "activation", "loss", "captured", "values", "size"],
)
def test_another_model_other_data_or_settings_are_another_run(changes):
    assert difference(trainer(loss=weighted(1.0)) if "loss" in changes else trainer(), trainer(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"train__epochs": 3},
        {"train__steps": 9},
        {"train__log_every_steps": 1},
        {"data__num_workers": 1},
        {"evaluation__patience": 2},
        {"checkpoint__keep_last": 5},
        {"shard__devices": 2},
        {"model": Net(), "data": {"x": ROWS.numpy().copy()}},
    ],
    ids=["epochs", "steps", "logging", "workers", "patience", "checkpoints", "devices", "objects"],
)
def test_length_logging_devices_and_new_objects_change_nothing(changes):
    assert difference(trainer(), trainer(**changes), (*fingerprint.DECIDING, "weights", "code")) == []


class Counting(Dataset):
    def __init__(self, rows, labels):
        self.rows, self.labels, self.seen, self.cache = rows, labels, [], {}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.seen.append(index)
        self.cache[index] = self.rows[index]
        return self.rows[index], self.labels[index]


def test_folds_of_one_dataset_are_other_data():
    whole = TensorDataset(ROWS, ROWS.sum(1, keepdim=True))
    folds = [torch_trainer(data=Subset(whole, rows)) for rows in (range(8), range(8, 16))]
    assert any("data.train" in line for line in difference(*folds))


def test_labels_alone_are_other_data():
    labels = ROWS.sum(1, keepdim=True)
    changed = labels.clone()
    changed[11] += 1
    assert difference(torch_trainer(data=Counting(ROWS, labels)), torch_trainer(data=Counting(ROWS, changed)))


def test_workers_of_a_dataloader_may_change_and_its_batch_size_may_not():
    whole = TensorDataset(ROWS, ROWS.sum(1, keepdim=True))
    one, two, four = (
        torch_trainer(data=DataLoader(whole, batch_size=size, prefetch_factor=ahead, num_workers=workers))
        for size, workers, ahead in ((4, 0, None), (4, 1, 3), (8, 0, None))
    )
    assert (difference(one, two), bool(difference(one, four))) == ([], True)


def test_what_training_did_to_a_dataset_leaves_it_the_same(tmp_path):
    data, module = Counting(ROWS, ROWS.sum(1, keepdim=True)), torch.nn.Linear(3, 1)
    torch_trainer(tmp_path, module, data).train()
    assert len(torch_trainer(tmp_path, module, data, train__epochs=2).train()["train_history"]) == 2


def test_what_its_owner_did_to_a_dataset_makes_it_another(tmp_path):
    data, module = Counting(ROWS, ROWS.sum(1, keepdim=True)), torch.nn.Linear(3, 1)
    torch_trainer(tmp_path, module, data).train()
    data.labels = data.labels + 1
    with pytest.raises(UserError, match="holds another run: the data differs"):
        torch_trainer(tmp_path, module, data, train__epochs=2).train()


def test_another_activation_of_a_torch_module_is_another_run(tmp_path):
    torch_trainer(tmp_path, torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Tanh())).train()
    with pytest.raises(UserError, match="the model differs in 1"):
        torch_trainer(tmp_path, torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.ReLU())).train()


SCALE = 1.0


class Settings:
    scale = 1.0


def scaled(x):
    return x * SCALE


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x):
        return scaled(self.linear(x)) * Settings.scale


@pytest.mark.parametrize("place", ["test_fingerprint.SCALE", "test_fingerprint.Settings.scale"])
def test_another_value_that_a_forward_reads_is_another_run(place, monkeypatch):
    torch.manual_seed(0)
    first = torch_trainer(module=Scaled()).fingerprint
    monkeypatch.setattr(f"tests.unit.engine.{place}", 2.0)
    torch.manual_seed(0)
    differences = torch_trainer(module=Scaled()).fingerprint.differences(first, fingerprint.DECIDING)
    assert str(differences).count(place.partition(".")[2]) == 1


def test_a_named_folder_of_another_run_is_refused_by_what_differs(tmp_path):
    trainer(tmp_path, optim__lr=0.5).train()
    with pytest.raises(UserError, match=r"holds another run: optim\.lr was 0\.5 and is 0\.25"):
        trainer(tmp_path, optim__lr=0.25).train()


def test_a_named_folder_goes_on_with_other_settings_where_it_is_named_again(tmp_path):
    trainer(tmp_path, optim__lr=0.5).train()
    history = trainer(tmp_path, optim__lr=0.25, train__epochs=2).train(resume=str(tmp_path))
    assert len(history["train_history"]) == 2
    trainer(tmp_path, optim__lr=0.25, train__epochs=3).train()  # these are the folder's settings now


def test_the_default_folder_is_numbered_and_every_run_finds_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = [trainer(optim__lr=lr) for lr in (0.5, 0.25)]
    weights = [run.train() and np.asarray(run.state.params["fc.weight"]) for run in first]
    told = "runs/run holds another run (optim.lr was 0.5 and is 0.25): this run is in runs/run_2"
    assert told in capsys.readouterr().err
    again = [trainer(optim__lr=lr) for lr in (0.5, 0.25)]
    weights_of = lambda run: run.train() and np.asarray(run.state.params["fc.weight"])
    same = [np.array_equal(weights_of(run), w) for run, w in zip(again, weights, strict=True)]
    assert (same, [run.folder.name for run in again]) == ([True, True], ["run", "run_2"])


def test_other_first_weights_go_on_while_steps_are_left_and_begin_anew_where_none_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch_trainer().train()
    torch_trainer(train__epochs=2).train()
    assert "the model begins from other weights; going on" in capsys.readouterr().err
    finished = torch_trainer(train__epochs=2)
    finished.train()
    assert finished.folder.name == "run_2"


def test_checkpoints_carry_the_identity_of_their_run(tmp_path):
    run = trainer(tmp_path)
    run.train()
    saved = json.loads((tmp_path / fingerprint.FILE).read_text())
    assert json.loads((tmp_path / "checkpoints" / "2" / "meta.json").read_text())["run"] == saved["identity"]


def test_the_settings_of_an_older_folder_decide(tmp_path):
    trainer(tmp_path).train()
    (tmp_path / fingerprint.FILE).unlink()
    trainer(tmp_path, train__epochs=2).train()
    (tmp_path / fingerprint.FILE).unlink()
    with pytest.raises(UserError, match=r"seed was 0 and is 3"):
        trainer(tmp_path, seed=3).train()


def test_checkpoints_of_another_run_are_refused_without_their_fingerprint(tmp_path):
    trainer(tmp_path).train()
    for name in (fingerprint.FILE, "config.yaml"):
        (tmp_path / name).unlink()
    trainer(tmp_path, train__epochs=2).train()  # this very run
    for name in (fingerprint.FILE, "config.yaml"):
        (tmp_path / name).unlink()
    with pytest.raises(UserError, match="another run: its fingerprint.json is missing, and its checkpoints .* resume="):
        trainer(tmp_path, seed=3, train__epochs=3).train()
    goes_on = trainer(tmp_path, seed=3, train__epochs=3)
    goes_on.train(resume=str(tmp_path))
    assert int(goes_on.state.step) == 6
    trainer(tmp_path, seed=3, train__epochs=4).train()  # the folder knows its run again


def test_a_folder_counts_by_its_name_or_by_what_it_holds(tmp_path):
    for name, text in (("a/x", "1"), ("b/x", "1"), ("c/x", "2")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    a, b, c = (set(object_digest.digests_of_path(tmp_path / name)) for name in "abc")
    assert (bool(a & b), bool(a & c)) == (True, False)


DIGEST = """
import numpy as np
from jaxtrain.train.resume.object_digest import code_of, describe
class Data:
    def __init__(self): self.names, self.table = {"a", "b", "c"}, {"x": np.arange(5), "y": [print, 1.5]}
    def __getitem__(self, index): return index in {"a", "b", "c"}
print(describe(Data(), "d"), code_of(Data()))
"""


def test_digests_are_the_same_in_every_process():
    command = [sys.executable, "-c", DIGEST]
    told = [subprocess.check_output(command, env=os.environ | {"PYTHONHASHSEED": seed}) for seed in ("1", "2")]
    assert told[0] == told[1]


def test_a_fingerprint_cut_short_is_told_once(tmp_path):
    (tmp_path / fingerprint.FILE).write_text("{")
    with pytest.raises(UserError) as raised:
        fingerprint.read(tmp_path)
    assert str(raised.value).count("cannot be read") == 1


@pytest.mark.parametrize("text", ["", '{"identity": "1'])
def test_a_run_goes_on_over_a_damaged_fingerprint_where_its_checkpoints_are_sealed_for_it(text, tmp_path, capsys):
    trainer(tmp_path).train()
    whole = (tmp_path / fingerprint.FILE).read_text()
    (tmp_path / fingerprint.FILE).write_text(text)
    trainer(tmp_path, train__epochs=2).train()
    assert "its checkpoints are of this very run, which writes it anew" in capsys.readouterr().err
    assert json.loads((tmp_path / fingerprint.FILE).read_text())["identity"] == json.loads(whole)["identity"]


def test_another_run_is_refused_over_a_damaged_fingerprint(tmp_path):
    trainer(tmp_path).train()
    (tmp_path / fingerprint.FILE).write_text("")
    with pytest.raises(UserError, match="fingerprint.json: cannot be read .* move it away"):
        trainer(tmp_path, model=Net(width=5)).train()
