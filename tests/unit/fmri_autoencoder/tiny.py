"""The tasks' tiny configs, and models with weights that cost no compilation."""

import pathlib
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from jaxtrain import config_io
from jaxtrain.systems.fmri_autoencoder.model import build_model

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"


def config(generation: str, *overrides: str):
    return config_io.load(CONFIGS / f"sherlock_{generation}_tiny.yaml", overrides)[1]


def model(generation: str, *overrides: str) -> nnx.Module:
    return filled(lambda: build_model(config(generation, *overrides), nnx.Rngs(0)))


def filled(build: Callable[[], nnx.Module]) -> nnx.Module:
    """The module with normal weights of variance 2 / fan_in, biases 0, gains and running variances 1."""
    rng, shapes = np.random.default_rng(0), nnx.eval_shape(build)

    def fill(path, leaf):
        name = str(path[-2].key if hasattr(path[-1], "name") else path[-1])
        if len(leaf.shape) > 1:
            fan_in = np.prod(leaf.shape[1:])
            return rng.normal(size=leaf.shape, scale=np.sqrt(2 / fan_in)).astype(leaf.dtype)
        return np.full(leaf.shape, name in ("weight", "running_var"), leaf.dtype)

    graph, state = nnx.split(shapes)
    return nnx.merge(graph, jax.tree_util.tree_map_with_path(fill, state))
