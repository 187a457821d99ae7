"""The world model's planner and its conditions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.systems.hjepa.world_model import ActionPredictor, CEMPlanner


def test_the_planner_walks_to_the_goal_of_a_world_that_adds_actions():
    adds = lambda states, actions: states + actions
    planner = CEMPlanner(lambda frames: frames[:, 0, 0], adds, action_dim=2, horizon=3, num_iterations=20)
    start, goal = (jnp.asarray(place, jnp.float32)[None, None] for place in ([0.0, 0.0], [1.5, -0.9]))
    plan = jax.jit(lambda key: planner.plan(start, goal, key, return_plan=True))(jax.random.key(0))
    np.testing.assert_allclose(plan.sum(0), [1.5, -0.9], atol=0.05)


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
