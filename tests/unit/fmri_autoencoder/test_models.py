"""Sizes of both networks, and what the second generation's original could not train."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain import nn
from jaxtrain.systems.fmri_autoencoder import torch_twin
from jaxtrain.systems.fmri_autoencoder.config import Gen1Options, HeadOptions
from jaxtrain.systems.fmri_autoencoder.gen1 import SherlockAutoencoder
from jaxtrain.systems.fmri_autoencoder.head import MultimodalAutoencoder
from tests.unit.fmri_autoencoder import tiny
from torch_bridge.datasets import to_torch
from torch_bridge.state_dict import state_dict

PRODUCTION = {"use_encodec": True, "audio_frames_per_tr": 112, "video_frames_per_tr": 10, "text_dim": 3072}
TINY = tiny.config("head").model.model_dump()


@pytest.mark.parametrize(
    ("kind", "options", "parameters"),
    [
        (SherlockAutoencoder, Gen1Options(), 1_974_067_762),
        (MultimodalAutoencoder, HeadOptions(), 5_295_714_674),
        (MultimodalAutoencoder, HeadOptions(**PRODUCTION), 3_543_969_010),
        (MultimodalAutoencoder, HeadOptions(**PRODUCTION, n_voxels=77_347), 3_405_302_755),
        (MultimodalAutoencoder, HeadOptions(**PRODUCTION, n_voxels=83_138), 3_500_188_290),
    ],
)
def test_parameter_counts_are_the_originals(kind, options, parameters):
    state = nnx.state(nnx.eval_shape(lambda: kind(options, rngs=nnx.Rngs(0))), nnx.Param)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)) == parameters


def built(**changes) -> tuple[MultimodalAutoencoder, dict]:
    options = HeadOptions(**{**TINY, **changes})
    rng = np.random.default_rng(0)
    widths = {"video": options.video_columns, "audio": options.audio_columns, "text": options.text_dim}
    batch = {name: rng.random((6, width), np.float32) for name, width in widths.items()}
    if options.use_encodec:
        batch["audio"] = rng.integers(0, 1024, batch["audio"].shape, np.int32)
    batch["fmri_target"] = rng.random((6, options.n_voxels), np.float32)
    return tiny.filled(lambda: MultimodalAutoencoder(options, rngs=nnx.Rngs(0))), batch


@nnx.jit
def trained(model, batch, valid=None) -> dict:
    return model(**batch, rngs=nn.Rngs(jax.random.key(0)), valid=valid)


@pytest.mark.parametrize(
    ("changes", "audio"),
    [
        ({"audio_frames_per_tr": 65}, (6, 6, 65)),  # mel of several frames, the original's default
        ({"use_encodec": True, "audio_frames_per_tr": 65}, (6, 8, 112)),
        ({"bottleneck_dim": 20}, (6, 6, 4)),
    ],
)
def test_what_the_original_could_not_train_has_a_gradient_everywhere(changes, audio):
    model, batch = built(**changes, encoder_dropout=0.0, decoder_dropout=0.0)
    shape = nnx.eval_shape(lambda m: m(batch["video"], batch["audio"], batch["text"]), model)["audio_recon"].shape
    assert shape == audio
    loss = lambda m: m(**batch, rngs=nn.Rngs(jax.random.key(0)))["total_loss"]
    grads = nnx.to_flat_state(nnx.jit(nnx.grad(loss))(model))
    still = [".".join(map(str, path)) for path, grad in grads if grad.ndim > 1 and not np.abs(grad[...]).max() > 0]
    assert still == []


def test_checkpointing_changes_neither_loss_nor_running_statistics():
    plain, batch = built(encoder_dropout=0.0, decoder_dropout=0.0)
    again, _ = built(gradient_checkpointing=True, encoder_dropout=0.0, decoder_dropout=0.0)

    a, b = (float(trained(model, batch)["total_loss"]) for model in (plain, again))
    assert a == pytest.approx(b, rel=1e-6)
    one, other = (model.encoder.video_encoder.bn1 for model in (plain, again))
    assert one.num_batches_tracked[...] == other.num_batches_tracked[...] == 1
    np.testing.assert_allclose(one.running_mean[...], other.running_mean[...], rtol=1e-6)


def test_audio_of_another_width_says_which_settings_disagree():
    model, batch = built()
    with pytest.raises(ValueError, match=r"audio is \[6, 3\], wanted \[batch, 24\].*model.use_encodec"):
        model(batch["video"], batch["audio"][:, :3], batch["text"])


def test_padded_rows_move_nothing():
    model, batch = built(encoder_dropout=0.0, decoder_dropout=0.0)
    padded = {name: np.concatenate([value, 1e3 * np.ones_like(value[:2])]) for name, value in batch.items()}
    valid = jnp.arange(8) < 6
    whole, part = trained(model, batch, jnp.ones(6, bool)), trained(model, padded, valid)
    assert float(part["total_loss"]) == pytest.approx(float(whole["total_loss"]), rel=1e-5)
    np.testing.assert_allclose(part["predicted_fmri"][:6], whole["predicted_fmri"], rtol=1e-4, atol=1e-5)


def test_exported_codes_differ_from_torchs_where_they_lie_on_a_half_alone():
    """Evaluation rounds codes 0 to 1023, so that a last bit before it may be a whole code, 1e-3 of the scale, after."""
    options = ("model.use_encodec=true", "model.audio_frames_per_tr=112", "data.synthetic_volumes=40")
    config, model = tiny.config("head", *options), tiny.model("head", *options)
    twin = torch_twin.build(config).eval()
    twin.load_state_dict({key: to_torch(np.asarray(value)) for key, value in state_dict(model).items()}, strict=True)
    bottleneck = np.random.default_rng(0).normal(size=(64, config.model.widths[2048])).astype(np.float32)
    decoder = model.decoder
    raw, ours = jax.jit(
        lambda x: (decoder.audio_head(decoder.trunk(x), rounded=False), decoder.audio_head(decoder.trunk(x)))
    )(bottleneck)
    with torch.no_grad():
        theirs = twin.decoder(torch.from_numpy(bottleneck))[1].numpy()
        exact = twin.decoder.layer11(
            twin.decoder.layer10(twin.decoder.layer9(twin.decoder.layer8(torch.from_numpy(bottleneck))))
        )
        exact = twin.decoder.layer13_audio(twin.decoder.layer12_audio(exact)).sigmoid().numpy() * 1023
    np.testing.assert_allclose(np.asarray(raw).reshape(64, -1), exact, atol=5e-3)  # codes
    other = np.asarray(ours) != theirs
    from_a_half = np.abs(np.asarray(raw) % 1 - 0.5)
    assert other.mean() < 0.01
    assert (from_a_half[other] < 5e-3).all()
    assert np.abs(np.asarray(ours) - theirs).max() <= 1
