"""The first generation in plain torch: for the original's API, for deployment, and as the torch baseline."""

import math

import torch
from torch import nn

from jaxtrain.systems.fmri_autoencoder.blocks import Widths
from jaxtrain.systems.fmri_autoencoder.config import Gen1Options
from jaxtrain.systems.fmri_autoencoder.gen1 import AUDIO_CHANNELS, VIDEO_CHANNELS
from jaxtrain.systems.fmri_autoencoder.torch_blocks import (
    Autoencoder,
    Decoder,
    Encoder,
    TextEncoder,
    block,
    checked,
    constructor_options,
    dropout_rates,
    encoder_dropout,
    keep,
    start_decoder,
)


class Conv(nn.Module):
    """Stride-2 convolutions conv1, bn1, conv2, ... with BatchNorm and ReLU, then a Linear with dropout and ReLU."""

    def __init__(self, conv, norm, inputs, channels, flat, features, dropout):
        super().__init__()
        for number, size in enumerate(channels, 1):
            setattr(self, f"conv{number}", conv(inputs, size, 3, stride=2, padding=1))
            setattr(self, f"bn{number}", norm(size))
            inputs = size
        self.fc = nn.Linear(flat, features)
        self.layers, self.dropout = len(channels), nn.Dropout(dropout)

    def forward(self, x):
        for number in range(1, self.layers + 1):
            x = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(x)).relu()
        return self.dropout(self.fc(x.flatten(1))).relu()


def flattened(channels: int, space: int, widths, channel_widths) -> int:
    """Return the columns after the last convolution; an entry of `widths` for them wins over `channel_widths`."""
    width, flat = Widths(widths), Widths(channel_widths)(channels) * space
    return flat if width(channels * space) == channels * space else width(channels * space)


class VideoEncoder(Conv):
    """Frame encoder: [batch, input_channels, height, width] -> [batch, output_features]. Options: see Gen1Options."""

    def __init__(
        self,
        input_channels=3,
        input_height=90,
        input_width=160,
        output_features=1024,
        *,
        widths=None,
        channel_widths=None,
        encoder_dropout=None,
    ):
        arguments = locals()
        rows, columns = math.ceil(input_height / 16), math.ceil(input_width / 16)
        flat = flattened(256, rows * columns, widths, channel_widths)
        channels = [Widths(channel_widths)(size) for size in VIDEO_CHANNELS]
        (dropout,) = dropout_rates(encoder_dropout, 0.2)
        super().__init__(
            nn.Conv2d, nn.BatchNorm2d, input_channels, channels, flat, Widths(widths)(output_features), dropout
        )
        keep(self, arguments)
        self.flat_height, self.flat_width, self.flat_features = rows, columns, flat


class AudioEncoder(Conv):
    """Encoder of mel bands: [batch, input_mels] -> [batch, output_features]. Keyword options: see Gen1Options."""

    def __init__(self, input_mels=128, output_features=256, *, widths=None, channel_widths=None, encoder_dropout=None):
        arguments = locals()
        flat = flattened(128, math.ceil(input_mels / 8), widths, channel_widths)
        channels = [Widths(channel_widths)(size) for size in AUDIO_CHANNELS]
        (dropout,) = dropout_rates(encoder_dropout, 0.2)
        super().__init__(nn.Conv1d, nn.BatchNorm1d, 1, channels, flat, Widths(widths)(output_features), dropout)
        keep(self, arguments)
        self.flat_length, self.flat_features = math.ceil(input_mels / 8), flat

    def forward(self, x):
        return super().forward(x[:, None] if x.ndim == 2 else x)


