"""Planning by the cross-entropy method in the space of the world model."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp


def rollout(predictor, start, actions):
    """Embeddings that follow `start` [width] under each plan of actions [plan, step, action]: [plan, step, width].

    The predictor's last output is fed back as the next embedding; one final pass over all steps gives the result.
    """
    plans, steps = actions.shape[:2]
    states = jnp.broadcast_to(start, (plans, 1, start.shape[-1]))
    for step in range(1, steps):
        following = predictor(states, actions[:, :step])[:, -1:]
        states = jnp.concatenate([states, following], axis=1)
    return predictor(states, actions)


def goal_distance(trajectory, goal):
    """Squared distance of the last state to the goal: [plan]."""
    return jnp.square(trajectory[:, -1] - goal).sum(-1)


@dataclasses.dataclass(frozen=True)
class CEMPlanner:
    """Sample plans, keep the cheapest, refit a normal to them, repeat.

    encoder: frames [batch, channel, S, S] -> [batch, width]; predictor: (embeddings, actions) -> embeddings, both in
    evaluation mode. low, high: bounds of every action. cost_fn: (trajectory [plan, step, width], goal) -> [plan].
    Source: Rubinstein 1999.
    """

    encoder: Callable
    predictor: Callable
    action_dim: int
    horizon: int = 10
    num_samples: int = 300
    num_elites: int = 30
    num_iterations: int = 30
    low: float = -1.0
    high: float = 1.0
    cost_fn: Callable = goal_distance

    def plan(self, frame, goal_frame, key, return_plan: bool = False):
        """The first action [action] towards goal_frame, or with return_plan the whole plan [step, action].

        frame, goal_frame: [channel, S, S]. key: a jax.random key.
        """
        start, goal = self.encoder(jnp.stack([frame, goal_frame]))
        shape = (self.horizon, self.action_dim)
        mean = jnp.full(shape, (self.low + self.high) / 2)
        std = jnp.full(shape, (self.high - self.low) / 2)

        def improve(carry, key):
            mean, std = carry
            noise = jax.random.normal(key, (self.num_samples, *shape))
            plans = jnp.clip(mean + std * noise, self.low, self.high)
            costs = self.cost_fn(rollout(self.predictor, start, plans), goal)
            elites = plans[jnp.argsort(costs)[: self.num_elites]]
            return (elites.mean(0), jnp.maximum(elites.std(0, ddof=1), 1e-3)), costs.min()

        (mean, _), _ = jax.lax.scan(improve, (mean, std), jax.random.split(key, self.num_iterations))
        return mean if return_plan else mean[0]
