"""The best weights of a run made in Python: in the trainer, in the module, in files, and for a script started again."""

import json

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from jaxtrain import Trainer, TrainingConfig, UserError, evaluate, export
from torch_bridge import files


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))


def halves():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 20, generator=generator), torch.randint(0, 2, (64,), generator=generator)
    return TensorDataset(x[:32], y[:32]), TensorDataset(x[32:], y[32:])


def overfitted(folder, net=None, **settings) -> Trainer:
    """Return a trainer whose random labels make the validation loss rise after a few epochs."""
    settings = {
        "learning_rate": 1e-2,
        "num_epochs": 12,
        "batch_size": 32,
        "tracking": {"tensorboard": False},
    } | settings
    config = TrainingConfig(run={"dir": str(folder), "quiet": True}, **settings)
    return Trainer(network() if net is None else net, *halves(), config, loss=torch.nn.CrossEntropyLoss())


def torch_loss(net: torch.nn.Module) -> float:
    x, y = halves()[1].tensors
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(net.eval()(x), y))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run: its trainer, its module, its history and its folder."""
    folder, net = tmp_path_factory.mktemp("best") / "run", network()
    trainer = overfitted(folder, net)
    return trainer, net, trainer.train(), folder


def test_load_best_brings_the_best_evaluations_weights_into_the_module(run):
    trainer, net, history, folder = run
    losses = [entry["loss"] for entry in history["val_history"]]
    assert min(losses) < losses[-1] - 1e-3  # it overfits, so best and last differ
    assert history["best"] == {
        "loss": min(losses),
        "accuracy": history["best"]["accuracy"],
        "step": 1 + np.argmin(losses),
    }
    assert history["best_metric"] == min(losses)
    trainer.load_checkpoint("last")
    assert torch_loss(net) == pytest.approx(losses[-1], abs=1e-5)
    best = trainer.load_best()
    assert (best.step, best.metrics["loss"]) == (history["best"]["step"], min(losses))
    assert best == trainer.best
    assert best.path == folder / "checkpoints" / str(best.step)
    assert torch_loss(net) == pytest.approx(min(losses), abs=1e-5)
    assert trainer.evaluate()["loss"] == pytest.approx(min(losses), abs=1e-6)


def test_the_export_of_a_run_made_in_python_holds_the_best_weights_bit_for_bit(run, tmp_path):
    trainer, net, _, folder = run
    trainer.load_best()
    assert trainer.exported == folder / "exports" / "best.pt"
    for path in ("w.pt", "w.safetensors"):
        assert export.main(["--run", str(folder), "--output", str(tmp_path / path), "--quiet"]) == 0
    plain = torch.load(trainer.exported, weights_only=True)
    assert list(plain) == list(net.state_dict())
    for state in (plain, torch.load(tmp_path / "w.pt", weights_only=True), files.load(tmp_path / "w.safetensors")):
        assert all(np.array_equal(np.asarray(state[key]), value) for key, value in net.state_dict().items())


def test_the_exported_training_state_goes_on_in_torch(run, tmp_path):
    trainer, _, _, folder = run
    assert export.main(["--run", str(folder), "--output", str(tmp_path / "w.pt"), "--optimizer", "--quiet"]) == 0
    saved = torch.load(tmp_path / "w.pt", weights_only=True)
    trainer.load_checkpoint("last")
    net = network()
    net.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    optimizer.load_state_dict(saved["optimizer"])
    assert saved["step"] == 12
    assert torch_loss(net) == pytest.approx(trainer.evaluate()["loss"], abs=1e-6)
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert [list(moment.shape) for moment in moments] == [list(p.shape) for p in net.parameters()]


def test_evaluate_reports_what_the_run_recorded(run, capsys):
    folder, history = run[3], run[2]
    assert evaluate.main(["--run", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["loss"] == history["best_metric"]
    assert evaluate.main(["--run", str(folder), "--split", "test"]) == 2
    assert "trainer.load_best()" in capsys.readouterr().err


def test_a_script_started_again_loads_the_best_of_its_own_run_only(run):
    best = run[0].best
    again = network()
    trainer = overfitted(run[3], again)
    assert trainer.best == best
    trainer.load_best()
    assert torch_loss(again) == pytest.approx(best.metrics["loss"], abs=1e-5)
    assert trainer.train()["best"]["step"] == best.step  # complete: nothing is trained, the last weights are in hand
    assert torch_loss(again) > best.metrics["loss"] + 1e-3
    with pytest.raises(UserError, match="holds another run"):
        overfitted(run[3], learning_rate=2e-2).load_best()


def test_a_resumed_run_knows_the_best_from_before(tmp_path, run):
    first = overfitted(tmp_path / "run", num_epochs=6, optim={"schedule": {"name": "constant"}})
    before = first.train()["best"]
    whole = overfitted(tmp_path / "run", num_epochs=12, optim={"schedule": {"name": "constant"}})
    assert whole.train()["best"] == before
    assert whole.load_best().step == before["step"]


def test_an_early_stop_leaves_the_best_within_reach(tmp_path):
    trainer = overfitted(tmp_path / "run", num_epochs=40, evaluation={"patience": 2})
    history = trainer.train()
    assert len(history["val_history"]) == history["best"]["step"] + 2
    assert trainer.load_best().metrics["loss"] == history["best_val_loss"]


def test_the_best_by_another_metric_and_of_averaged_weights(tmp_path):
    settings = {"evaluation": {"metric": "accuracy", "mode": "max"}, "optim": {"ema_decay": 0.5}}
    trainer = overfitted(tmp_path / "run", **settings)
    history = trainer.train()
    assert history["best_metric"] == max(entry["accuracy"] for entry in history["val_history"])
    trainer.load_best()
    assert trainer.evaluate()["accuracy"] == history["best_metric"]
    net = network()
    net.load_state_dict(torch.load(trainer.exported, weights_only=True))
    assert torch_loss(net) == pytest.approx(history["best"]["loss"], abs=1e-5)


def test_without_a_validation_set_there_is_no_best_and_the_last_weights_are_exported(tmp_path):
    net = network()
    config = TrainingConfig(num_epochs=2, batch_size=32, run={"dir": str(tmp_path / "run"), "quiet": True})
    trainer = Trainer(net, halves()[0], None, config, loss=torch.nn.CrossEntropyLoss())
    history = trainer.train()
    assert (trainer.best, history["best"]) == (None, {})
    with pytest.raises(UserError, match="no checkpoint was evaluated"):
        trainer.load_best()
    saved = torch.load(trainer.exported, weights_only=True)
    assert all(torch.equal(saved[key], value) for key, value in net.state_dict().items())


def test_a_best_checkpoint_that_was_not_kept_is_refused(tmp_path):
    trainer = overfitted(tmp_path / "run", checkpoint={"keep_best": 0})
    trainer.train()
    with pytest.raises(UserError, match="checkpoint.keep_best was 0"):
        trainer.load_best()
    assert trainer.load_checkpoint("last").step == 12


def test_weights_of_init_from_are_there_before_the_first_step(run, tmp_path):
    folder, net = run[3], network()
    trainer = overfitted(tmp_path / "run", net, init_from=str(folder))
    wanted = torch.load(run[0].exported, weights_only=True)
    state = trainer.state_dict()
    assert all(np.array_equal(state[key], value) for key, value in wanted.items())
    assert all(torch.equal(value, wanted[key]) for key, value in net.state_dict().items())
    assert trainer.evaluate()["loss"] == pytest.approx(run[2]["best_metric"], abs=1e-6)


def test_weights_loaded_after_init_from_stay(run, tmp_path):
    trainer = overfitted(tmp_path / "run", init_from=str(run[3]), learning_rate=0.0, optim={"weight_decay": 0.0})
    zeros = {key: torch.zeros_like(value) for key, value in network().state_dict().items()}
    trainer.load_state_dict(zeros)
    trainer.train()
    assert all(not value.any() for value in trainer.state_dict().values())


class Mixed(torch.nn.Module):
    """Tied weights, a frozen layer, running statistics and a float64 buffer."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(20, 20, bias=False)
        self.list = torch.nn.ModuleList([torch.nn.Linear(20, 20) for _ in range(11)])
        self.list[10].weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(20)
        self.head = torch.nn.Linear(20, 2)
        self.head.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([0.5, 2.0], dtype=torch.float64))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.list:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x)) * self.scale.float()


