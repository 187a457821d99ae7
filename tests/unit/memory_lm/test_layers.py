"""Runs of equal layers as one compiled body."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxtrain import nn
from jaxtrain.systems.memory_lm.adapter import MemoryAdapter
from jaxtrain.systems.memory_lm.backbone_config import read_config
from jaxtrain.systems.memory_lm.cache import View
from jaxtrain.systems.memory_lm.config import Memory
from jaxtrain.systems.memory_lm.layers import runs
from jaxtrain.train.step.state import ModelDef
from tests.unit.memory_lm.models import CHAPTERS, ids, small, spread

PLACE = {"memory_layer_placement": "first_k", "memory_layer_k": 1}
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "use_sliding_window": True,
    "sliding_window": 4,
    "max_window_layers": 3,
}


def scratch(scan_layers: bool):
    return small(model={"num_layers": 5, "scan_layers": scan_layers}, **PLACE)


def adapter(scan_layers: bool):
    memory = Memory(**CHAPTERS, **PLACE, use_lora=True, lora_dropout=0.0)
    model = MemoryAdapter(read_config(QWEN), memory, rngs=nnx.Rngs(0), scan_layers=scan_layers)
    spread(model)
    return model


@pytest.mark.parametrize(
    ("make", "pieces"), [(scratch, [(0, 1), (1, 4)]), (adapter, [(0, 1), (1, 2), (3, 2)])], ids=["scratch", "adapter"]
)
def test_scanned_layers_give_the_same_outputs_and_gradients(make, pieces):
    results = []
    for scan_layers in (False, True):
        model = make(scan_layers)
        ModelDef.of(model, lambda key: True)  # marks every variable with its key, as a run does
        graphdef, state = nnx.split(model)

        def objective(state, graphdef=graphdef):
            model = nnx.merge(graphdef, state)
            return jnp.square(model.logits(ids(), rngs=nn.Rngs(jax.random.key(0)))).mean()

        results.append(jax.tree.leaves(jax.jit(jax.value_and_grad(objective))(state)))
    for plain, scanned in zip(*results, strict=True):
        assert float(jnp.linalg.norm(plain - scanned)) <= 1e-5 * max(float(jnp.linalg.norm(plain)), 1e-6)
    assert runs(make(True), View(None, None, None, None, 2, 10)) == pieces
