"""The second generation: thirteen dense layers over a window of frames, EnCodec codes or a mel spectrogram, and text.

Attribute names, order and shapes are those of the original's state dict, so its checkpoints load key for key.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.systems.fmri_autoencoder.autoencoder import Autoencoder, Decoder
from jaxtrain.systems.fmri_autoencoder.blocks import (
    AUDIO_CODEBOOKS,
    LARGEST_CODE,
    DenseEncoder,
    HeLinear,
    Stack,
    Widths,
    block,
)
from jaxtrain.systems.fmri_autoencoder.config import HeadOptions
from jaxtrain.systems.fmri_autoencoder.losses import wide

MEL_UPSAMPLED_FRAMES = 64
ENCODEC_FRAMES = 112  # at 75 frames per second and 1.5 s; the decoder uses it instead of the mel default of 65


class VideoEncoder(DenseEncoder):
    """Encoder of a window of frames, [batch, columns] or [batch, 3, H, W] flattened in C order -> [batch, features].

    checkpointing: recompute the layers in the backward pass. statistics_twice: let the recomputation update the running
    statistics a second time, as torch's does.
    """

    def __init__(self, *arguments, checkpointing: bool = False, statistics_twice: bool = False, **options):
        super().__init__(*arguments, **options)
        self.checkpointing = checkpointing
        self.statistics_twice = statistics_twice

    def __call__(self, video, rngs=None, valid=None):
        x = video.reshape(video.shape[0], -1)
        if not self.checkpointing or rngs is None:
            return super().__call__(x, rngs, valid)
        norms = [getattr(self, f"bn{number}") for number in range(1, len(self.dropouts) + 1)]
        before = [[getattr(norm, name)[...] for name in STATISTICS] for norm in norms]
        y = nnx.remat(lambda encoder, z: DenseEncoder.__call__(encoder, z, rngs, valid))(self, x)
        if self.statistics_twice:
            for norm, old in zip(norms, before, strict=True):
                _move_again(norm, *old)
        return y


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _move_again(norm: nn.BatchNorm, old_mean, old_var, old_count) -> None:
    """Repeat the last update of the statistics: after new = k old + b, set k new + b = (1 + k) new - k old."""
    keep = 1 - norm.momentum
    for variable, old in ((norm.running_mean, old_mean), (norm.running_var, old_var)):
        variable.set_value((1 + keep) * variable[...] - keep * old)
    norm.num_batches_tracked.set_value(2 * norm.num_batches_tracked[...] - old_count)


class HeadEncoder(nnx.Module):
    """Encoder: (video, audio, text), each [batch, columns] -> bottleneck (normalised, signed) and voxels."""

    def __init__(self, options: HeadOptions, statistics_twice: bool = False, *, rngs: nnx.Rngs):
        o, width, groups = options, Widths(options.widths), options.batch_norm_groups
        drop = (lambda rate: rate) if o.encoder_dropout is None else (lambda rate: o.encoder_dropout)
        video, audio, text = width(o.video_features), width(o.audio_features), width(o.text_features)
        self.video_encoder = VideoEncoder(
            width(o.video_columns),
            (width(4096), width(2048), video),
            (drop(0.3), drop(0.3), drop(0.2)),
            rngs=rngs,
            groups=groups,
            checkpointing=o.gradient_checkpointing,
            statistics_twice=statistics_twice,
        )
        self.audio_encoder = DenseEncoder(
            width(o.audio_columns),
            (width(512), audio),
            (drop(0.3), drop(0.2)),
            rngs=rngs,
            groups=groups,
            relu_first=False,
        )
        self.text_encoder = DenseEncoder(
            width(o.text_dim), (width(512), text), (drop(0.2), drop(0.2)), rngs=rngs, groups=groups
        )
        pooled, bottleneck = video + audio + text, width(o.bottleneck_dim)
        make = lambda i, j, rate: block(i, j, drop(rate), rngs=rngs, groups=groups)
        self.feature_conv = Stack(*make(pooled, pooled, 0.2))
        self.layer5 = Stack(*make(pooled, width(4096), 0.3))
        self.layer6 = Stack(*make(width(4096), width(8000), 0.3))
        self.layer7_bottleneck = Stack(
            nn.Linear(width(8000), bottleneck, rngs=rngs), nn.BatchNorm(bottleneck, groups=groups)
        )
        self.bottleneck_to_voxels = Stack(
            *make(bottleneck, width(16384), 0.3), nn.Linear(width(16384), width(o.n_voxels), rngs=rngs)
        )

    def __call__(self, video, audio, text, rngs=None, valid=None):
        """Return (bottleneck [batch, bottleneck_dim], predicted_fmri [batch, n_voxels]).

        Raises ValueError if the audio has other columns than the options say.
        """
        width = self.audio_encoder.fc1.weight.shape[1]
        if audio.ndim != 2 or audio.shape[1] != width:
            raise ValueError(
                f"audio is {list(audio.shape)}, wanted [batch, {width}]: codebooks or mel bands times "
                "model.audio_frames_per_tr, flattened; do model.use_encodec and the prepared data agree?"
            )
        features = (
            self.video_encoder(video, rngs, valid),
            self.audio_encoder(wide(audio), rngs, valid),
            self.text_encoder(text, rngs, valid),
        )
        x = jnp.concatenate(features, axis=-1)
        for layer in (self.feature_conv, self.layer5, self.layer6, self.layer7_bottleneck):
            x = layer(x, rngs, valid)
        return x, self.bottleneck_to_voxels(x, rngs, valid)


class HeadDecoder(Decoder):
    """Decoder: bottleneck -> the first frame of the window, audio and text.

    video: [batch, H*W*3] in 0..1. audio: codes float [batch, 8, frames] in 0..1023, whole numbers in evaluation mode;
    or mel [batch, mels, frames], frame 65 and later always 0. For a single frame it is [batch, 8] or [batch, mels].
    """

    trunk_layers = (8, 9, 10, 11)

    def __init__(self, options: HeadOptions, *, rngs: nnx.Rngs):
        o, width, rate = options, Widths(options.widths), options.decoder_dropout
        make = lambda i, j: block(width(i), width(j), rate, rngs=rngs, linear=HeLinear, groups=o.batch_norm_groups)
        self.layer8 = Stack(*make(o.bottleneck_dim, 8000))  # the original has 2048 here for any bottleneck_dim
        self.layer9 = Stack(*make(8000, 4096))
        self.layer10 = Stack(*make(4096, 2048))
        self.layer11 = Stack(*make(2048, 1536))
        self.layer12_video = Stack(*make(1536, 2048), *make(2048, 4096))
        self.layer12_audio = Stack(*make(1536, 2048), *make(2048, 2048))
        mels, norm = o.audio_mels, lambda: nn.BatchNorm(o.audio_mels, groups=o.batch_norm_groups)
        if not o.use_encodec:
            up = lambda: [
                nn.ConvTranspose1d(mels, mels, 4, stride=2, padding=1, rngs=rngs),
                norm(),
                nn.Activation(jax.nn.relu),
            ]
            self.audio_temporal_upsample = Stack(*up(), *up(), *up())
            self.audio_temporal_adjust = nn.Conv1d(mels, mels, 3, padding=1, rngs=rngs)
        self.layer12_text = Stack(*make(1536, 1024), *make(1024, 1024))
        pixels = width(o.video_height * o.video_width * 3)
        self.layer13_video = Stack(HeLinear(width(4096), pixels, rngs=rngs), nn.Activation(jax.nn.sigmoid))
        self.use_encodec = o.use_encodec
        frames = o.audio_frames_per_tr
        self.frames = ENCODEC_FRAMES if o.use_encodec and frames == 65 else frames
        columns = AUDIO_CODEBOOKS * self.frames if o.use_encodec else mels * MEL_UPSAMPLED_FRAMES // 8
        self.layer13_audio = HeLinear(width(2048), width(columns), rngs=rngs)
        self.layer13_text = HeLinear(width(1024), width(o.text_dim), rngs=rngs)

    def __call__(self, bottleneck, rngs=None, valid=None):
        video, audio, text = super().__call__(bottleneck, rngs, valid)
        return video, audio[..., 0] if self.frames == 1 else audio, text

    def audio_head(self, x, rngs=None, valid=None, rounded: bool = True):
        """Return codes [batch, 8, frames] (rounded in evaluation mode if `rounded`) or mel [batch, mels, frames]."""
        x = self.head("audio", x, rngs, valid)
        if self.use_encodec:
            codes = jax.nn.sigmoid(wide(x).reshape(x.shape[0], AUDIO_CODEBOOKS, -1)) * LARGEST_CODE
            return jnp.clip(jnp.round(codes), 0, LARGEST_CODE) if rngs is None and rounded else codes
        x = x.reshape(x.shape[0], -1, MEL_UPSAMPLED_FRAMES // 8)
        x = self.audio_temporal_adjust(self.audio_temporal_upsample(x, rngs, valid))
        x = x[..., : self.frames]
        return jnp.pad(x, ((0, 0), (0, 0), (0, self.frames - x.shape[-1])))


class MultimodalAutoencoder(Autoencoder):
    """Autoencoder from film, sound and text of one volume to voxels, and back from the bottleneck.

    video: float [batch, frames*H*W*3] in 0..1, or [batch, ...] flattened in C order; audio: codes int or mel float
    [batch, columns]; text: float [batch, text_dim]; fmri_target: float [batch, n_voxels]; valid: bool [batch]. Returns
    `bottleneck`, `predicted_fmri`, `video_recon`, `audio_recon`, `text_recon`, and in training mode the plain losses of
    the batch. statistics_twice: see VideoEncoder.
    """

    def __init__(self, options: HeadOptions, statistics_twice: bool = False, *, rngs: nnx.Rngs):
        self.encoder = HeadEncoder(options, statistics_twice, rngs=rngs)
        self.decoder = HeadDecoder(options, rngs=rngs)
        self.options = options
