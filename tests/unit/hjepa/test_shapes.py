"""Keys, shapes, their order and the parameter counts of the original's five real configurations."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from jaxtrain.nn.vit import Encoder, vit_size
from jaxtrain.systems.hjepa.model import HJEPA
from jaxtrain.systems.hjepa.pretraining import is_trainable
from jaxtrain.systems.hjepa.world_model import LeWorldModel
from torch_bridge.layouts import named_variables, parameter_order

RECORDED = json.loads((pathlib.Path(__file__).parents[2] / "golden" / "hjepa" / "state_dict_shapes.json").read_text())
TINY = {"encoder_type": "vit_tiny_patch16_224", "embed_dim": 192, "predictor_depth": 4, "predictor_num_heads": 3}
BUILDS = {
    "HJEPA default": lambda r: HJEPA(rngs=r),
    "HJEPA vit_tiny, fpn add": lambda r: HJEPA(**TINY, use_fpn=True, fpn_feature_dim=128, rngs=r),
    "HJEPA vit_tiny, 4 levels": lambda r: HJEPA(
        **TINY | {"predictor_depth": 1},
        num_hierarchies=4,
        use_fpn=True,
        fpn_fusion_method="concat",
        projection_norm="batchnorm",
        use_layerscale=True,
        use_target_encoder=False,
        rngs=r,
    ),
    "LeWM": lambda r: LeWorldModel(rngs=r),
    "ContextEncoder": lambda r: Encoder(
        224, vit_size("vit_tiny_patch16_224"), rope_theta=1e4, layerscale_init=1e-5, rngs=r
    ),
}


def _recorded(name):
    return next(value for key, value in RECORDED.items() if key.startswith(name))


@functools.cache
def _built(name):
    """The model's variables as (key, shape, is a parameter), and its parameter order, traced without numbers."""
    found = {}

    def build():
        model = BUILDS[name](nnx.Rngs(0))
        found["variables"] = [(key, list(v.shape), isinstance(v, nnx.Param)) for key, v in named_variables(model)]
        found["order"] = parameter_order(model)
        return 0

    jax.eval_shape(build)
    return found["variables"], found["order"]


@pytest.mark.parametrize("name", BUILDS)
def test_keys_and_shapes_come_in_the_originals_order(name):
    got = [(key, shape) for key, shape, _ in _built(name)[0]]
    assert got == [(key, shape) for key, (shape, _) in _recorded(name)["state_dict"].items()]


@pytest.mark.parametrize("name", BUILDS)
def test_parameters_are_numbered_as_torch_numbers_them(name):
    assert _built(name)[1] == _recorded(name)["parameter_order"]


@pytest.mark.parametrize("name", BUILDS)
def test_parameter_counts(name):
    variables, order = _built(name)
    sizes = {key: int(np.prod(shape)) for key, shape, is_param in variables if is_param and key in order}
    trained = {key: size for key, size in sizes.items() if not key.startswith("target_encoder.")}
    assert (sum(sizes.values()), sum(trained.values())) == tuple(_recorded(name)["params"].values())


def test_only_the_target_and_the_unused_position_are_left_out_of_training():
    fixed = [key for key in _built("HJEPA default")[1] if not is_trainable(key, None)]
    assert [key for key in fixed if not key.startswith("target_encoder.")] == ["predictor.pos_embed_predictor"]
