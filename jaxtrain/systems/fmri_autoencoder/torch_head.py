"""The second generation in plain torch: for the original's API, for deployment, and as the torch baseline."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from jaxtrain.systems.fmri_autoencoder.blocks import AUDIO_CODEBOOKS, LARGEST_CODE, Widths
from jaxtrain.systems.fmri_autoencoder.config import HeadOptions
from jaxtrain.systems.fmri_autoencoder.head import ENCODEC_FRAMES, MEL_UPSAMPLED_FRAMES
from jaxtrain.systems.fmri_autoencoder.torch_blocks import (
    KINDS,
    Autoencoder,
    Decoder,
    Dense,
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


class VideoEncoder(Dense):
    """Encoder of a window of frames, [batch, input_dim] or flattened to it -> [batch, output_features].

    gradient_checkpointing: in training, recompute the layers in the backward pass; as in the original, this updates the
    running statistics a second time. widths, encoder_dropout: see HeadOptions.
    """

    def __init__(
        self,
        input_dim=1641600,
        output_features=1024,
        gradient_checkpointing=False,
        *,
        widths=None,
        encoder_dropout=None,
    ):
        arguments, width = locals(), Widths(widths)
        sizes = width(4096), width(2048), width(output_features)
        super().__init__(width(input_dim), sizes, dropout_rates(encoder_dropout, 0.3, 0.3, 0.2))
        keep(self, arguments)

    def layer(self, number, x):
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(super().layer, number, x, use_reentrant=False)
        return super().layer(number, x)


class AudioEncoder(Dense):
    """Encoder of a volume's codes or spectrogram, flattened [batch, columns] -> [batch, output_features]."""

    def __init__(
        self,
        input_mels=2048,
        input_codebooks=AUDIO_CODEBOOKS,
        frames_per_tr=65,
        output_features=256,
        use_encodec=False,
        vocab_size=1024,
        embed_dim=64,
        *,
        widths=None,
        encoder_dropout=None,
    ):
        """vocab_size, embed_dim: not used, as in the original."""
        arguments, width = locals(), Widths(widths)
        columns = width((input_codebooks if use_encodec else input_mels) * frames_per_tr)
        sizes = width(512), width(output_features)
        super().__init__(columns, sizes, dropout_rates(encoder_dropout, 0.3, 0.2), False)
        keep(self, arguments)
        self.columns = columns

    def forward(self, x):
        """Raise ValueError if the input has other columns than the arguments say; else encode it."""
        if x.ndim != 2 or x.shape[1] != self.columns:
            raise ValueError(
                f"audio is {list(x.shape)}, wanted [batch, {self.columns}]: codebooks or mel bands times "
                "audio_frames_per_tr, flattened; do use_encodec and the data agree?"
            )
        return super().forward(x)


class MultimodalEncoder(Encoder):
    """Encoder: (video, audio, text), each [batch, columns] -> bottleneck (normalised, signed) and voxels.

    more: `encoder_dropout` and `widths` of HeadOptions.
    """

    def __init__(
        self,
        video_height=90,
        video_width=160,
        audio_mels=2048,
        audio_codebooks=AUDIO_CODEBOOKS,
        audio_frames_per_tr=65,
        text_dim=1024,
        n_voxels=85810,
        bottleneck_dim=2048,
        video_features=1024,
        audio_features=256,
        text_features=256,
        use_encodec=False,
        gradient_checkpointing=False,
        video_frames_per_tr=19,
        **more,
    ):
        arguments = locals()
        options = constructor_options(arguments)
        del options["audio_codebooks"]
        o = checked(HeadOptions, options, "MultimodalEncoder")
        super().__init__()
        keep(self, arguments)
        width, drop = Widths(o.widths), encoder_dropout(o)
        video, audio, text = width(o.video_features), width(o.audio_features), width(o.text_features)
        shared = {"widths": o.widths, "encoder_dropout": o.encoder_dropout}
        pixels = o.video_frames_per_tr * o.video_height * o.video_width * 3
        self.video_encoder = VideoEncoder(pixels, o.video_features, o.gradient_checkpointing, **shared)
        sound = (o.audio_mels, audio_codebooks, o.audio_frames_per_tr, o.audio_features, o.use_encodec)
        self.audio_encoder = AudioEncoder(*sound, **shared)
        self.text_encoder = TextEncoder(o.text_dim, o.text_features, **shared)
        self.pooled_dim = pooled = video + audio + text
        bottleneck = width(o.bottleneck_dim)
        self.feature_conv = nn.Sequential(*block(pooled, pooled, drop(0.2)))
        self.layer5 = nn.Sequential(*block(pooled, width(4096), drop(0.3)))
        self.layer6 = nn.Sequential(*block(width(4096), width(8000), drop(0.3)))
        self.layer7_bottleneck = nn.Sequential(nn.Linear(width(8000), bottleneck), nn.BatchNorm1d(bottleneck))
        voxels = nn.Linear(width(16384), width(o.n_voxels))
        self.bottleneck_to_voxels = nn.Sequential(*block(bottleneck, width(16384), drop(0.3)), voxels)

    def forward(self, video, audio, text, return_voxels: bool = False):
        """Return (bottleneck, voxels or None). Raises ValueError if the audio has not the options' columns."""
        x = torch.cat((self.video_encoder(video), self.audio_encoder(audio), self.text_encoder(text)), -1)
        bottleneck = self.layer7_bottleneck(self.layer6(self.layer5(self.feature_conv(x))))
        return bottleneck, self.bottleneck_to_voxels(bottleneck) if return_voxels else None


