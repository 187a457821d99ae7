"""timm as an independent judge of the encoder."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain.nn.vit import VisionTransformer, call_block, vit_size
from jaxtrain.systems.hjepa.model import HJEPA
from jaxtrain.systems.hjepa.torch_vit import VisionTransformer as TorchViT
from torch_bridge.datasets import to_torch
from torch_bridge.state_dict import load_state_dict, state_dict
from torch_bridge.torchvision_operators import declare_torchvision

declare_torchvision()
timm = importlib.import_module("timm")


def pair(name, **sizes):
    """timm's model without its head, and ours with the same weights."""
    theirs = timm.create_model(name, num_classes=0, **sizes).eval()
    image = sizes.pop("img_size", 224)
    shape = jax.eval_shape(lambda: nnx.state(VisionTransformer(image, vit_size(name, **sizes), rngs=nnx.Rngs(0))))
    graph = nnx.graphdef(nnx.eval_shape(lambda: VisionTransformer(image, vit_size(name, **sizes), rngs=nnx.Rngs(0))))
    ours = nnx.merge(graph, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shape))
    load_state_dict(ours, {key: value.numpy() for key, value in theirs.state_dict().items()})
    return theirs, ours


def both_features(theirs, ours, size):
    images = np.random.default_rng(0).normal(size=(2, 3, size, size)).astype(np.float32)
    with torch.no_grad():
        wanted = theirs.forward_features(torch.from_numpy(images)).numpy()
    definition, state = nnx.split(ours)
    return np.asarray(jax.jit(lambda s, x: nnx.merge(definition, s)(x))(state, jnp.asarray(images))), wanted


def test_a_custom_size_gives_timms_features_within_1e_5():
    sizes = {"img_size": 24, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 4, "mlp_ratio": 3.0}
    got, wanted = both_features(*pair("vit_tiny_patch16_224", **sizes), 24)
    assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < 1e-5


def test_an_exported_context_encoder_loads_into_timm_strictly_and_gives_the_same_features():
    sizes = {"patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 4}
    model = HJEPA("vit_small_patch16_224", 16, 48, 1, 4, num_hierarchies=2, vit=sizes, rngs=nnx.Rngs(0))
    theirs = timm.create_model("vit_small_patch16_224", img_size=16, num_classes=0, **sizes).eval()
    prefix = "context_encoder.vit."
    exported = {k.removeprefix(prefix): to_torch(v) for k, v in state_dict(model).items() if k.startswith(prefix)}
    assert list(exported) == list(theirs.state_dict())
    theirs.load_state_dict(exported, strict=True)
    got, wanted = both_features(theirs, model.context_encoder.vit, 16)
    assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < 1e-5


@pytest.mark.parametrize("grid", [2, 3, 7])
def test_positions_of_another_grid_are_timms(grid):
    size = vit_size("vit_tiny_patch16_224", patch_size=4, embed_dim=8, depth=1, num_heads=2)
    ours = VisionTransformer(16, size, rngs=nnx.Rngs(0))
    given = torch.from_numpy(np.array(ours.pos_embed[...]))
    wanted = timm.layers.resample_abs_pos_embed(given, [grid, grid], num_prefix_tokens=1)[:, 1:]
    np.testing.assert_allclose(ours.positions(grid), wanted, atol=1e-6)


def test_patches_share_the_attention_that_the_class_token_leaves():
    size = vit_size("vit_tiny_patch16_224", patch_size=4, embed_dim=8, depth=2, num_heads=2)
    ours = VisionTransformer(8, size, rope_theta=100.0, rngs=nnx.Rngs(0))
    images = jax.random.normal(jax.random.key(0), (3, 3, 8, 8))
    assert float(jnp.ptp(ours.attended(images))) > 0
    ours.blocks[-1].attn.qkv.weight[...] = jnp.zeros((24, 8))
    np.testing.assert_allclose(ours.attended(images), jnp.full((3, 4), 1 / 5), rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"layerscale_init": 0.3}, {"rope_theta": 100.0}])
def test_the_torch_twin_agrees_with_every_option(options):
    size = vit_size("vit_tiny_patch16_224", patch_size=4, embed_dim=32, depth=2, num_heads=4)
    ours, twin = VisionTransformer(16, size, rngs=nnx.Rngs(0), **options), TorchViT(16, size, **options).eval()
    twin.load_state_dict({key: to_torch(value) for key, value in state_dict(ours).items()}, strict=True)
    rng = np.random.default_rng(0)
    images, keep = rng.normal(size=(2, 3, 16, 16)).astype(np.float32), np.array([[0, 5, 7], [1, 2, 15]])
    with torch.no_grad():
        wanted = twin(torch.from_numpy(images), keep=torch.from_numpy(keep)).numpy()
    np.testing.assert_allclose(ours(jnp.asarray(images), keep=jnp.asarray(keep)), wanted, atol=2e-6)


def test_checkpointing_changes_no_gradient():
    size = vit_size("vit_tiny_patch16_224", patch_size=4, embed_dim=16, depth=2, num_heads=2)
    block = VisionTransformer(8, size, rngs=nnx.Rngs(0)).blocks[0]
    x = jax.random.normal(jax.random.key(0), (2, 5, 16))
    grads = [
        jax.jit(jax.grad(lambda x, flag=flag: jnp.square(call_block(block, x, None, None, flag)).sum()))(x)
        for flag in (False, True)
    ]
    np.testing.assert_allclose(*grads, rtol=1e-5)