class SherlockEncoder(Encoder):
    """Encoder: (video [batch, 3, H, W], audio [batch, mels], text [batch, text_dim]) -> bottleneck (>= 0) and voxels.

    more: `encoder_dropout`, `widths`, `channel_widths` of Gen1Options.
    """

    def __init__(
        self,
        video_height=90,
        video_width=160,
        audio_mels=128,
        text_dim=1024,
        n_voxels=85810,
        bottleneck_dim=8000,
        video_features=1024,
        audio_features=256,
        text_features=256,
        **more,
    ):
        arguments = locals()
        o = checked(Gen1Options, constructor_options(arguments), "SherlockEncoder")
        super().__init__()
        keep(self, arguments)
        width, drop = Widths(o.widths), encoder_dropout(o)
        shared = {"widths": o.widths, "encoder_dropout": o.encoder_dropout}
        convolved = shared | {"channel_widths": o.channel_widths}
        self.video_encoder = VideoEncoder(3, o.video_height, o.video_width, o.video_features, **convolved)
        self.audio_encoder = AudioEncoder(o.audio_mels, o.audio_features, **convolved)
        self.text_encoder = TextEncoder(o.text_dim, o.text_features, **shared)
        self.pooled_dim = pooled = width(o.video_features) + width(o.audio_features) + width(o.text_features)
        bottleneck = width(o.bottleneck_dim)
        self.feature_conv = nn.Sequential(*block(pooled, pooled, drop(0.2)))
        first = block(pooled, width(4096), drop(0.3))
        self.to_bottleneck = nn.Sequential(*first, *block(width(4096), bottleneck, drop(0.2)))
        voxels = nn.Linear(width(16384), width(o.n_voxels))
        self.bottleneck_to_voxels = nn.Sequential(*block(bottleneck, width(16384), drop(0.3)), voxels)

    def forward(self, video, audio, text, return_voxels: bool = False):
        """Return (bottleneck, voxels or None)."""
        features = self.video_encoder(video), self.audio_encoder(audio), self.text_encoder(text)
        bottleneck = self.to_bottleneck(self.feature_conv(torch.cat(features, -1)))
        return bottleneck, self.bottleneck_to_voxels(bottleneck) if return_voxels else None


class SherlockDecoder(Decoder):
    """Decoder: bottleneck -> video [batch, H*W*3] in 0..1, audio [batch, mels], text [batch, text_dim]."""

    trunk_layers = (7, 8, 9)

    def __init__(
        self,
        bottleneck_dim,
        video_dim=43200,
        audio_dim=128,
        text_dim=1024,
        hidden_dim=2048,
        dropout=0.3,
        *,
        widths=None,
    ):
        arguments = locals()
        super().__init__()
        keep(self, arguments)
        width, rate = Widths(widths), dropout
        one, two, four = (width(k * hidden_dim) for k in (1, 2, 4))
        half = width(hidden_dim // 2)
        make = lambda *pairs: nn.Sequential(*(layer for i, j in pairs for layer in block(i, j, rate)))
        self.layer7 = make((width(bottleneck_dim), one))
        self.layer8, self.layer9 = make((one, two)), make((two, four))
        self.layer10_video = make((four, four), (four, two))
        self.layer10_audio = make((four, one), (one, half))
        self.layer10_text = make((four, one), (one, one))
        self.layer11_video = nn.Sequential(nn.Linear(two, width(video_dim)), nn.Sigmoid())
        self.layer11_audio = nn.Linear(half, width(audio_dim))
        self.layer11_text = nn.Linear(one, width(text_dim))
        start_decoder(self)


MultimodalDecoder = SherlockDecoder  # the original uses this name in both generations


class SherlockAutoencoder(Autoencoder):
    """Autoencoder from film, sound and text of one volume to voxels, and back; 1,974,067,762 parameters by default.

    video: float [batch, 3, H, W] in 0..1; audio: float [batch, mels]; text: float [batch, text_dim]; fmri_target: float
    [batch, n_voxels]. more: `encoder_dropout`, `widths`, `channel_widths`, `batch_norm_groups` of Gen1Options. Under
    `with torch.device("meta")` nothing is allocated, and a Trainer draws the weights on the devices.
    """

    OPTIONS = Gen1Options

    def __init__(
        self,
        video_height=90,
        video_width=160,
        audio_mels=128,
        text_dim=1024,
        n_voxels=85810,
        bottleneck_dim=8000,
        video_features=1024,
        audio_features=256,
        text_features=256,
        decoder_hidden_dim=2048,
        decoder_dropout=0.3,
        reconstruction_weight=1.0,
        fmri_weight=1.0,
        **more,
    ):
        o = checked(Gen1Options, constructor_options(locals()), type(self).__name__)
        super().__init__(o)
        self.encoder = SherlockEncoder(**dict(o))
        pixels = o.video_height * o.video_width * 3
        sizes = (o.bottleneck_dim, pixels, o.audio_mels, o.text_dim, o.decoder_hidden_dim)
        self.decoder = SherlockDecoder(*sizes, o.decoder_dropout, widths=o.widths)
