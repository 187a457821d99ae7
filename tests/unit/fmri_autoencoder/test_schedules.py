"""The originals' learning rates, at every step to 1e-6 relative."""

import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder.original.schedules import OriginalRate, gen1_rate, head_rate

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "engine"


def golden(name):
    return json.loads((GOLDEN / name).read_text())


def assert_close(got, want):
    np.testing.assert_allclose(np.asarray(got, float), np.asarray(want, float), rtol=1e-6, atol=1e-15)


FMRI = golden("fmri_lr_schedule.json")


def rule(case) -> OriginalRate:
    return OriginalRate(
        base=case["learning_rate"],
        steps=case["steps"],
        epochs=case["num_epochs"],
        warmup_epochs=case.get("warmup_epochs", 5),
        min_lr=case.get("min_lr", 1e-6),
        kind=case.get("scheduler_type", "cosine"),
    )


@pytest.mark.parametrize("name", FMRI["cases"])
def test_fmri_first_generation_tables(name):
    case = FMRI["cases"][name]
    rate = gen1_rate(rule(case))
    want = load_file(GOLDEN / "fmri_lr_schedule.safetensors")[f"gen1/{name}/lr"]
    assert_close([rate(k) for k in range(len(want))], want)


@pytest.mark.parametrize("name", [n for n in FMRI["cases"] if f"head/{n}" not in FMRI["errors"] and n != "none"])
def test_fmri_second_generation_tables(name):
    case = FMRI["cases"][name]
    rate = head_rate(rule(case))
    want = load_file(GOLDEN / "fmri_lr_schedule.safetensors")[f"head/{name}/lr"]
    assert_close([rate(k) for k in range(len(want))], want)


def test_fmri_second_generation_refuses_a_rate_below_its_start():
    with pytest.raises(UserError, match="below the warm-up's start of 1e-5"):
        head_rate(OriginalRate(base=5e-6, steps=4, epochs=2, warmup_epochs=1))