class MultimodalDecoder(Decoder):
    """Decoder: bottleneck -> the first frame of the window [batch, H*W*3] in 0..1, audio and text.

    audio: codes float [batch, 8, frames] in 0..1023, whole numbers in evaluation mode; or mel [batch, mels, frames],
    frame 65 and later always 0. For a single frame it is [batch, 8] or [batch, mels].
    """

    trunk_layers = (8, 9, 10, 11)

    def __init__(
        self,
        bottleneck_dim=2048,
        video_dim=43200,
        audio_dim=2048,
        audio_frames_per_tr=65,
        text_dim=1024,
        dropout=0.3,
        use_encodec=False,
        n_codebooks=AUDIO_CODEBOOKS,
        *,
        widths=None,
    ):
        arguments = locals()
        super().__init__()
        keep(self, arguments)
        width, mels = Widths(widths), audio_dim
        make = lambda *sizes: nn.Sequential(
            *(layer for i, j in zip(sizes, sizes[1:], strict=False) for layer in block(width(i), width(j), dropout))
        )
        self.layer8, self.layer9 = make(bottleneck_dim, 8000), make(8000, 4096)
        self.layer10, self.layer11 = make(4096, 2048), make(2048, 1536)
        self.layer12_video, self.layer12_audio = make(1536, 2048, 4096), make(1536, 2048, 2048)
        if not use_encodec:
            up = lambda: [nn.ConvTranspose1d(mels, mels, 4, stride=2, padding=1), nn.BatchNorm1d(mels), nn.ReLU()]
            self.audio_temporal_upsample = nn.Sequential(*up(), *up(), *up())
            self.audio_temporal_adjust = nn.Conv1d(mels, mels, 3, padding=1)
        self.layer12_text = make(1536, 1024, 1024)
        self.layer13_video = nn.Sequential(nn.Linear(width(4096), width(video_dim)), nn.Sigmoid())
        self.frames = ENCODEC_FRAMES if use_encodec and audio_frames_per_tr == 65 else audio_frames_per_tr
        self.audio_temporal_init_frames = MEL_UPSAMPLED_FRAMES // 8
        columns = n_codebooks * self.frames if use_encodec else mels * self.audio_temporal_init_frames
        self.layer13_audio = nn.Linear(width(2048), width(columns))
        self.layer13_text = nn.Linear(width(1024), width(text_dim))
        start_decoder(self)

    def forward(self, bottleneck):
        x = self.trunk(bottleneck)
        video, audio, text = (self.head(kind, x) for kind in KINDS)
        return video, audio[..., 0] if self.frames == 1 else audio, text

    def head(self, kind, x):
        x = super().head(kind, x)
        return self.audio(x) if kind == "audio" else x

    def audio(self, x):
        if self.use_encodec:
            codes = x.view(len(x), self.n_codebooks, -1).sigmoid() * LARGEST_CODE
            return codes if self.training else codes.round().clamp(0, LARGEST_CODE)
        x = self.audio_temporal_adjust(
            self.audio_temporal_upsample(x.view(len(x), -1, self.audio_temporal_init_frames))
        )
        x = x[..., : self.frames]
        return functional.pad(x, (0, self.frames - x.shape[-1]))


class MultimodalAutoencoder(Autoencoder):
    """Autoencoder from film, sound and text of one volume to voxels, and back; 5,295,714,674 parameters by default.

    video: float [batch, frames*H*W*3] in 0..1; audio: codes int or mel float [batch, columns]; text: float
    [batch, text_dim]; fmri_target: float [batch, n_voxels]. more: `encoder_dropout`, `widths`, `batch_norm_groups` of
    HeadOptions.
    """

    OPTIONS = HeadOptions
    SAVED = (*Autoencoder.SAVED, "use_encodec", "audio_frames_per_tr", "video_frames_per_tr")
    sizes_of_old_files = {"use_encodec": False, "audio_frames_per_tr": 65, "video_frames_per_tr": 19}

    def __init__(
        self,
        video_height=90,
        video_width=160,
        audio_mels=2048,
        text_dim=1024,
        n_voxels=85810,
        bottleneck_dim=2048,
        video_features=1024,
        audio_features=256,
        text_features=256,
        decoder_hidden_dim=2048,
        decoder_dropout=0.3,
        reconstruction_weight=1.0,
        fmri_weight=1.0,
        use_encodec=False,
        audio_frames_per_tr=65,
        gradient_checkpointing=False,
        video_frames_per_tr=19,
        **more,
    ):
        options = constructor_options(locals())
        self.decoder_hidden_dim = options.pop("decoder_hidden_dim")  # the original takes it and does not use it
        o = checked(HeadOptions, options, type(self).__name__)
        super().__init__(o)
        self.encoder = MultimodalEncoder(**dict(o))
        pixels = o.video_height * o.video_width * 3
        sizes = (o.bottleneck_dim, pixels, o.audio_mels, o.audio_frames_per_tr, o.text_dim)
        self.decoder = MultimodalDecoder(*sizes, o.decoder_dropout, o.use_encodec, widths=o.widths)
