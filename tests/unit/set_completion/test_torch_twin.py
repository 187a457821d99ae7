"""The twin in plain torch, where benchmarks train it."""

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain import nn
from tests.contract.tasks import tiny
from torch_bridge.datasets import to_torch

ONE_ROW = ("sae.buffer_size=1", "sae.steps_before_train=1")  # whichever is drawn, it is the batch's last
AT_THE_END = ("sae.l1_warmup_steps=0", "sae.usage_warmup_steps=0", "sae.usage_period_steps=1", "sae.resample_steps=[]")


def test_the_sparse_autoencoders_training_loss_and_usage_are_the_twins(tmp_path):
    trainer = tiny(
        "set_completion.sae", tmp_path, "data.placement=host", *ONE_ROW, *AT_THE_END, "sae.usage_coefficient=1.5"
    )
    task, config = trainer.task, trainer.config
    model, twin = trainer.model(), task.twin.build(config)
    twin.load_state_dict({key: to_torch(value) for key, value in trainer.state_dict().items()})
    batch = trainer.train_loader.host_batch(0)
    batch["inputs"] = batch["targets"]
    given = jax.tree.map(to_torch, batch)
    theirs = task.twin.loss(twin.train(), given, config)
    ours = nnx.jit(lambda model, batch: task.loss(model, batch, config, nn.Rngs(jax.random.key(0))).value)
    assert float(ours(model, batch)) == pytest.approx(float(theirs.detach()), rel=1e-5)
    np.testing.assert_allclose(model.sae.usage_ema[...], twin.sae.usage_ema, rtol=1e-6)
    assert len(twin.recent) == 1


def test_the_twin_does_not_learn_before_the_buffer_holds_enough(tmp_path):
    trainer = tiny("set_completion.sae", tmp_path, "data.placement=host", "sae.steps_before_train=33")
    twin = trainer.task.twin.build(trainer.config).train()
    batch = jax.tree.map(to_torch, trainer.train_loader.host_batch(0))
    losses = [float(trainer.task.twin.loss(twin, batch, trainer.config).detach()) for _ in range(2)]
    assert losses[0] == 0 < losses[1]


def test_columns_have_unit_length_after_an_update(tmp_path):
    trainer = tiny("set_completion.sae", tmp_path)
    twin = trainer.task.twin.build(trainer.config)
    with torch.no_grad():
        twin.sae.decoder.weight.mul_(3)
    trainer.task.twin.after_update(twin, 1, trainer.config)
    norms = twin.sae.decoder.weight.norm(dim=0)
    torch.testing.assert_close(norms, torch.ones_like(norms))
