"""`jaxtrain.sweep`: runs of one module in one program, each as its own run."""

import pathlib
import runpy

import jax
import numpy as np
import pytest
import torch
from torch import nn

import jaxtrain
from jaxtrain.config import TrainingConfig
from jaxtrain.errors import UserError
from jaxtrain.tuning.pruning import Pruning
from jaxtrain.tuning.space import Pruner

SAMPLES = 72  # batches of 32, 32 and 8
CONFIG = {"data": {"batch_size": 32}, "train": {"epochs": 2, "steps_per_call": 8}, "optim": {"clip_norm": None}}


class Small(nn.Module):
    """A convolution, dropout, and a factor that Python holds."""

    def __init__(self, dropout=0.2, factor=1.0, width=4):
        super().__init__()
        self.conv, self.norm = (
            nn.Conv2d(1, width, 3, bias=False),
            nn.BatchNorm2d(width),
        )  # a bias would train on rounding
        self.elements = nn.Dropout(dropout)
        self.head = nn.Linear(4 * width, 3)
        self.factor = factor

    def forward(self, image):
        hidden = torch.relu(self.norm(self.conv(image)))
        return self.factor * self.head(self.elements(hidden.flatten(1)))


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(SAMPLES, 1, 4, 4, generator=generator)
    return torch.utils.data.TensorDataset(image, (image.sum((1, 2, 3)) > 0).long())


def alone(run, data, tmp_path, make, loss):
    """Train a run of a sweep by itself, with Trainer."""
    torch.manual_seed(run.values.get("seed", 0))
    own = {"run": {"dir": str(tmp_path / str(run.number)), "quiet": True}, "tracking": {"tensorboard": False}}
    optim = {**CONFIG["optim"], **{name: run.values[name] for name in ("lr", "weight_decay") if name in run.values}}
    config = TrainingConfig(**{**CONFIG, **own, "optim": optim, "seed": run.values.get("seed", 0)})
    trainer = jaxtrain.Trainer(make, data, data, config, loss=loss)
    history = trainer.train()
    trainer.load_best()
    return history, trainer.state_dict()


def test_runs_in_one_program_end_as_each_would_alone(data, tmp_path):
    space = {
        "seed": [3, 4],
        "lr": {"type": "loguniform", "low": 1e-3, "high": 1e-2},
        "weight_decay": {"type": "uniform", "low": 0.0, "high": 0.1},
        "dropout": {"type": "uniform", "low": 0.1, "high": 0.4},
        "factor": {"type": "uniform", "low": 0.5, "high": 2.0},
        "loss.label_smoothing": {"type": "uniform", "low": 0.01, "high": 0.2},
    }
    result = jaxtrain.sweep(Small, data, nn.CrossEntropyLoss, space, runs=3, validation=data, config=CONFIG)
    assert not result.notes
    assert result.programs == 2  # whole batches, and the last, short one of an epoch
    for run in result.runs[:2]:
        torch.manual_seed(run.values["seed"])
        module = Small(run.values["dropout"], run.values["factor"])
        loss = nn.CrossEntropyLoss(label_smoothing=run.values["loss.label_smoothing"])
        history, weights = alone(run, data, tmp_path, module, loss)
        for one, other in zip(history["val_history"], run.history["val_history"], strict=True):
            assert one == pytest.approx(other, rel=1e-5)
        for name, value in run.state_dict().items():
            largest = np.abs(np.asarray(weights[name])).max()
            assert np.abs(np.asarray(weights[name]) - value.numpy()).max() <= 1e-5 * max(largest, 1e-3), name
    best = Small(result.best.values["dropout"], result.best.values["factor"])
    best.load_state_dict(result.state_dict())
    assert result.best.score == min(run.score for run in result.runs)


def test_files_of_a_sweep_and_its_table_hold_every_run(data, tmp_path):
    result = jaxtrain.sweep(nn_linear, data, nn.CrossEntropyLoss(), {"seed": range(3)}, config=CONFIG)
    folder = result.save(tmp_path / "sweep")
    assert len((folder / "runs.csv").read_text().splitlines()) == 4
    assert result.table().splitlines()[0].split() == ["run", "loss", "seed", "state", "steps"]
    assert "<svg" in (folder / "sweep.html").read_text()
    assert torch.load(folder / "best.pt")["1.weight"].shape == (3, 16)


def nn_linear(width=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width))


def test_folds_score_every_sample_once(data):
    columns = {"0": data.tensors[0].numpy(), "1": data.tensors[1].numpy()}
    result = jaxtrain.sweep(nn_linear, columns, nn.CrossEntropyLoss(), {"lr": [1e-2, 1e-3]}, folds=3, config=CONFIG)
    assert len(result.runs) == 6
    assert result.programs == 2
    assert [(each["runs"], each["values"]["lr"]) for each in result.means()] == [(3, 1e-2), (3, 1e-3)]


def test_a_setting_that_changes_the_code_makes_a_program_for_each_value(data):
    result = jaxtrain.sweep(
        nn_linear, data, nn.CrossEntropyLoss(), {"width": [2, 3], "lr": [1e-2, 1e-3]}, config=CONFIG
    )
    assert result.programs == 4  # two widths, two sizes of a batch
    assert result.runs[3].state_dict()["1.weight"].shape == (3, 16)


