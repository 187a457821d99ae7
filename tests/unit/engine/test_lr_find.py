"""The learning-rate range test."""

import json

import jax
import numpy as np
import pytest

from jaxtrain import lr_find
from jaxtrain.errors import UserError
from jaxtrain.train.search.lr_range import RangeTest, range_test
from tests.unit.engine import runs
from tests.unit.engine.runs import arrays, assert_same_bits


def test_it_leaves_weights_optimizer_and_position_as_they_were(tmp_path):
    made = runs.trainer(tmp_path, runs.task(runs.Network))
    before = jax.tree.leaves(made.state)
    values = lambda: dict(enumerate(jax.device_get(jax.tree.leaves((made.state.params, made.state.opt_state)))))
    kept = values()
    range_test(made.program, steps=12)
    assert all(a is b for a, b in zip(before, jax.tree.leaves(made.state), strict=True))
    assert_same_bits(kept, values())
    untouched = runs.trained(tmp_path / "other", runs.task(runs.Network))
    made.train()
    assert_same_bits(arrays(made), arrays(untouched))


def test_rates_rise_exponentially_and_losses_are_those_before_the_update(tmp_path):
    made = runs.trainer(tmp_path, data__shuffle=False)
    found = range_test(made.program, 1e-6, 1e-2, steps=8)
    assert found.lr == pytest.approx([1e-6 * 1e4 ** (i / 8) for i in range(8)])
    batch = made.train_loader.host_batch(0)
    columns = jax.tree.map(lambda c: c[batch["index"]], runs.data())
    assert found.loss[0] == pytest.approx(float(runs.loss(made.model(), batch | columns, None, None).value), rel=1e-5)


def test_batches_that_differ_at_first_are_no_divergence(tmp_path):
    samples = {"x": np.repeat(np.float32([[0.1] * 4, [50.0] * 4, [50.0] * 4]), 8, 0), "y": np.zeros(24, np.float32)}
    found = range_test(runs.trainer(tmp_path, samples=samples, data__shuffle=False).program, 1e-9, 1e-8, steps=3)
    assert found.stopped == "finished"


def test_it_stops_when_the_loss_passes_four_times_the_first(tmp_path):
    found = range_test(runs.trainer(tmp_path, optim__name="sgd").program, 1e-3, 1e6, steps=60, clip=False)
    assert found.stopped in ("diverged", "not finite")
    assert len(found.lr) < 60


def test_suggestions_lie_on_the_slope_and_a_tenth_below_the_minimum():
    lr = np.logspace(-6, 0, 61)
    loss = 2 - 1.5 / (1 + np.exp(-4 * (np.log10(lr) + 3))) + np.where(lr > 1e-1, 10 * (lr - 1e-1), 0)
    found = RangeTest(lr.tolist(), loss.tolist(), "finished")
    assert 1e-3 / 3 < found.steepest < 1e-2  # the curve falls fastest at 1e-3, and smoothing lags
    assert found.minimum_tenth == pytest.approx(found.lr[found.minimum] / 10)
    assert found.steepest < found.lr[found.minimum]


def test_an_empty_range_is_refused(tmp_path):
    with pytest.raises(UserError, match="0 < min_lr < max_lr"):
        range_test(runs.trainer(tmp_path).program, 1.0, 1e-3)


def test_the_command_writes_json_and_a_picture(tmp_path, capsys):
    arguments = ["--config", "configs/digits_tiny.yaml", "--steps", "6", "--output", str(tmp_path)]
    assert lr_find.main([*arguments, f"run.dir={tmp_path / 'run'}", "shard.devices=1"]) == 0
    document = json.loads((tmp_path / "lr_find.json").read_text())
    assert set(document["suggestion"]) == {"steepest", "minimum_tenth"}
    assert len(document["lr"]) == len(document["loss"]) == 6
    assert (tmp_path / "lr_find.png").read_bytes().startswith(b"\x89PNG")
    assert "optim.lr=" in capsys.readouterr().out


def test_lr_auto_trains_at_the_steepest_rate_and_a_resumed_run_keeps_it(tmp_path):
    wanted = range_test(runs.trainer(tmp_path / "test").program).steepest
    whole = runs.trainer(tmp_path / "whole", optim__lr="auto")
    whole.train()
    assert whole.config.optim.lr == wanted
    assert f"optim.lr: auto is {wanted:.3g}" in (tmp_path / "whole/train.log").read_text()
    runs.trained(tmp_path / "cut", optim__lr="auto", train__steps=whole.total_steps // 2)
    resumed = runs.trainer(tmp_path / "cut", optim__lr="auto", train__steps=whole.total_steps)
    resumed.train()
    assert resumed.config.optim.lr == wanted
    assert (tmp_path / "cut/train.log").read_text().count("optim.lr: auto is") == 1
