"""A loss of the user's own sees the last, uneven batch of an epoch in its true shape, as in torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain import Trainer, TrainingConfig
from jaxtrain.errors import UserError
from jaxtrain.train.search.lr_range import range_test
from tests.unit.engine.runs import arrays, assert_same_bits, difference

SAMPLES, RATE = 11, 0.1


class Line(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.array([0.3, -0.2, 0.1]))

    def __call__(self, x):
        return x @ self.weight[...]


def centred(model, batch, rngs=None):
    """What a row adds depends on every other of its batch."""
    error = model(batch["x"]) - batch["y"]
    return jnp.sqrt(0.01 + jnp.mean((error - error.mean()) ** 2)) + jnp.mean(error**2)


def weighted(model, batch, rngs=None):
    share = jnp.abs(batch["y"])
    return (share * (model(batch["x"]) - batch["y"]) ** 2).sum() / share.sum(), share.sum()


def data(samples=SAMPLES):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(samples, 3)).astype(np.float32)
    return {"x": x, "y": np.sin(x).sum(1).astype(np.float32)}


def trainer(folder, loss=centred, samples=None, **settings):
    sections = {
        "run": {"dir": str(folder), "quiet": True},
        "data": {"batch_size": 4, "shuffle": False},
        "train": {"epochs": 2, "log_every_steps": 1},
        "evaluation": {"every_epochs": None},
        "optim": {"name": "sgd", "lr": RATE, "weight_decay": 0, "clip_norm": None, "schedule": {"name": "constant"}},
        "tracking": {"tensorboard": False},
        "shard": {"devices": 1},
    }
    for name, value in settings.items():
        section, key = name.split("__")
        sections[section] = sections[section] | {key: value}
    given = data() if samples is None else samples
    return Trainer(Line(), given, given, TrainingConfig(**sections), loss=loss)


def trained(folder, loss=centred, **settings):
    made = trainer(folder, loss, **settings)
    made.train()
    return made


def by_hand(micro, epochs=2, batch=4, samples=SAMPLES):
    """The weights after SGD whose gradient is the mean over micro-batches."""
    model, given = Line(), data(samples)
    gradient = jax.grad(lambda w, rows: centred(lambda x: x @ w, rows))
    w = model.weight[...]
    for _ in range(epochs):
        for start in range(0, samples, batch):
            stop = min(start + batch, samples)
            parts = [{k: v[i : min(i + micro, stop)] for k, v in given.items()} for i in range(start, stop, micro)]
            w = w - RATE * sum(gradient(w, part) for part in parts) / len(parts)
    return w


ORDER = [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9, 10]]


class InTurn(torch.utils.data.IterableDataset):
    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return iter(Rows())


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if index >= SAMPLES:
            raise IndexError
        return {name: column[index] for name, column in data().items()}


@pytest.mark.parametrize(
    ("dataset", "batches"),
    [
        (lambda: torch.utils.data.DataLoader(Rows(), batch_sampler=ORDER), ORDER),
        (lambda: torch.utils.data.DataLoader(Rows(), batch_size=4), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]),
        (InTurn, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]),
    ],
)
def test_batches_of_torchs_data_keep_their_sizes(tmp_path, dataset, batches):
    made = trained(tmp_path, samples=dataset(), train__epochs=1)
    given, w = data(), Line().weight[...]
    gradient = jax.grad(lambda w, rows: centred(lambda x: x @ w, rows))
    for batch in batches:
        w = w - RATE * gradient(w, {name: column[np.array(batch)] for name, column in given.items()})
    np.testing.assert_allclose(made.state.params["weight"], w, rtol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_step_is_that_of_its_own_rows(tmp_path, accumulate):
    made = trained(tmp_path, train__accumulate_steps=accumulate)
    np.testing.assert_allclose(made.state.params["weight"], by_hand(4 // accumulate), rtol=1e-5)


def test_the_short_batch_is_one_more_program_and_no_further(tmp_path):
    assert trained(tmp_path).program.compilations == 2


@pytest.mark.parametrize("changed", [{"train__steps_per_call": 3}, {"data__placement": "host"}])
@pytest.mark.usefixtures("optimised")
def test_calls_and_placement_change_no_bit(tmp_path, changed):
    first, second = trained(tmp_path / "a"), trained(tmp_path / "b", **changed)
    assert_same_bits(arrays(first), arrays(second))


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path, step):
    whole = trained(tmp_path / "whole")
    trained(tmp_path / "half", train__steps=step)
    assert_same_bits(arrays(whole), arrays(trained(tmp_path / "half")))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("samples", [10, 11])  # a rest that divides over two devices, and one that does not
def test_two_devices_train_as_one(tmp_path, strategy, samples):
    runs = [
        trained(tmp_path / str(n), samples=data(samples), shard__devices=n, shard__strategy=strategy) for n in (1, 2)
    ]
    assert difference(arrays(runs[1]), arrays(runs[0])) < 1e-6


def test_a_rest_that_does_not_divide_is_computed_once_under_ddp_local(tmp_path):
    made = trained(tmp_path, train__epochs=1, data__batch_size=8, shard__devices=2, shard__strategy="ddp_local")
    np.testing.assert_allclose(made.state.params["weight"], _ddp_by_hand(), rtol=1e-5)


def _ddp_by_hand():
    """Eight rows, four on each device; then three on both."""
    given, w = data(), Line().weight[...]
    gradient = jax.grad(lambda w, rows: centred(lambda x: x @ w, rows))
    rows = lambda *ends: {k: v[slice(*ends)] for k, v in given.items()}
    w = w - RATE * (gradient(w, rows(0, 4)) + gradient(w, rows(4, 8))) / 2
    return w - RATE * gradient(w, rows(8, 11))


def test_an_evaluation_averages_the_batches_by_their_rows(tmp_path):
    given, made = data(), trainer(tmp_path)
    model = made.model()
    ends = [(0, 4), (4, 8), (8, 11)]
    values = [float(centred(model, {k: v[a:b] for k, v in given.items()})) for a, b in ends]
    assert made.evaluate()["loss"] == pytest.approx(np.average(values, weights=[b - a for a, b in ends]), rel=1e-6)


def test_an_evaluation_on_two_devices_is_that_on_one(tmp_path):
    runs = [trainer(tmp_path, shard__devices=n, data__eval_batch_size=5).evaluate()["loss"] for n in (1, 2)]
    assert runs[1] == pytest.approx(runs[0], rel=1e-6)


def test_the_range_test_takes_the_short_batch_too(tmp_path):
    assert len(range_test(trainer(tmp_path).program, 1e-6, 1e-3, steps=6).loss) == 6


def test_a_call_of_several_steps_is_taken_apart_around_the_short_batch(tmp_path):
    made = trainer(tmp_path, data__placement="host")
    calls = [(first, count) for first, count, _ in made.train_loader.batches([(0, 2), (2, 2), (4, 1), (5, 1)])]
    assert calls == [(0, 2), (2, 1), (3, 1), (4, 1), (5, 1)]


def test_micro_batches_count_by_their_weight_where_the_loss_gives_one(tmp_path):
    whole, parts = (trained(tmp_path / str(n), weighted, train__accumulate_steps=n) for n in (1, 2))
    assert difference(arrays(parts), arrays(whole)) < 1e-6


def test_a_sum_over_the_batch_is_not_accumulated(tmp_path):
    total = lambda model, batch, rngs: ((model(batch["x"]) - batch["y"]) ** 2).sum()
    with pytest.raises(UserError, match="this loss is a sum over the batch"):
        trainer(tmp_path, total, train__accumulate_steps=2)
