"""Evaluation and the crossing to torch, for every task."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain.task import find_task
from jaxtrain.train.checkpoint import init_from, torch_checkpoint
from tests.contract.tasks import EXACT, PADDED, TASKS, assert_equal, each, tiny, untrained
from torch_bridge import files, verification
from torch_bridge.datasets import to_numpy, to_torch
from torch_bridge.state_dict import load_state_dict, state_dict

RANKED = ("auroc",)  # of an untrained model: scores that rounding alone tells apart may change places


def loss_of(name, batch):
    """The task's Loss of the untrained model in evaluation mode."""
    return _compiled_loss(name)(nnx.split(untrained(name).model())[1], batch)


@functools.cache
def _compiled_loss(name):
    trainer = untrained(name)
    graph = nnx.split(trainer.model())[0]
    return jax.jit(lambda state, batch: trainer.task.loss(nnx.merge(graph, state), batch, trainer.config, None))


@each(EXACT)
def test_evaluation_does_not_depend_on_the_batch_size(name, tmp_path):
    trainers = [tiny(name, tmp_path, "data.eval_batch_size=3"), untrained(name)]  # of 16
    trainers = [trainer for trainer in trainers if trainer.source("validation") is not None]
    results = [trainer.evaluate() for trainer in trainers]
    for metric in results[0] if results else ():
        rounding = 1e-2 if metric in RANKED else 1e-6
        assert results[0][metric] == pytest.approx(results[1][metric], rel=1e-5, abs=rounding), metric


@each([name for name in EXACT if name in PADDED])
def test_padding_a_batch_changes_neither_loss_nor_weight(name):
    whole = untrained(name).train_loader.host_batch(0)
    padded = jax.tree.map(lambda rows: np.concatenate([rows, rows[:2]]), whole)
    padded["valid"][-2:] = False
    losses = [loss_of(name, batch) for batch in (whole, padded)]
    assert float(losses[1].value) == pytest.approx(float(losses[0].value), rel=1e-5)
    assert float(losses[1].weight) == float(losses[0].weight)


@each(PADDED)
def test_a_batch_without_a_valid_sample_adds_nothing(name):
    batch = untrained(name).train_loader.host_batch(0)
    batch["valid"] = np.zeros_like(batch["valid"])
    loss = loss_of(name, batch)
    assert (float(loss.value), float(loss.weight)) == (0.0, 0.0)


@each(TASKS)
def test_state_dict_round_trip_is_bit_identical(name):
    trainer = untrained(name)
    state, different = trainer.state_dict(), as_if_trained(trainer.state, updates=7)
    model = trainer.program.model_def.merge(different.params, different.frozen, different.buffers)
    load_state_dict(model, state, strict=True)
    assert_equal(state, state_dict(model))


@each(TASKS)
def test_parameters_buffers_and_optimizer_state_cross_to_torch_and_back_bit_for_bit(name, tmp_path):
    """The file goes through torch.load, torch.optim and torch.save."""
    trainer = untrained(name)
    fresh = trainer.state
    wanted = as_if_trained(fresh, updates=7)
    path = files.save(as_torch_checkpoint(trainer, wanted), tmp_path / "jax.pt")
    torch.save(through_torch(torch.load(path, weights_only=True)), tmp_path / "torch.pt")
    try:
        init_from.apply(trainer.program, tmp_path / "torch.pt")
        found = trainer.state
    finally:
        trainer.state = fresh
    for part in ("params", "frozen", "buffers", "opt_state", "step", "updates"):
        leaves = [jax.device_get(jax.tree.leaves(getattr(state, part))) for state in (wanted, found)]
        assert_equal(*(dict(enumerate(arrays)) for arrays in leaves))


@each([name for name in TASKS if find_task(name).twin is not None])
def test_the_torch_twin_loads_the_export_strictly_and_agrees_to_1e_5_and_in_every_layer(name):
    trainer = untrained(name)
    twin = trainer.task.twin.build(trainer.config).eval()
    twin.load_state_dict({key: to_torch(value) for key, value in trainer.state_dict().items()}, strict=True)
    batch = trainer.train_loader.host_batch(0)
    with torch.no_grad():
        theirs = to_numpy(trainer.task.twin.call(twin, jax.tree.map(to_torch, batch)))
    ours = jax.device_get(trainer.task.outputs(trainer.model(), batch))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * max(np.linalg.norm(b), 1e-6)
    layers = verification.compare(trainer.task, trainer.config, trainer.model(), twin, [batch])
    assert layers.first is None, str(layers)


def as_if_trained(state, updates: int):
    """The state with every array replaced by numbers that no initialisation gives; counters stand at `updates`."""
    rng = np.random.default_rng(0)

    def fill(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        if leaf.dtype == jnp.bool_:
            return jnp.asarray(rng.integers(0, 2, leaf.shape), bool)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.full(leaf.shape, updates, leaf.dtype)
        return jnp.asarray(rng.normal(size=leaf.shape) ** 2, leaf.dtype)

    parts = ("params", "frozen", "buffers", "opt_state", "step", "updates")
    return state.replace(**{part: jax.tree.map(fill, getattr(state, part)) for part in parts})


def as_torch_checkpoint(trainer, state) -> dict:
    fields = ("params", "frozen", "buffers", "opt_state", "step", "updates")
    state = {name: getattr(state, name) for name in fields}
    return torch_checkpoint.tree(
        trainer.program.resolved,
        trainer.program.model_def,
        trainer.program.optimizer,
        state,
        trainer.program.schedule,
        trainer.steps_per_epoch,
    )


def through_torch(saved: dict) -> dict:
    """The checkpoint with its optimizer state as torch's own optimizer saves it after loading it."""
    make = {"torch.optim.AdamW": torch.optim.AdamW, "torch.optim.Adam": torch.optim.Adam}.get(
        saved["optimizer_class"], functools.partial(torch.optim.SGD, lr=1.0)
    )
    groups = [
        {"params": [(key, torch.nn.Parameter(saved["model"][key])) for key in group["param_names"]]}
        for group in saved["optimizer"]["param_groups"]
    ]
    optimizer = make(groups)
    optimizer.load_state_dict(saved["optimizer"])
    return {**saved, "optimizer": optimizer.state_dict()}
