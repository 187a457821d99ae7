"""What every task gets from the engine, at its tiny size."""

import functools
import os
import pathlib
import tempfile
import time

import numpy as np
import pytest

from jaxtrain.task import find_task
from tests import processes
from tests.chaos.runs import points
from tests.contract.tasks import (
    PLAIN,
    TASKS,
    WHOLE,
    assert_equal,
    final_parameters,
    flat,
    largest_relative_difference,
    once_a_system,
    tiny,
    tiny_file,
    whole_run,
)

UNSEEN = ("train.steps=4", "evaluation.every_epochs=null")  # without an evaluation, whose program would be compiled too
EXACT = [name for name in TASKS if not find_task(name).couples_samples]


@pytest.mark.parametrize("name", TASKS)
def test_the_loss_falls_and_stays_finite(name):
    losses = whole_run(name).losses
    assert np.isfinite(losses).all()
    assert np.mean(losses[-9:]) < np.mean(losses[:9])


@pytest.mark.parametrize("name", TASKS)
def test_the_step_compiles_exactly_once(name):
    messages = whole_run(name).compiled
    assert sum(message.startswith("Compiling jit(train_step)") for message in messages) == 1


@pytest.mark.parametrize("name", TASKS)
def test_weights_and_step_are_traced_without_asking_where_a_traced_value_lies(name):
    """jax answers with an error whose text looks through all operations so far: seconds for a large model."""
    assert len(whole_run(name).placed) == 0


@pytest.mark.parametrize("name", TASKS)
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(name, tmp_path):
    _kill_after_first_checkpoint(name, tmp_path, WHOLE)
    resumed = tiny(name, tmp_path, *WHOLE)
    resumed.train()
    whole = whole_run(name)
    assert_equal(whole.parameters, final_parameters(resumed))
    assert_equal(whole.moments, flat(resumed.state.opt_state))
    assert whole.points == points(tmp_path)


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=once_a_system)])
@pytest.mark.parametrize("name", TASKS)
def test_eight_devices_equal_one(name, strategy, tmp_path):
    trainer = _of_sixteen(name, tmp_path, "shard.devices=8", f"shard.strategy={strategy}")
    trainer.train()
    assert largest_relative_difference(_on_one_device(name), final_parameters(trainer)) < 1e-5


def _of_sixteen(name, folder, *overrides):
    return tiny(name, folder, *UNSEEN, *PLAIN, "data.batch_size=16", *overrides)


@functools.cache  # for both strategies
def _on_one_device(name):
    with tempfile.TemporaryDirectory() as folder:
        trainer = _of_sixteen(name, pathlib.Path(folder))
        trainer.train()
        return final_parameters(trainer)


@pytest.mark.parametrize("name", EXACT)
def test_four_micro_batches_of_two_equal_a_batch_of_eight(name, tmp_path):
    parts = _one_step_of_eight(name, tmp_path, "train.accumulate_steps=4")
    assert largest_relative_difference(_whole_batch_of_eight(name), parts) < 1e-6


@once_a_system
@pytest.mark.parametrize("name", EXACT)
def test_four_devices_with_two_rows_each_equal_a_batch_of_eight(name, tmp_path):
    parts = _one_step_of_eight(name, tmp_path, "shard.devices=4", "shard.strategy=ddp_local")
    assert largest_relative_difference(_whole_batch_of_eight(name), parts) < 1e-6


def _one_step_of_eight(name, folder, *overrides):
    trainer = _without_noise(name, folder, "data.batch_size=8", "train.steps=1", *overrides)
    trainer.train()
    return final_parameters(trainer)


@functools.cache  # for both ways to cut it
def _whole_batch_of_eight(name):
    with tempfile.TemporaryDirectory() as folder:
        return _one_step_of_eight(name, pathlib.Path(folder))


def _without_noise(name, folder, *overrides):
    """The task's tiny trainer in evaluation mode of dropout, so that cutting a batch changes nothing."""
    import dataclasses

    trainer = tiny(name, folder, "evaluation.every_epochs=null", *PLAIN, *overrides)
    loss = trainer.task.loss
    quiet = lambda model, batch, config, rngs: loss(model, batch, config, None)
    trainer.program.task = dataclasses.replace(trainer.task, loss=quiet)
    return trainer


def _kill_after_first_checkpoint(name, folder, settings):
    own = ("tracking.tensorboard=false", "shard.devices=1", "train.steps_per_call=1")
    here = {"XLA_FLAGS": os.environ["XLA_FLAGS"]}  # the number of devices decides how many threads one has
    arguments = ("--config", str(tiny_file(name)), f"run.dir={folder}", *own, *settings)
    (process,) = running = processes.start(1, *arguments, **here)
    deadline = time.time() + 180
    while not list(folder.glob("checkpoints/*/meta.json")) and process.poll() is None and time.time() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert list(folder.glob("checkpoints/*/meta.json")), process.output()
    processes.end(running)
