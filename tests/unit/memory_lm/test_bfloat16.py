"""A frozen base model in bfloat16 under float32 adapters: the twin computes in each weight's dtype, as JAX does."""

import pathlib

import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain import config_io
from jaxtrain.systems.memory_lm import TASKS
from tests.unit.memory_lm.models import ids, spread
from torch_bridge.datasets import to_torch
from torch_bridge.state_dict import state_dict

CONFIG = pathlib.Path(__file__).parents[3] / "configs" / "memory_lm_adapter_tiny.yaml"


@pytest.mark.parametrize("strategy", ["prefix", "sequence", "token"])
def test_the_twin_of_a_bfloat16_base_gives_its_logits(strategy):
    routing = [f"memory.routing_strategy_{use}={strategy}" for use in ("train", "inference")]
    _, config = config_io.load(CONFIG, ["model.base_dtype=bfloat16", *routing])
    model = TASKS["adapter"].build_model(config, nnx.Rngs(0))
    spread(model)
    state = {key: to_torch(np.asarray(value)) for key, value in state_dict(model).items()}
    twin = TASKS["adapter"].twin.build(config).eval()
    assert {key: value.dtype for key, value in twin.state_dict().items()} == {k: v.dtype for k, v in state.items()}
    twin.load_state_dict(state, strict=True)
    given = ids(3, 12)
    with torch.no_grad():
        theirs = twin(torch.from_numpy(np.array(given)).long())[0]
        exact = twin.float()(torch.from_numpy(np.array(given)).long())[0]
    ours = np.asarray(model.logits(given)).astype(np.float32)
    errors = [np.linalg.norm(found - exact.numpy()) for found in (theirs.float().numpy(), ours)]
    assert errors[0] < 1.5 * errors[1]  # bfloat16's rounding, and no more of it than in JAX
    assert errors[1] < 0.02 * np.linalg.norm(exact)
