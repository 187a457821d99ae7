"""The original's schedule tables, at every step to 1e-6 relative."""

import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxtrain.systems.memory_lm.original.schedules import original_schedule

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "engine"


def golden(name):
    return json.loads((GOLDEN / name).read_text())


def assert_close(got, want):
    np.testing.assert_allclose(np.asarray(got, float), np.asarray(want, float), rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize(("name", "case"), golden("memory_lr_schedules.json")["cases"].items())
def test_memory_lm_tables(name, case):
    case = dict(case)
    schedule = original_schedule(case.pop("scheduler"), **case)
    want = load_file(GOLDEN / "memory_lr_schedules.safetensors")[f"out/{name}"]
    assert_close([[base * schedule(k) for base in (1.0, 0.25)] for k in range(len(want))], want)


def test_memory_lm_refuses_ratios_outside_0_to_1():
    with pytest.raises(ValueError, match="warmup_ratio=1.5"):
        original_schedule("cosine", 10, warmup_ratio=1.5)
