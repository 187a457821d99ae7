"""Multi-crop: several masked crops per training image, from the device and from the loader."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from jaxtrain import config_io
from jaxtrain.data.index_stream import SampleIndex
from jaxtrain.errors import UserError
from jaxtrain.nn import Rngs
from jaxtrain.systems.hjepa import masks, pretraining
from jaxtrain.systems.hjepa.data import build_data
from jaxtrain.systems.hjepa.evals import extraction
from jaxtrain.systems.hjepa.views import views_of

pytestmark = pytest.mark.slow

CROPS = ("data.augmentation.global_crops=2", "data.augmentation.local_crops=3", "data.image_size=16")


def config(*overrides):
    small = ("train.steps=10", "model.vit.depth=1", "model.vit.patch_size=2")
    return config_io.load("configs/hjepa_tiny.yaml", [*small, *CROPS, *overrides])[1]


@functools.cache
def model_of(*overrides):
    return extraction.initial(config(*overrides))


def batch(valid=(True, True, True)):
    images = np.random.default_rng(0).integers(0, 255, (len(valid), 1, 20, 20), dtype=np.uint8)
    return {"image": jnp.asarray(images), "index": jnp.arange(len(valid)), "valid": jnp.asarray(valid)}


def rngs():
    return Rngs(jax.random.key(1))


def test_every_crop_is_another_and_has_a_mask_of_its_own():
    model, settings = model_of(), config()
    large, small = jax.jit(lambda given: [view[:2] for view in views_of(model, given, settings, rngs())])(batch())
    assert [large[0].shape, large[1].shape] == [(6, 1, 16, 16), (6, 64)]
    assert [small[0].shape, small[1].shape] == [(9, 1, 8, 8), (9, 16)]
    for images, mask in (large, small):
        assert len({image.tobytes() for image in np.asarray(images)}) == len(images)
        assert len({row.tobytes() for row in np.asarray(mask)}) > 1
        assert len(set(mask.sum(1).tolist())) == 1


def test_evaluation_sees_the_whole_image_once():
    settings = config()
    (view,) = views_of(model_of(), batch(), settings, None)
    assert (view.crops, view.images.shape) == (1, (3, 1, 16, 16))


def test_the_loss_is_the_mean_over_crops(monkeypatch):
    views = [SimpleNamespace(crops=crops, images=None, mask=None, masked=None, valid=None) for crops in (2, 3)]
    monkeypatch.setattr(pretraining, "views_of", lambda *_: views)
    monkeypatch.setattr(pretraining, "_terms", lambda model, view, *_: {"loss": 10.0 * view.crops, "part": view.crops})
    found = pretraining.loss(lambda *_, rngs: None, {"valid": jnp.ones(3, bool)}, None, None)
    assert [float(found.value), float(found.weight), float(found.parts["part"])] == pytest.approx([26.0, 3.0, 2.6])


def test_local_crops_train_the_learned_positions_and_padding_changes_nothing():
    overrides = ("model.rope.use_rope=true", "model.drop_masked=true", "data.augmentation.global_crops=1")
    settings, (definition, params) = config(*overrides), nnx.split(model_of(*overrides))
    value = lambda p, given: pretraining.loss(nnx.merge(definition, p), given, settings, rngs()).value
    call = jax.jit(jax.value_and_grad(value, allow_int=True))
    given = batch((True, True, True, False))
    loss, grads = call(params, given)
    assert loss == call(params, given | {"image": given["image"].at[3].set(0)})[0]
    assert float(jnp.abs(grads["context_encoder"]["vit"]["pos_embed"][...]).max()) > 0


def test_loader_masks_are_the_originals_multi_crop_masks():
    settings = config("masking.where=loader", "masking.kind=ragged")
    source = build_data(settings, "train")
    rng = np.random.RandomState(np.random.SeedSequence([settings.seed, 2, 5]).generate_state(4))
    wanted = masks.MultiCropMaskGenerator(
        16, 8, 2, 6, 2, 2, 4, "cross_crop_prediction", base_scale=(0.05, 0.15), aspect_ratio_range=(0.75, 1.5), rng=rng
    )(1)
    item = source[SampleIndex.of(5, 2)]
    for name, kind, count in (("mask", "global_masks", 2), ("mask_local", "local_masks", 3)):
        drawn = [masks.training_mask(wanted[kind][f"crop_{i}"])[0] for i in range(count)]
        np.testing.assert_array_equal(item[name], drawn)


def test_the_loader_cuts_crops_from_the_full_picture(tmp_path):
    (tmp_path / "train" / "cat").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "train" / "cat" / "0.png")
    files = ("data.dataset=folder", f"data.path={tmp_path}", "model.vit.in_chans=3")
    settings = config(*files, "data.augmentation.where=loader", "masking.where=loader")
    item = build_data(settings, "train")[SampleIndex.of(0, 0)]
    given = {name: jnp.asarray(value)[None] for name, value in item.items()}
    given |= {"index": jnp.zeros(1, int), "valid": jnp.ones(1, bool)}
    large, small = views_of(model_of("model.vit.in_chans=3"), given, settings, rngs())
    assert [large.images.shape, small.images.shape] == [(2, 3, 16, 16), (3, 3, 8, 8)]
    np.testing.assert_array_equal(small.mask, item["mask_local"])
    assert float(jnp.abs(large.images[0] - large.images[1]).max()) > 0.1


def test_digits_are_not_augmented_by_the_loader():
    with pytest.raises(UserError, match="augmentation.where=device"):
        build_data(config("data.augmentation.where=loader"), "train")


def test_float_images_cannot_be_cropped_again():
    settings = config()
    given = batch() | {"image": jnp.zeros((3, 1, 16, 16))}
    with pytest.raises(UserError, match="cut from uint8 images"):
        views_of(model_of(), given, settings, rngs())


def test_a_crop_smaller_than_a_patch_is_one_clear_message():
    with pytest.raises(UserError, match="local_size: a crop of 1 pixels holds no patch of 2"):
        views_of(model_of(), batch(), config("data.augmentation.local_size=1"), rngs())


def test_a_generator_without_crops_is_one_clear_message():
    with pytest.raises(UserError, match="masking.where=device"):
        build_data(config("masking.where=loader", "masking.generator=multi_block"), "train")
