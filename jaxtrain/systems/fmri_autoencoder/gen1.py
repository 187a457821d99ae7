"""The first generation: convolutions over one averaged frame per volume. 1,974,067,762 parameters at its defaults.

Attribute names, order and shapes are those of the original's state dict, so its checkpoints load key for key.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.systems.fmri_autoencoder.autoencoder import Autoencoder, Decoder
from jaxtrain.systems.fmri_autoencoder.blocks import (
    DenseEncoder,
    HeLinear,
    Stack,
    Widths,
    block,
    normalize,
)
from jaxtrain.systems.fmri_autoencoder.config import Gen1Options

VIDEO_CHANNELS = (32, 64, 128, 256)
AUDIO_CHANNELS = (32, 64, 128)


class ConvEncoder(nnx.Module):
    """Stride-2 convolutions conv1, bn1, conv2, ... with BatchNorm and ReLU, then a Linear with Dropout and ReLU.

    x: float [batch, channel, *space]; every convolution halves the space, rounding up. Returns [batch, features].
    """

    def __init__(self, conv, in_channels: int, channels, flat: int, features: int, dropout: float, groups, *, rngs):
        for number, width in enumerate(channels, 1):
            setattr(self, f"conv{number}", conv(in_channels, width, 3, stride=2, padding=1, rngs=rngs))
            setattr(self, f"bn{number}", nn.BatchNorm(width, groups=groups))
            in_channels = width
        self.fc = nn.Linear(flat, features, rngs=rngs)
        self.layers = len(channels)
        self.dropout = nn.Dropout(dropout)

    def __call__(self, x, rngs=None, valid=None):
        for number in range(1, self.layers + 1):
            conv = getattr(self, f"conv{number}")
            x = jax.nn.relu(normalize(getattr(self, f"bn{number}"), conv, conv(x), rngs, valid))
        return jax.nn.relu(self.dropout(self.fc(x.reshape(x.shape[0], -1)), rngs))


class Gen1Encoder(nnx.Module):
    """Encoder: (video [batch, 3, H, W], audio [batch, mels], text [batch, text_dim]) -> bottleneck (>= 0) and
    voxels."""

    def __init__(self, options: Gen1Options, *, rngs: nnx.Rngs):
        o, width, channel = options, Widths(options.widths), Widths(options.channel_widths)
        drop = (lambda rate: rate) if o.encoder_dropout is None else (lambda rate: o.encoder_dropout)
        video, audio, text = width(o.video_features), width(o.audio_features), width(o.text_features)
        groups = o.batch_norm_groups

        def flat(channels: int, space: int) -> int:  # a flattened size may itself be overridden
            flat_width = channel(channels) * space
            return flat_width if width(channels * space) == channels * space else width(channels * space)

        pixels = math.ceil(o.video_height / 16) * math.ceil(o.video_width / 16)
        self.video_encoder = ConvEncoder(
            nn.Conv2d, 3, [channel(c) for c in VIDEO_CHANNELS], flat(256, pixels), video, drop(0.2), groups, rngs=rngs
        )
        bands = math.ceil(o.audio_mels / 8)
        self.audio_encoder = ConvEncoder(
            nn.Conv1d, 1, [channel(c) for c in AUDIO_CHANNELS], flat(128, bands), audio, drop(0.2), groups, rngs=rngs
        )
        self.text_encoder = DenseEncoder(
            width(o.text_dim), (width(512), text), (drop(0.2), drop(0.2)), rngs=rngs, groups=groups
        )
        pooled = video + audio + text
        self.feature_conv = Stack(*block(pooled, pooled, drop(0.2), rngs=rngs, groups=groups))
        bottleneck = width(o.bottleneck_dim)
        self.to_bottleneck = Stack(
            *block(pooled, width(4096), drop(0.3), rngs=rngs, groups=groups),
            *block(width(4096), bottleneck, drop(0.2), rngs=rngs, groups=groups),
        )
        self.bottleneck_to_voxels = Stack(
            *block(bottleneck, width(16384), drop(0.3), rngs=rngs, groups=groups),
            nn.Linear(width(16384), width(o.n_voxels), rngs=rngs),
        )

    def __call__(self, video, audio, text, rngs=None, valid=None):
        """Return (bottleneck [batch, bottleneck_dim], predicted_fmri [batch, n_voxels])."""
        features = (
            self.video_encoder(video, rngs, valid),
            self.audio_encoder(audio[:, None, :], rngs, valid),
            self.text_encoder(text, rngs, valid),
        )
        pooled = self.feature_conv(jnp.concatenate(features, axis=-1), rngs, valid)
        bottleneck = self.to_bottleneck(pooled, rngs, valid)
        return bottleneck, self.bottleneck_to_voxels(bottleneck, rngs, valid)


class Gen1Decoder(Decoder):
    """Decoder: bottleneck -> video [batch, H*W*3] in 0..1, audio [batch, mels], text [batch, text_dim]."""

    trunk_layers = (7, 8, 9)

    def __init__(self, options: Gen1Options, *, rngs: nnx.Rngs):
        o, width, rate = options, Widths(options.widths), options.decoder_dropout
        h, one, two, four = o.decoder_hidden_dim, *(width(k * o.decoder_hidden_dim) for k in (1, 2, 4))
        half = width(h // 2)
        make = lambda i, j: block(i, j, rate, rngs=rngs, linear=HeLinear, groups=o.batch_norm_groups)
        self.layer7 = Stack(*make(width(o.bottleneck_dim), one))
        self.layer8 = Stack(*make(one, two))
        self.layer9 = Stack(*make(two, four))
        self.layer10_video = Stack(*make(four, four), *make(four, two))
        self.layer10_audio = Stack(*make(four, one), *make(one, half))
        self.layer10_text = Stack(*make(four, one), *make(one, one))
        pixels = width(o.video_height * o.video_width * 3)
        self.layer11_video = Stack(HeLinear(two, pixels, rngs=rngs), nn.Activation(jax.nn.sigmoid))
        self.layer11_audio = HeLinear(half, width(o.audio_mels), rngs=rngs)
        self.layer11_text = HeLinear(one, width(o.text_dim), rngs=rngs)


class SherlockAutoencoder(Autoencoder):
    """Autoencoder from film, sound and text of one volume to voxels, and back from the bottleneck.

    video: float [batch, 3, H, W] in 0..1; audio: float [batch, mels] in decibels; text: float [batch, text_dim];
    fmri_target: float [batch, n_voxels]; valid: bool [batch], False marks padding. Returns `bottleneck`,
    `predicted_fmri`, `video_recon`, `audio_recon`, `text_recon`, and in training mode the plain losses of the batch.
    """

    def __init__(self, options: Gen1Options, *, rngs: nnx.Rngs):
        self.encoder = Gen1Encoder(options, rngs=rngs)
        self.decoder = Gen1Decoder(options, rngs=rngs)
        self.options = options
