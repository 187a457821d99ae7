"""Every schedule table of the original, at every step to 1e-6 relative."""

import json
import pathlib
import types

import numpy as np
import pytest

from jaxtrain.optim import schedules
from jaxtrain.systems.hjepa.original.schedules import CosineScheduler, LinearScheduler
from jaxtrain.systems.hjepa.pretraining import schedule

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "engine"


def golden(name):
    return json.loads((GOLDEN / name).read_text())


def assert_close(got, want):
    np.testing.assert_allclose(np.asarray(got, float), np.asarray(want, float), rtol=1e-6, atol=1e-15)


def hjepa_schedule(kind, base_value, final_value, epochs, steps_per_epoch, warmup_epochs=0, start_warmup_value=0.0):
    if kind == "ema":
        return schedules.momentum(base_value, final_value, epochs * steps_per_epoch, warmup_epochs * steps_per_epoch)
    make = {"cosine": CosineScheduler, "linear": LinearScheduler}[kind]
    return make(base_value, final_value, epochs, steps_per_epoch, warmup_epochs, start_warmup_value)


@pytest.mark.parametrize(("name", "table"), golden("hjepa_schedules.json")["tables"].items())
def test_hjepa_tables(name, table):
    schedule = hjepa_schedule(table["kind"], **table["kwargs"])
    assert_close([schedule(k) for k in range(len(table["values"]))], table["values"])


def test_hjepa_levels():
    table = golden("hjepa_schedules.json")["hierarchical"]
    kinds = {"CosineScheduler": "cosine", "LinearScheduler": "linear", "EMAScheduler": "ema"}
    every = schedules.levels([hjepa_schedule(kinds[row["class"]], **row["kwargs"]) for row in table["levels"]])
    assert_close([every(k) for k in range(len(table["values"]))], table["values"])


@pytest.mark.parametrize(("name", "trace"), golden("hjepa_schedules.json")["trainer_traces"].items())
def test_hjepa_rates_as_its_trainer_applies_them(name, trace):
    settings, per_epoch = trace["training_config"], trace["steps_per_epoch"]
    make = {"cosine": CosineScheduler, "linear": LinearScheduler}[settings["lr_schedule"]]
    rate = make(settings["lr"], 1e-6, settings["epochs"], per_epoch, settings["warmup_epochs"])  # min_lr is not read
    config = types.SimpleNamespace(compat="original")
    late = schedule(config, lambda step: rate(step) / settings["lr"], per_epoch)
    got = [settings["lr"] * late(k) for k in range(trace["optimizer_steps"])]
    assert_close(got, trace["lr_applied_by_optimizer_step"])