def test_ties_statistics_frozen_and_double_tensors_are_exported_without_the_model(tmp_path):
    net = Mixed()
    trainer = overfitted(tmp_path / "run", net, num_epochs=2)
    trainer.train()
    trainer.load_best()
    for path in ("w.pt", "state.pt"):
        flags = ["--optimizer", "--checkpoint", "best"] if path == "state.pt" else []
        assert export.main(["--run", str(tmp_path / "run"), "--output", str(tmp_path / path), "--quiet", *flags]) == 0
    state = torch.load(tmp_path / "w.pt", weights_only=True)
    Mixed().load_state_dict(state, strict=True)
    assert list(state) == list(net.state_dict())
    assert all(
        torch.equal(state[key], value) and state[key].dtype == value.dtype for key, value in net.state_dict().items()
    )
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True)["optimizer"])


class Rounded(torch.nn.Module):
    """A buffer that single precision does not hold."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(20, 2)
        self.register_buffer("third", torch.tensor([1 / 3], dtype=torch.float64))

    def forward(self, x):
        return self.head(x)


def test_numbers_that_no_checkpoint_holds_are_exported_by_the_script_and_refused_elsewhere(tmp_path, capsys):
    trainer = overfitted(tmp_path / "run", Rounded(), num_epochs=1)
    trainer.train()
    assert torch.load(trainer.exported, weights_only=True)["third"].item() == 1 / 3
    assert export.main(["--run", str(tmp_path / "run"), "--output", str(tmp_path / "w.pt")]) == 2
    assert "third: float64 numbers" in capsys.readouterr().err
