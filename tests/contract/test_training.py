"""What every task gets from the engine, at its tiny size."""

import os
import time

import numpy as np
import pytest

from tests import processes
from tests.chaos.runs import points
from tests.contract.tasks import (
    ONE_OF_EACH_SYSTEM,
    TASKS,
    WHOLE,
    assert_equal,
    each,
    final_parameters,
    flat,
    tiny,
    tiny_file,
    whole_run,
)


@each(TASKS)
def test_the_loss_falls_and_stays_finite(name):
    losses = whole_run(name).losses
    assert np.isfinite(losses).all()
    assert np.mean(losses[-9:]) < np.mean(losses[:9])


@each(TASKS)
def test_the_step_compiles_exactly_once(name):
    messages = whole_run(name).compiled
    assert sum(message.startswith("Compiling jit(train_step)") for message in messages) == 1


@each(TASKS)
def test_weights_and_step_are_traced_without_asking_where_a_traced_value_lies(name):
    """jax answers with an error whose text looks through all operations so far: seconds for a large model."""
    assert len(whole_run(name).placed) == 0


@each(TASKS)
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(name, tmp_path):
    _kill_after_first_checkpoint(name, tmp_path, WHOLE)
    resumed = tiny(name, tmp_path, *WHOLE)
    resumed.train()
    whole = whole_run(name)
    assert_equal(whole.parameters, final_parameters(resumed))
    assert_equal(whole.moments, flat(resumed.state.opt_state))
    assert whole.points == points(tmp_path)


@each(TASKS)
def test_bfloat16_reaches_the_loss_of_fp32_to_five_per_cent(name, tmp_path):
    assert _loss_after_eight_steps(name, tmp_path, "bf16") == _as_in_fp32(name)


@each(ONE_OF_EACH_SYSTEM)
def test_float16_reaches_the_loss_of_fp32_to_five_per_cent(name, tmp_path):
    few_overflows = "precision.loss_scale=64"  # a skipped step would leave fp16 an update behind
    assert _loss_after_eight_steps(name, tmp_path, "fp16", few_overflows) == _as_in_fp32(name)


def _loss_after_eight_steps(name, folder, policy, *overrides):
    unseen = "evaluation.every_steps=null"  # an evaluation would be compiled too
    tiny(name, folder, *WHOLE, unseen, f"precision.policy={policy}", *overrides).train()
    return _mean_after_eight([values["loss"] for _, split, values in points(folder) if split == "train"])


def _as_in_fp32(name):
    return pytest.approx(_mean_after_eight(whole_run(name).losses), rel=0.05)


def _mean_after_eight(losses):
    return float(np.mean(losses[4:8]))  # one batch alone is noise


@each(ONE_OF_EACH_SYSTEM)
@pytest.mark.usefixtures("optimised")
def test_several_steps_per_call_give_the_same_bits_as_one(name, tmp_path):
    short = (*WHOLE, "evaluation.every_steps=null", "train.steps=12")
    runs = [tiny(name, tmp_path / str(n), *short, f"train.steps_per_call={n}") for n in (1, 4)]
    for trainer in runs:
        trainer.train()
    assert_equal(*map(final_parameters, runs))


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
