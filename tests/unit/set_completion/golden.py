"""Where the recorded tables are, and small models to test with."""

import json
import pathlib
from functools import cache

from flax import nnx

from jaxtrain import config_io
from jaxtrain.systems.set_completion.model import SetCompletionModel

FOLDER = pathlib.Path(__file__).parents[2] / "golden" / "set_completion"
CONFIGS = pathlib.Path(__file__).parents[3] / "configs"


@cache
def table(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def small_model(**changes) -> SetCompletionModel:
    sizes = {"vocab_size": 12, "weapon_vocab_size": 3, "embedding_dim": 8, "hidden_dim": 8, "output_dim": 12}
    options = {"num_layers": 1, "num_heads": 2, "num_inducing_points": 3, "pad_token_id": 11}
    return SetCompletionModel(**{**sizes, **options, **changes}, rngs=nnx.Rngs(0))


def config(name: str, *overrides: str):
    """The checked config of configs/<name>.yaml."""
    return config_io.load(CONFIGS / f"{name}.yaml", overrides)[1]
