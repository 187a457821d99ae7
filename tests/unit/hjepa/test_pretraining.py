"""The pre-training task: targets, masks, padding, dropping, the original's procedure."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain import config_io
from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa import losses, pretraining, regularizers, tokens
from jaxtrain.systems.hjepa.losses import PURE, LossInputs
from jaxtrain.systems.hjepa.torch_twin import HJEPA as TorchHJEPA
from jaxtrain.systems.hjepa.torch_twin import loss as torch_loss
from jaxtrain.systems.hjepa.views import views_of
from torch_bridge.datasets import to_torch
from torch_bridge.layouts import named_variables
from torch_bridge.state_dict import state_dict

pytestmark = pytest.mark.slow

TINY = "configs/hjepa_tiny.yaml"


def config(*overrides):
    return config_io.load(TINY, ["train.steps=10", "model.vit.depth=1", *overrides])[1]


def model_of(settings):
    return nnx.clone(_model_of(settings.model_dump_json()))


@functools.cache
def _model_of(text):
    settings = config_io.check(json.loads(text))[1]
    build = lambda: pretraining.build_model(settings, nnx.Rngs(0))
    return nnx.merge(nnx.graphdef(nnx.eval_shape(build)), jax.jit(lambda: nnx.state(build()))())


def batch(size=6, valid=None):
    rng = np.random.default_rng(0)
    return {
        "image": jnp.asarray(rng.integers(0, 255, (size, 1, 8, 8), dtype=np.uint8)),
        "index": jnp.arange(size),
        "valid": jnp.ones(size, bool) if valid is None else jnp.asarray(valid),
        "label": jnp.zeros(size, jnp.int32),
    }


def weights(module):
    return {key: np.asarray(variable[...]) for key, variable in named_variables(module)}


def test_the_target_starts_as_a_copy_and_compat_original_does_not():
    for compat, equal in (("correct", True), ("original", False)):
        model = model_of(config(f"compat={compat}"))
        ours, theirs = weights(model.context_encoder), weights(model.target_encoder)
        key = "vit.blocks.0.attn.qkv.weight"
        assert np.array_equal(ours[key], theirs[key]) is equal
        np.testing.assert_array_equal(ours["vit.pos_embed"], theirs["vit.pos_embed"])


def test_the_target_moves_by_the_momentum_of_the_finished_step():
    settings = config("model.ema.momentum=0.9", "model.ema.momentum_end=1.0", "model.ema.ramp_steps=10")
    model = model_of(settings)
    before = weights(model.target_encoder)["vit.norm.bias"]
    model.context_encoder.vit.norm.bias[...] = before + 1.0
    pretraining.after_update(model, 5, settings)  # the fifth update: momentum 0.9 + 0.1 * 4 / 10
    np.testing.assert_allclose(weights(model.target_encoder)["vit.norm.bias"], before + 0.06, atol=1e-6)


def test_compat_original_mixes_in_the_weights_before_the_update():
    settings = config("compat=original", "model.ema.momentum=0.9", "model.ema.momentum_end=0.9")
    model = model_of(settings)
    target, old = weights(model.target_encoder)["vit.cls_token"], weights(model.context_encoder)["vit.cls_token"]
    model.context_encoder.vit.cls_token[...] = old + 5.0
    pretraining.after_update(model, 1, settings)
    np.testing.assert_allclose(weights(model.target_encoder)["vit.cls_token"], 0.9 * target + 0.1 * old, atol=1e-6)
    pretraining.after_update(model, 2, settings)
    moved = 0.9 * (0.9 * target + 0.1 * old) + 0.1 * (old + 5.0)
    np.testing.assert_allclose(weights(model.target_encoder)["vit.cls_token"], moved, atol=1e-5)


def test_compat_original_runs_step_0_at_the_full_rate_and_the_rest_one_late():
    planned = lambda step: step / 10
    late = pretraining.schedule(config("compat=original"), planned, 5)
    assert [late(step) for step in range(4)] == [1.0, 0.0, 0.1, 0.2]
    assert pretraining.schedule(config(), planned, 5) is planned


@pytest.mark.parametrize("kind", ["fixed", "ragged"])
def test_padded_rows_change_neither_loss_nor_weight(kind):
    settings = config(f"masking.kind={kind}")
    model = model_of(settings)
    call = jax.jit(lambda b: pretraining.loss(model, b, settings, None)[:2])
    whole = call(batch(4))
    padded = call(batch(6, [True] * 4 + [False] * 2))
    np.testing.assert_allclose(whole, padded, rtol=1e-5)


def test_masks_that_agree_in_count_give_the_same_loss_fixed_or_ragged():
    settings = config()
    model = model_of(settings)
    given = batch(4)
    images, mask = jax.jit(lambda b: views_of(model, b, settings, None)[0][:2])(given)
    masked, wide = tokens.fixed_count(mask, 6), tokens.ragged(mask, 12)
    short, long = jax.jit(lambda: [model(images, mask, m).predictions for m in (masked, wide)])()
    for a, b in zip(short, long, strict=True):
        np.testing.assert_allclose(a, b[:, : a.shape[1]], atol=2e-6)


def test_compat_original_pads_to_the_batchs_largest_mask():
    mask = jnp.asarray([[1, 0, 1, 1], [0, 1, 0, 0]], bool)
    masked = tokens.padded_to_largest(mask, 4)
    np.testing.assert_array_equal(masked.indices, [[0, 2, 3, 0], [1, 0, 0, 0]])
    np.testing.assert_array_equal(masked.present(), [[1, 1, 1, 0]] * 2)


def test_dropped_patches_leave_the_visible_ones_to_the_encoder():
    model = model_of(config("model.drop_masked=true"))
    hidden = jnp.zeros((3, 16), bool).at[:, :2].set(True)  # the first two patches: rows 0 and 1, columns 0 to 3
    encode = jax.jit(lambda x: model.encode_context(x, hidden, tokens.fixed_count(hidden, 2)))
    images = jax.random.normal(jax.random.key(0), (3, 1, 8, 8))
    kept = encode(images)
    assert kept.shape == (3, 1 + 14, 24)
    np.testing.assert_array_equal(kept, encode(images.at[:, :, :2, :4].set(9.0)))
    assert np.abs(kept - encode(images.at[:, :, :2, 4:6].set(9.0))).max() > 0.01


@pytest.mark.parametrize("kind", ["combined", "hierarchical_combined", "vicreg", "sigreg", "hjepa_sigreg", "cjepa"])
def test_every_registered_loss_gives_a_finite_gradient_and_leaves_out_padding(kind):
    function = pretraining.loss_of(config(f"loss.type={kind}", "loss.sigreg_num_slices=8"))
    valid = jnp.asarray([True] * 4 + [False] * 2)
    masks = [jnp.broadcast_to(valid[:, None], (6, n)) for n in (4, 2)]
    features = {
        "p": [_normal(6, 4, 8), _normal(6, 2, 8)],
        "t": [-_normal(6, 4, 8), -_normal(6, 2, 8)],  # predictions that were right would have no gradient
        "c": _normal(6, 5, 8),
    }

    def value(x):
        given = LossInputs(x["p"], x["t"], x["c"], masks, function.directions(8, None), valid)
        return function(given, 0.5 * x["c"])["loss"]

    loss, grads = jax.jit(jax.value_and_grad(value))(features)
    assert np.isfinite(float(loss))
    assert float(jnp.abs(grads["p"][0][:4]).max()) > 0
    assert all(float(jnp.abs(leaf[4:]).max()) == 0 for leaf in jax.tree.leaves(grads))


def _normal(*shape):
    return jnp.asarray(np.random.default_rng(len(shape) + shape[1]).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("kind", ["mse", "smoothl1", "huber"])
def test_the_torch_twins_loss_is_the_tasks(kind):
    settings = config(f"loss.type={kind}", "loss.hierarchy_weights=[1.0,0.5]")
    model, given = model_of(settings), batch(5, [True] * 4 + [False])
    twin = TorchHJEPA(settings).eval()
    twin.load_state_dict({key: to_torch(value) for key, value in state_dict(model).items()}, strict=True)
    wanted = torch_loss(twin, jax.tree.map(lambda x: to_torch(np.asarray(x)), given), settings)
    got = jax.jit(lambda b: pretraining.loss(model, b, settings, None).value)(given)
    assert float(got) == pytest.approx(float(wanted.detach()), rel=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.fpn.use_fpn=true", "model.fpn.feature_dim=16"),
        ("model.fpn.use_fpn=true", "model.fpn.fusion_method=concat", "model.projection_norm=batchnorm"),
        ("model.layerscale.use_layerscale=true", "model.rope.use_rope=true", "model.use_target_encoder=false"),
    ],
)
def test_the_torch_twin_has_every_option(overrides):
    settings = config(*overrides, "model.vit.embed_dim=16", "model.vit.num_heads=2", "model.predictor.num_heads=2")
    model, twin = model_of(settings), TorchHJEPA(settings).eval()
    twin.load_state_dict({key: to_torch(value) for key, value in state_dict(model).items()}, strict=True)
    images = np.random.default_rng(0).normal(size=(2, 1, 8, 8)).astype(np.float32)
    mask = np.zeros((2, 16), bool)
    mask[0, 3:9] = mask[1, [0, 2, 4, 8, 12, 15]] = True
    outputs = jax.jit(lambda x, m: model(x, m, tokens.fixed_count(m, 6))[:2])(images, mask)
    with torch.no_grad():
        predictions, targets, *_ = twin(torch.from_numpy(images), torch.from_numpy(mask))
    for got, wanted in zip(outputs[0] + outputs[1], predictions + targets, strict=True):
        np.testing.assert_allclose(got, wanted.numpy(), atol=5e-6)


def test_too_few_masked_patches_are_one_clear_message():
    settings = config("masking.ratio=0.1", "model.num_hierarchies=3")
    with pytest.raises(UserError, match="3 levels need at least 4"):
        pretraining.loss(model_of(settings), batch(2), settings, None)


def test_a_timm_file_starts_both_encoders(tmp_path):
    settings = config(f"model.encoder_weights={tmp_path / 'vit.pt'}")
    torch.save({"cls_token": torch.ones(1, 1, 24), "head.weight": torch.zeros(3, 24)}, tmp_path / "vit.pt")
    assert sorted(pretraining.initial_weights(settings)) == [
        "context_encoder.vit.cls_token",
        "target_encoder.vit.cls_token",
    ]


def test_the_names_of_the_pure_losses_are_all_known():
    for kind in PURE:
        assert pretraining.loss_of(config(f"loss.type={kind}")).num_slices == 0


def test_the_options_of_the_characteristic_function_reach_sigreg():
    kind = ["loss.type=sigreg", "loss.sigreg_num_slices=8", "loss.sigreg_test_method=char_function"]
    options = {"points": 64, "t_min": 0.1, "t_max": 3.0, "lambda": 0.5}
    changed = [f"loss.sigreg_char_function_{name}={value}" for name, value in options.items()]
    a, b = (jax.random.normal(jax.random.key(i), (2, 6, 24)) for i in (0, 1))
    directions = regularizers.slices(jax.random.key(2), 8, 24)
    compared = losses.LossInputs([a], [b], None, None, directions, None)
    build = lambda *more: losses.build(config(*kind, *more).loss, 1)(compared)["sigreg_loss_h0"]
    arguments = {"test_method": "char_function", "num_quadrature": 64, "t_min": 0.1, "t_max": 3.0, "lambda_": 0.5}
    wanted = regularizers.sigreg(a, b, directions, **arguments)["sigreg_loss"]
    assert float(build(*changed)) == pytest.approx(float(wanted), rel=1e-6)
    assert float(build()) != pytest.approx(float(wanted), rel=1e-3)


def test_one_level_of_comparison_trains():
    settings = config("model.num_hierarchies=1")
    model = model_of(settings)
    assert len(model.hierarchy_projections) == 1
    value = jax.jit(lambda b: pretraining.loss(model, b, settings, None).value)(batch(2))
    assert np.isfinite(float(value))
