"""The world model's conditions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain.systems.hjepa import create_lewm
from jaxtrain.systems.hjepa.world_model import ActionPredictor, LeWorldModel
from torch_bridge.state_dict import load_state_dict


def test_an_untrained_predictor_ignores_its_actions():
    model = ActionPredictor(16, 3, depth=1, num_heads=2, max_seq_len=4, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 4, 16))
    first, second = (model(x, value * jnp.ones((2, 4, 3))) for value in (0.0, 5.0))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("embeddings", "actions", "match"),
    [((2, 4, 16), (2, 3, 3), "differ"), ((2, 16), (2, 3), "wanted"), ((2, 5, 16), (2, 5, 3), "max_seq_len=4")],
)
def test_shapes_that_do_not_fit_are_named(embeddings, actions, match):
    model = ActionPredictor(16, 3, depth=1, num_heads=2, max_seq_len=4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=match):
        model(jnp.zeros(embeddings), jnp.zeros(actions))


def test_create_lewm_gives_the_originals_module():
    module = create_lewm()
    assert sum(parameter.numel() for parameter in module.parameters()) == 9_685_056


def test_layer_scale_of_the_frame_encoder_crosses_to_torch():
    sizes = {"img_size": 32, "predictor_depth": 1, "predictor_num_heads": 4, "predictor_max_seq_len": 8}
    module = create_lewm(**sizes, use_layerscale=True, layerscale_init=0.5).eval()
    gammas = [value for key, value in module.state_dict().items() if key.endswith(("ls_attn.gamma", "ls_mlp.gamma"))]
    assert len(gammas) == 24
    assert all(bool((gamma == 0.5).all()) for gamma in gammas)
    ours = LeWorldModel(**sizes, use_layerscale=True, layerscale_init=0.5, rngs=nnx.Rngs(0))
    load_state_dict(ours, module.state_dict())
    draw = np.random.default_rng(0)
    frames, actions = draw.random((2, 3, 3, 32, 32), np.float32), draw.normal(size=(2, 3, 4)).astype(np.float32)
    with torch.no_grad():
        wanted = module(torch.from_numpy(frames), torch.from_numpy(actions))
    found = nnx.jit(lambda model, *given: model(*given))(ours, frames, actions)
    np.testing.assert_allclose(found.embeddings, wanted["embeddings"].numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.predictions, wanted["predictions"].numpy(), rtol=1e-4, atol=1e-5)