def test_several_devices_share_the_runs(data):
    space = {"lr": [1e-2, 1e-3, 1e-4]}
    once = jaxtrain.sweep(nn_linear, data, nn.CrossEntropyLoss(), space, config=CONFIG)
    spread = jaxtrain.sweep(
        nn_linear, data, nn.CrossEntropyLoss(), space, config=CONFIG, devices=jax.local_devices()[:2]
    )
    assert spread.programs == 2 * once.programs
    assert [run.score for run in spread.runs] == pytest.approx([run.score for run in once.runs], rel=1e-5)


class WithEps(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(16, eps=eps), nn.Linear(16, 3)

    def forward(self, image):
        return self.head(self.norm(image.flatten(1)))


def test_a_number_that_an_operator_takes_when_it_is_compiled_is_told(data):
    result = jaxtrain.sweep(WithEps, data, nn.CrossEntropyLoss(), {"eps": [1e-5, 1e-1]}, config=CONFIG)
    assert len(result.notes) == 1
    assert "layer_norm" in result.notes[0]
    assert result.runs[0].score != result.runs[1].score


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number that the forward pass does not use."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = min(factor, 0.5)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None


class Adversary(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor, self.body, self.head = factor, nn.Linear(16, 4), nn.Linear(4, 3)

    def forward(self, image):
        return self.head(Reversed.apply(self.body(image.flatten(1)), self.factor))


def test_a_number_of_the_backward_pass_alone_is_each_runs_own(data):
    factors = {"factor": [0.1, 0.3, 0.9]}
    result = jaxtrain.sweep(Adversary, data, nn.CrossEntropyLoss(), factors, config=CONFIG)
    for run in result.runs:
        (alone,) = jaxtrain.sweep(Adversary, data, nn.CrossEntropyLoss(), [run.values], config=CONFIG).runs
        assert run.score == pytest.approx(alone.score, rel=1e-5)


def test_class_weights_of_a_loss_are_each_runs_own(data):
    weighted = lambda first: nn.CrossEntropyLoss(weight=torch.tensor([first, 1.0, 1.0]))
    result = jaxtrain.sweep(nn_linear, data, weighted, {"loss.first": [1.0, 9.0]}, config=CONFIG)
    (alone,) = jaxtrain.sweep(nn_linear, data, weighted, {"loss.first": [9.0]}, config=CONFIG).runs
    assert result.runs[1].score == pytest.approx(alone.score, rel=1e-5)
    assert result.runs[0].score != pytest.approx(result.runs[1].score, rel=1e-3)


def test_pruned_runs_free_their_lanes(data):
    config = {**CONFIG, "train": {"epochs": 4, "steps_per_call": 8}, "data": {"batch_size": 24}}
    pruner = {"name": "asha", "reduction_factor": 2}
    result = jaxtrain.sweep(
        nn_linear,
        data,
        nn.CrossEntropyLoss(),
        {"lr": [1e-2, 1e-3, 1e-4, 1e-5]},
        validation=data,
        config=config,
        pruner=pruner,
    )
    assert [run.state for run in result.runs] == ["complete", "pruned", "pruned", "pruned"]
    assert [run.steps for run in result.runs] == [12, 6, 3, 3]
    assert result.programs == 3  # of four lanes, of two and of one


def test_a_run_whose_loss_is_not_finite_fails_alone(data):
    result = jaxtrain.sweep(nn_linear, data, squared, {"lr": [1e-3, 1e30]}, config=CONFIG)
    assert [run.state for run in result.runs] == ["complete", "failed"]
    assert "loss" in result.runs[1].error


def squared(output, batch):
    return output.square().mean() ** 4


@pytest.mark.parametrize(
    ("space", "options", "said"),
    [
        ({"depth": [1, 2]}, {}, "depth is no argument of make_module"),
        ({"lr": {"type": "uniform", "low": 0, "high": 1}}, {}, "runs: wanted"),
        ({"lr": [1e-3]}, {"runs": 5}, "1 combinations"),
        ({"lr": []}, {}, "an empty list"),
        ({"lr": [1e-3]}, {"folds": 1}, "folds: 1"),
        ({"lr": [1e-3]}, {"pruner": "median"}, "no validation data"),
        ({"loss.weights": [1.0]}, {}, "loss"),
    ],
)
def test_mistakes_are_told_before_a_step(data, space, options, said):
    with pytest.raises(UserError, match=said):
        jaxtrain.sweep(nn_linear, data, nn.CrossEntropyLoss, space, config=CONFIG, **options)


def test_median_pruning_ends_the_lower_half_after_its_warm_up():
    pruning = Pruning(Pruner(startup_trials=2, warmup_evaluations=1), "loss", "min")
    losses = {run: {"loss": float(run)} for run in range(5)}
    assert pruning(1, losses) == []
    assert pruning(2, losses) == [3, 4]


def test_the_example_ranks_its_runs_and_loads_the_best_into_torch(capsys):
    path = pathlib.Path(__file__).parents[3] / "examples/sweep.py"
    result = runpy.run_path(str(path))["main"]()
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("16 runs, ")
    assert float(said.rpartition(" ")[2]) == pytest.approx(result.best.score, abs=5e-3)
    assert result.best.score > 0.8
