import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.systems.set_completion.losses import completion_loss, run_model
from jaxtrain.systems.set_completion.masking import PADDING
from jaxtrain.systems.set_completion.model import SetCompletionModel
from jaxtrain.systems.set_completion.sae import SparseAutoencoder
from tests.unit.set_completion.golden import small_model, table
from torch_bridge.layouts import named_variables

TOKENS = jnp.array([[1, 2, 3, 11], [4, 5, 11, 11]])
WEAPONS = jnp.array([[0], [2]])
MASK = TOKENS == 11
forward = nnx.jit(lambda model, *given: model(*given))


def test_order_of_tokens_changes_nothing():
    model = small_model()
    mixed = forward(model, TOKENS[:, ::-1], WEAPONS, MASK[:, ::-1])
    np.testing.assert_allclose(mixed, forward(model, TOKENS, WEAPONS, MASK), atol=1e-6)


def test_more_padding_changes_nothing():
    model = small_model()
    padded = jnp.pad(TOKENS, ((0, 0), (0, 5)), constant_values=11)
    np.testing.assert_allclose(
        forward(model, padded, WEAPONS, padded == 11), forward(model, TOKENS, WEAPONS, MASK), atol=1e-6
    )


def test_without_a_mask_every_token_counts():
    model = small_model()
    everything = jnp.zeros(TOKENS.shape, bool)
    np.testing.assert_array_equal(model(TOKENS, WEAPONS), model(TOKENS, WEAPONS, everything))


def test_weapons_of_one_axis_are_one_per_row():
    model = small_model()
    np.testing.assert_array_equal(model(TOKENS, WEAPONS[:, 0], MASK), model(TOKENS, WEAPONS, MASK))


def test_the_padding_row_gets_no_gradient_even_where_it_is_visible():
    graph, state = nnx.split(small_model())
    total = lambda state: nnx.merge(graph, state)(TOKENS, WEAPONS).sum()
    grads = jax.jit(jax.grad(total))(state)
    assert not np.any(grads["ability_embedding"]["weight"].get_value()[11])
    assert np.any(grads["ability_embedding"]["weight"].get_value()[1])


def test_a_row_of_padding_alone_is_nan_in_the_model_and_guarded_in_training():
    model, ids = small_model(), jnp.array([[1, 2], [PADDING, PADDING]])
    tokens = jnp.where(ids < 0, 11, ids)
    assert np.isnan(forward(model, tokens, WEAPONS, ids < 0)).any(1).tolist() == [False, True]
    _, logits, present = run_model(model, ids, WEAPONS)
    assert present.tolist() == [True, False]
    assert np.isfinite(logits).all()


def test_dropout_acts_in_training_only():
    from jaxtrain.nn import Rngs

    model = small_model(dropout=0.5)
    assert not np.array_equal(model(TOKENS, WEAPONS, MASK, Rngs(jax.random.key(0))), model(TOKENS, WEAPONS, MASK))


def test_loss_equals_torch():
    import torch

    logits = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32) * 20
    targets = (logits > 3).astype(np.float32)
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(torch.tensor(logits), torch.tensor(targets))
    np.testing.assert_allclose(completion_loss(jnp.asarray(logits), targets).mean(), wanted, rtol=1e-6)


def test_state_dict_keys_order_and_shapes_are_the_originals():
    checked = 0
    for name, entry in table("state_dict_keys").items():
        if not isinstance(entry, dict):
            continue
        if "config" in entry:
            build = lambda entry=entry: SetCompletionModel(**entry["config"], rngs=nnx.Rngs(0))
        else:
            width, factor = name.removeprefix("SparseAutoencoder(").rstrip(")").split(",")
            build = lambda width=width, factor=factor: SparseAutoencoder(int(width), float(factor), rngs=nnx.Rngs(0))
        found = []
        jax.eval_shape(lambda build=build: found.extend(_shapes(build())))
        assert found == entry["keys"], name
        checked += 1
    assert checked == 6


def _shapes(model):
    return [[key, list(variable.shape)] for key, variable in named_variables(model)]
