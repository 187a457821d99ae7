"""Runs that differ in numbers train in one program, and each ends where it would have ended alone."""

import jax
import jax.numpy as jnp
import pytest

from jaxtrain import config_io
from jaxtrain.train.search.vmap_trainer import Population
from tests.contract.tasks import TASKS, each, final_parameters, largest_relative_difference, tiny, tiny_file

SETTINGS = [
    ["seed=1", "optim.lr=0.002", "model.dropout=0.1"],
    ["seed=2", "optim.lr=0.005", "model.dropout=0.3"],
    ["seed=2", "optim.lr=0.005", "model.dropout=0.3", "optim.weight_decay=0.5"],
]
# eps: the gradient of attention's key biases is 0 but for rounding, which Adam would turn into steps.
SHORT = ["optim.eps=1e-6", "train.epochs=null", "train.steps=12", "evaluation.every_steps=6", "train.steps_per_call=4"]


def members(name, folder, settings):
    template = tiny(name, folder / "template", *SHORT, abstract=True)
    for number, own in enumerate(settings):
        base = [f"run.dir={folder / str(number)}", "tracking.tensorboard=false", "run.quiet=true", "shard.devices=1"]
        yield template.variant(config_io.load(tiny_file(name), [*base, *SHORT, *own])[1])


def test_a_members_weights_and_metrics_are_those_of_its_own_run(tmp_path):
    outcomes = Population(
        [member.program for member in members("digits.classify", tmp_path / "together", SETTINGS)]
    ).train()
    assert outcomes[0].program.compilations == 1
    for outcome, alone in zip(outcomes, members("digits.classify", tmp_path / "alone", SETTINGS), strict=True):
        history = alone.train()
        assert largest_relative_difference(final_parameters(alone), final_parameters(outcome.program)) < 1e-5
        for one, other in zip(history["val_history"], outcome.history["val_history"], strict=True):
            assert one == pytest.approx(other, rel=1e-4)


@each(TASKS)
def test_the_step_of_every_task_can_be_mapped_over_runs(name, tmp_path):
    trainer = tiny(name, tmp_path, abstract=True)
    state, batch, hyper, columns = trainer.program.abstract_arguments()
    stack = lambda tree: jax.eval_shape(lambda leaves: jax.tree.map(lambda x: jnp.stack([x, x]), leaves), tree)
    mapped = jax.vmap(trainer.program.step(), in_axes=(0, None, 0, None))
    new, metrics = jax.eval_shape(mapped, stack(state), batch, stack(hyper), columns)
    assert metrics["loss"].shape == (2,)
    assert jax.tree.map(lambda leaf: leaf.shape, new) == jax.tree.map(lambda leaf: leaf.shape, stack(state))
