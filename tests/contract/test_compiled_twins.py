"""The torch twins as benchmarks compile them: the loss of each compared system is one graph."""

import jax
import pytest
import torch

from benchmarks.systems import CASES, CONSTANT_RATE
from benchmarks.torch_side import compiled_whole, wrapped
from jaxtrain import Trainer, config_io
from torch_bridge.datasets import to_torch

BATCH = 4


@pytest.mark.parametrize("name", CASES)
def test_a_twins_loss_compiles_whole_and_once(name, tmp_path):
    case = CASES[name]["small"]
    settings = [
        *CONSTANT_RATE,
        f"data.batch_size={BATCH}",
        f"run.dir={tmp_path}",
        "data.placement=host",
        "shard.devices=1",
    ]
    task, config = config_io.load(case.config, [*case.overrides, *settings, "data.drop_last=true"])
    data = task.build_data(config, case.split) if case.data is None else case.data(config, 8 * BATCH)
    loader = Trainer(train_dataset=data, config=config, task=task, abstract=True).train_loader
    batches = [jax.tree.map(to_torch, loader.host_batch(step)) for step in range(5)]
    if task.twin.inputs is not None:
        batches = [task.twin.inputs(batch, config) for batch in batches]
    torch.manual_seed(0)
    module = task.twin.build(config).train()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compute = compiled_whole(wrapped(module, task.twin.loss, config), count)
    for batch in batches:
        loss = compute(batch)
        loss.backward()
        assert torch.isfinite(loss)
    assert 1 <= len(graphs) <= 3  # the buffer of recent activations begins empty, and its position becomes a symbol
    if name != "sparse_autoencoder":
        assert len(graphs) == 1
