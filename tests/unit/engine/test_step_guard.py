"""Steps that are not applied: float16 overflow, NaN policies, loss spikes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.task import Loss
from jaxtrain.train.loop.run_record import NotFiniteError
from jaxtrain.train.step.step_guard import SCALE_GROWTH_STEPS, next_scale
from tests.unit.engine import runs
from tests.unit.engine.runs import arrays, assert_same_bits, points, trained

ORDER = {"data__shuffle": False, "data__batch_size": 8}  # step k reads samples 8 k to 8 k + 7


def planted(value, sample=16):
    """The small data with one poisonous sample, which step 2 reads."""
    data = runs.data()
    data["x"][sample] = value
    return data


# --- float16 ------------------------------------------------------------------------------------------------------


def test_a_float16_overflow_skips_the_step_and_halves_the_scale_and_training_recovers(tmp_path):
    settings = {**ORDER, "precision__policy": "fp16", "train__steps": 30, "optim__lr": 1e-3}
    made = trained(tmp_path, None, planted(1e30), **settings)  # infinite in float16, in the forward pass
    log = points(tmp_path)
    poisoned = [3, 9, 15, 21, 27]  # six steps make an epoch
    scales = [p["loss_scale"] for p in log]
    for step in poisoned:
        assert scales[step] == scales[step - 1] / 2
    applied = int(made.state.updates)
    assert applied + log[-1]["skipped_steps"] == 30
    assert int(made.state.step) == 30
    assert log[-1]["skipped_steps"] >= len(poisoned)
    assert log[-1]["loss"] < log[3]["loss"] or log[-2]["loss"] < log[4]["loss"]
    assert all(np.isfinite(value).all() for value in arrays(made).values())


def test_a_skipped_step_moves_neither_weights_nor_moments_nor_schedule(tmp_path):
    schedule = {"name": "linear", "warmup_steps": 0}
    settings = {**ORDER, "precision__policy": "fp16", "optim__schedule": schedule, "train__steps": 4}
    made = runs.trainer(tmp_path, None, planted(1e30, sample=0), **settings)
    before = jax.device_get((made.state.params, made.state.opt_state.mu))
    program, hyper = made.program.train_step(), made.program.hyper()
    batch = next(made.train_loader.batches([(0, 1)]))[2]
    made.state, metrics = program(made.state, batch, hyper, made.program.columns(made.train_loader))
    assert bool(metrics["skipped"])
    for first, second in zip(before, jax.device_get((made.state.params, made.state.opt_state.mu)), strict=True):
        assert_same_bits(first, second)
    assert (int(made.state.step), int(made.state.updates)) == (1, 0)


def test_the_scale_doubles_after_2000_good_steps_as_torchs():
    import torch

    scale = {"value": jnp.float32(2.0**16), "good_steps": jnp.int32(0)}
    scaler = torch.amp.GradScaler("cpu", growth_interval=SCALE_GROWTH_STEPS)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    advance = jax.jit(next_scale)
    for step in range(4500):
        finite = step not in (10, 2500)
        scale = advance(scale, jnp.bool_(finite))
        torch._amp_update_scale_(
            scaler._scale, scaler._growth_tracker, torch.tensor(float(not finite)), 2.0, 0.5, SCALE_GROWTH_STEPS
        )
        if step % 250 == 0 or not finite:
            assert float(scale["value"]) == float(scaler._scale)
    assert float(scale["value"]) == float(scaler._scale)


def test_scaling_leaves_the_gradients_as_they_are(tmp_path):
    norms = []
    for scale in (1.0, 256.0):
        made = runs.trainer(tmp_path, precision__policy="fp16")
        made.state = made.state.replace(scale=made.state.scale | {"value": jnp.float32(scale)})
        batch = next(made.train_loader.batches([(0, 1)]))[2]
        _, metrics = made.program.train_step()(
            made.state, batch, made.program.hyper(), made.program.columns(made.train_loader)
        )
        norms.append(float(metrics["grad_norm"]))
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


# --- NaN and infinity -----------------------------------------------------------------------------------------------


def test_stop_keeps_the_last_good_weights_and_names_the_samples(tmp_path):
    made = runs.trainer(tmp_path, None, planted(np.nan), checkpoint__every_steps=1, **ORDER)
    with pytest.raises(NotFiniteError, match="step 3"):
        made.train()
    report = json.loads((tmp_path / "not_finite.json").read_text())
    assert report["indices"] == list(range(16, 24))
    assert "grad_norm" in report["values"]
    assert all(np.isfinite(value).all() for value in arrays(made).values())


def test_skip_goes_on_without_the_bad_batches_and_counts_them(tmp_path):
    made = trained(tmp_path, None, planted(np.nan), train__nan_policy="skip", train__steps=12, **ORDER)
    assert points(tmp_path)[-1]["skipped_steps"] == 2
    assert int(made.state.updates) == 10
    assert all(np.isfinite(value).all() for value in arrays(made).values())


def test_skip_ends_the_run_after_max_skipped_steps(tmp_path):
    settings = {"train__nan_policy": "skip", "train__max_skipped_steps": 1, "train__steps": 12}
    with pytest.raises(NotFiniteError, match="step 9"):
        trained(tmp_path, None, planted(np.nan), **settings, **ORDER)


def test_ignore_applies_the_update(tmp_path):
    made = trained(tmp_path, None, planted(np.nan), train__nan_policy="ignore", **ORDER)
    assert int(made.state.updates) == 8
    assert np.isnan(made.state.params["fc1.weight"]).any()


# --- spikes and empty batches -----------------------------------------------------------------------------------------


def test_a_spike_is_skipped_and_a_lasting_rise_is_followed(tmp_path):
    data = runs.data(8 * 40)
    data["y"][8 * 30 : 8 * 31] *= 1e4  # one batch far off
    settings = {**ORDER, "train__spike_factor": 20.0, "train__steps": 40, "optim__lr": 1e-4}
    made = trained(tmp_path, None, data, **settings)
    assert points(tmp_path)[-1]["skipped_steps"] == 1
    assert int(made.state.updates) == 39
    assert float(made.state.guard["mean_norm"]) < 100


def test_a_batch_of_weight_0_moves_nothing_but_the_data_position(tmp_path):
    def no_loss(model, batch, config, rngs):
        return Loss((model(batch["x"]) * 0).sum(), jnp.float32(0))

    import dataclasses

    made = runs.trainer(tmp_path, dataclasses.replace(runs.task(), loss=no_loss), optim__weight_decay=0.5)
    before = arrays(made)
    made.train()
    assert_same_bits(before, arrays(made))
    assert (int(made.state.step), int(made.state.updates)) == (8, 0)
