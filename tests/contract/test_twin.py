"""Every task's export in its plain torch twin."""

import jax
import numpy as np
import pytest
import torch

from jaxtrain.task import find_task
from tests.contract.tasks import TASKS, untrained
from torch_bridge import verify
from torch_bridge.datasets import to_numpy, to_torch


@pytest.mark.parametrize("name", [name for name in TASKS if find_task(name).twin is not None])
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
    layers = verify.compare(trainer.task, trainer.config, trainer.model(), twin, [batch])
    assert layers.first is None, str(layers)
