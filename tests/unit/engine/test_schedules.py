"""The plateau's traces and torch's own schedulers, at every step to 1e-6 relative."""

import json
import math
import pathlib

import numpy as np
import pytest

from jaxtrain.config import ScheduleConfig
from jaxtrain.errors import UserError
from jaxtrain.optim import schedules
from jaxtrain.optim.plateau import Plateau

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "engine"


def golden(name):
    return json.loads((GOLDEN / name).read_text())


def assert_close(got, want):
    np.testing.assert_allclose(np.asarray(got, float), np.asarray(want, float), rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("case", golden("set_completion_schedules.json")["plateau"], ids=lambda c: c["seq"])
def test_plateau_traces(case):
    plateau = Plateau(case["lr0"], case["factor"], case["patience"])
    for loss, want in zip(case["losses"], case["trace"], strict=True):
        assert plateau.update(float(loss)) == pytest.approx(want["lr"], rel=1e-6)
        assert plateau.bad == want["bad"]
        assert plateau.best == pytest.approx(want["best"])


# --- torch ----------------------------------------------------------------------------------------------------------


def torch_rates(make, steps):
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(torch.optim.lr_scheduler, optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (schedules.cosine(40, 0.1), lambda lib, o: lib.CosineAnnealingLR(o, 40, eta_min=0.1)),
        (schedules.linear(40, 0.2), lambda lib, o: lib.LinearLR(o, 1.0, 0.2, 40)),
        (schedules.step_drops(7, 0.3), lambda lib, o: lib.StepLR(o, 7, 0.3)),
        (schedules.polynomial(40, 2.0), lambda lib, o: lib.PolynomialLR(o, 40, 2.0)),
        (schedules.constant(), lambda lib, o: lib.ConstantLR(o, 1.0)),
    ],
    ids=["cosine", "linear", "step", "polynomial", "constant"],
)
def test_schedules_equal_torchs(ours, theirs):
    assert_close([ours(k) for k in range(40)], torch_rates(theirs, 40))


@pytest.mark.parametrize("mode", ["min", "max"])
def test_plateau_equals_torchs_over_200_random_values(mode):
    def record(lib, optimizer):
        return lib.ReduceLROnPlateau(optimizer, mode, factor=0.5, patience=3, min_lr=1e-3)

    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = record(torch.optim.lr_scheduler, optimizer)
    ours = Plateau(1.0, 0.5, 3, mode=mode, min_lr=1e-3)
    for value in np.random.default_rng(0).normal(size=200):
        theirs.step(float(value))
        assert ours.update(float(value)) == optimizer.param_groups[0]["lr"]


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "warmup"),
    [({"warmup_steps": 5}, 5), ({"warmup_epochs": 1.5}, 15), ({"warmup_ratio": 0.06}, 6), ({}, 0)],
)
def test_warmup_in_steps_epochs_or_as_a_ratio(settings, warmup):
    schedule = schedules.build(ScheduleConfig(**settings), 1e-3, total_steps=100, steps_per_epoch=10)
    assert [schedule(k) for k in range(warmup)] == pytest.approx([k / warmup for k in range(warmup)])
    assert schedule(warmup) == 1.0


@pytest.mark.parametrize(
    "name", ["constant", "cosine", "cosine_with_restarts", "linear", "polynomial", "step", "wsd", "plateau"]
)
def test_every_schedule_peaks_after_the_warmup_and_stays_between_min_lr_and_lr(name):
    config = ScheduleConfig(name=name, warmup_steps=10, min_lr=1e-4, step_epochs=200)
    schedule = schedules.build(config, 1e-3, total_steps=100, steps_per_epoch=10)
    values = [schedule(k) for k in range(120)]
    assert values[0] == 0.0
    assert values[10] == max(values) == 1.0
    assert min(values[10:]) >= 0.1 - 1e-12


def test_wsd_holds_for_its_stable_ratio():
    config = ScheduleConfig(name="wsd", warmup_steps=10, stable_ratio=0.5)
    schedule = schedules.build(config, 1.0, total_steps=110, steps_per_epoch=10)
    assert {schedule(k) for k in range(10, 60)} == {1.0}
    assert schedule(85) == pytest.approx(0.5)
    assert schedule(110) == pytest.approx(0.0, abs=1e-15)


def test_cosine_momentum_meets_its_ends_and_its_middle():
    momentum = schedules.momentum(0.99, 1.0, total_steps=100, warmup_steps=20, shape="cosine")
    assert [momentum(0), momentum(20), momentum(60), momentum(100), momentum(500)] == pytest.approx(
        [0.99, 0.99, 0.995, 1.0, 1.0]
    )


def test_a_run_shorter_than_its_warmup_never_leaves_it():
    schedule = schedules.build(ScheduleConfig(warmup_steps=200), 1e-3, total_steps=100, steps_per_epoch=10)
    assert schedule(99) == pytest.approx(99 / 200)


def test_min_lr_above_lr_is_refused():
    with pytest.raises(UserError, match="min_lr"):
        schedules.build(ScheduleConfig(min_lr=1.0), 1e-3, total_steps=100, steps_per_epoch=10)


def test_the_table_is_float32_of_the_float64_schedule():
    table = schedules.table(schedules.cosine(1000), 1000)
    exact = [0.5 * (1 + math.cos(math.pi * k / 1000)) for k in range(1000)]
    np.testing.assert_array_equal(table[:1000], np.array(exact, np.float32))


def test_runs_of_nearly_the_same_length_get_tables_of_the_same_size_that_end_alike():
    tables = [schedules.table(lambda step: float(step), steps) for steps in (3, 700)]
    assert [table.shape for table in tables] == [(1024,), (1024,)]
    assert [table[-1] for table in tables] == [2.0, 699.0]
