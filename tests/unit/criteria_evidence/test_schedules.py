"""transformers' schedules as the original steps them, at every step to 1e-6 relative."""

import json
import pathlib
import types

import numpy as np
import pytest

from jaxtrain.systems.criteria_evidence.original import schedules

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "engine"


def golden(name):
    return json.loads((GOLDEN / name).read_text())


def assert_close(got, want):
    np.testing.assert_allclose(np.asarray(got, float), np.asarray(want, float), rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("case", golden("criteria_lr_tables.json")["cases"], ids=lambda c: f"{c['api']}-{c['name']}")
def test_transformers_tables(case):
    total = case["total_steps"]
    warmup = case.get("warmup_steps", int(total * case.get("warmup_ratio", 0)))
    name = "none" if case["scheduler_is_none"] else case["name"]
    schedule = schedules.transformers(name, total, warmup, lr=case["lr"], cycles=case.get("num_cycles"))
    assert_close([case["lr"] * schedule(k) for k in range(len(case["lr_at_step"]))], case["lr_at_step"])


def test_the_criteria_trainers_extra_step_skips_one_value_per_epoch():
    late = schedules.with_extra_step_per_epoch(lambda step: float(step), updates_per_epoch=4)
    assert [late(k) for k in range(9)] == [0, 1, 2, 3, 5, 6, 7, 8, 10]


def test_a_warmed_constant_rate_is_transformers_too():
    settings = types.SimpleNamespace(name="constant", warmup_steps=4, warmup_ratio=None, power=1.0)
    optim, train = types.SimpleNamespace(schedule=settings, lr=0.1), types.SimpleNamespace(steps=10, accumulate_steps=1)
    config = types.SimpleNamespace(compat="original", optim=optim, train=train)
    late = schedules.schedule(config, None, steps_per_epoch=100)
    assert [late(k) for k in range(6)] == [0, 0.25, 0.5, 0.75, 1, 1]
