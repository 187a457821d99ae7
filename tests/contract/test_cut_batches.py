"""What every task gets from a batch that is cut over devices or into micro-batches: the numbers of the whole one."""

import functools
import pathlib
import tempfile

from tests.contract.tasks import (
    EXACT,
    ONE_OF_EACH_SYSTEM,
    PLAIN,
    TASKS,
    each,
    final_parameters,
    largest_relative_difference,
    tiny,
)

UNSEEN = ("train.steps=4", "evaluation.every_epochs=null")  # without an evaluation, whose program would be compiled too


@each(TASKS)
def test_eight_devices_with_sharded_parameters_equal_one(name, tmp_path):
    assert _difference_on_eight_devices(name, tmp_path, "fsdp") < 1e-5


@each(ONE_OF_EACH_SYSTEM)
def test_eight_devices_with_replicated_parameters_equal_one(name, tmp_path):
    assert _difference_on_eight_devices(name, tmp_path, "ddp") < 1e-5


def _difference_on_eight_devices(name, folder, strategy):
    trainer = _of_sixteen(name, folder, "shard.devices=8", f"shard.strategy={strategy}")
    trainer.train()
    return largest_relative_difference(_on_one_device(name), final_parameters(trainer))


def _of_sixteen(name, folder, *overrides):
    return tiny(name, folder, *UNSEEN, *PLAIN, "data.batch_size=16", *overrides)


@functools.cache  # for both strategies
def _on_one_device(name):
    with tempfile.TemporaryDirectory() as folder:
        trainer = _of_sixteen(name, pathlib.Path(folder))
        trainer.train()
        return final_parameters(trainer)


@each(EXACT)
def test_four_micro_batches_of_two_equal_a_batch_of_eight(name, tmp_path):
    parts = _one_step_of_eight(name, tmp_path, "train.accumulate_steps=4")
    assert largest_relative_difference(_whole_batch_of_eight(name), parts) < 1e-6


@each([name for name in ONE_OF_EACH_SYSTEM if name in EXACT])
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
