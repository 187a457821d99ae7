"""Evaluation and the crossing to torch, for every task."""

import jax
import numpy as np
import pytest

from jaxtrain.task import find_task
from tests.contract.tasks import TASKS, assert_equal, tiny
from torch_bridge.state_dict import load_state_dict, state_dict

EXACT = [name for name in TASKS if not find_task(name).couples_samples]


@pytest.mark.parametrize("name", EXACT)
def test_evaluation_does_not_depend_on_the_batch_size(name, tmp_path):
    trainers = [tiny(name, tmp_path, f"data.eval_batch_size={size}") for size in (3, 16)]
    trainers = [trainer for trainer in trainers if trainer.source("validation") is not None]
    results = [trainer.evaluate() for trainer in trainers]
    for metric in results[0]:
        assert results[0][metric] == pytest.approx(results[1][metric], rel=1e-5, abs=1e-6), metric


@pytest.mark.parametrize("name", EXACT)
def test_padding_a_batch_changes_neither_loss_nor_weight(name, tmp_path):
    trainer = tiny(name, tmp_path, "data.batch_size=4", "data.placement=host")
    whole = trainer.train_loader.host_batch(0)
    padded = jax.tree.map(lambda rows: np.concatenate([rows, rows[:2]]), whole)
    padded["valid"][-2:] = False
    losses = [trainer.task.loss(trainer.model(), batch, trainer.config, None) for batch in (whole, padded)]
    assert float(losses[1].value) == pytest.approx(float(losses[0].value), rel=1e-5)
    assert float(losses[1].weight) == float(losses[0].weight)


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_without_a_valid_sample_adds_nothing(name, tmp_path):
    trainer = tiny(name, tmp_path, "data.batch_size=4", "data.placement=host")
    batch = trainer.train_loader.host_batch(0)
    batch["valid"] = np.zeros_like(batch["valid"])
    loss = trainer.task.loss(trainer.model(), batch, trainer.config, None)
    assert (float(loss.value), float(loss.weight)) == (0.0, 0.0)


@pytest.mark.parametrize("name", TASKS)
def test_state_dict_round_trip_is_bit_identical(name, tmp_path):
    first, second = tiny(name, tmp_path), tiny(name, tmp_path, "seed=1")
    state = state_dict(first.model())
    model = second.model()
    load_state_dict(model, state, strict=True)
    assert_equal(state, state_dict(model))
