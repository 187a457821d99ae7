"""Both networks in plain torch: they load an exported state dict with strict=True and serve as the torch baseline."""

import math

import torch
from torch import nn
from torch.nn import functional

from jaxtrain.systems.fmri_autoencoder.blocks import AUDIO_CODEBOOKS, LARGEST_CODE, Widths
from jaxtrain.systems.fmri_autoencoder.config import Gen1Options, HeadOptions
from jaxtrain.systems.fmri_autoencoder.gen1 import AUDIO_CHANNELS, VIDEO_CHANNELS
from jaxtrain.systems.fmri_autoencoder.head import ENCODEC_FRAMES, MEL_UPSAMPLED_FRAMES

KINDS = ("video", "audio", "text")


def build(config) -> nn.Module:
    """The module of a config's model section."""
    return Head(config.model) if isinstance(config.model, HeadOptions) else Gen1(config.model)


def call(module, batch) -> dict[str, torch.Tensor]:
    return module(batch["video"], batch["audio"], batch["text"])


def block(inputs: int, outputs: int, dropout: float) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(), nn.Dropout(dropout)]


def start_decoder(decoder: nn.Module) -> None:
    """Normal weights with std sqrt(2 / fan_out), biases 0, as the original's decoder starts."""
    for module in decoder.modules():
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(module.bias)


class Dense(nn.Module):
    def __init__(self, inputs, sizes, dropouts, relu_first=True):
        super().__init__()
        for number, size in enumerate(sizes, 1):
            setattr(self, f"fc{number}", nn.Linear(inputs, size))
            setattr(self, f"bn{number}", nn.BatchNorm1d(size))
            inputs = size
        self.dropouts, self.relu_first = dropouts, relu_first

    def forward(self, x):
        x = x.float().flatten(1)
        for number, rate in enumerate(self.dropouts, 1):
            x = getattr(self, f"bn{number}")(getattr(self, f"fc{number}")(x))
            drop = lambda y: functional.dropout(y, rate, self.training)
            x = drop(x.relu()) if self.relu_first else drop(x).relu()
        return x


class Conv(nn.Module):
    def __init__(self, conv, norm, inputs, channels, flat, features, dropout):
        super().__init__()
        for number, size in enumerate(channels, 1):
            setattr(self, f"conv{number}", conv(inputs, size, 3, stride=2, padding=1))
            setattr(self, f"bn{number}", norm(size))
            inputs = size
        self.fc = nn.Linear(flat, features)
        self.layers, self.dropout = len(channels), dropout

    def forward(self, x):
        for number in range(1, self.layers + 1):
            x = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(x)).relu()
        return functional.dropout(self.fc(x.flatten(1)), self.dropout, self.training).relu()


class _Autoencoder(nn.Module):
    def forward(self, video, audio, text):
        bottleneck, voxels = self.encoder(video, audio, text)
        video, audio, text = self.decoder(bottleneck)
        return {
            "bottleneck": bottleneck,
            "predicted_fmri": voxels,
            "video_recon": video,
            "audio_recon": audio,
            "text_recon": text,
        }


class Gen1(_Autoencoder):
    def __init__(self, options: Gen1Options):
        super().__init__()
        self.encoder, self.decoder = Gen1Encoder(options), Gen1Decoder(options)
        start_decoder(self.decoder)


class Gen1Encoder(nn.Module):
    def __init__(self, o: Gen1Options):
        super().__init__()
        width, channel, drop = Widths(o.widths), Widths(o.channel_widths), _dropout(o)
        video, audio, text = width(o.video_features), width(o.audio_features), width(o.text_features)

        def flat(channels, space):
            own = channel(channels) * space
            return own if width(channels * space) == channels * space else width(channels * space)

        pixels, bands = math.ceil(o.video_height / 16) * math.ceil(o.video_width / 16), math.ceil(o.audio_mels / 8)
        channels = [channel(c) for c in VIDEO_CHANNELS], [channel(c) for c in AUDIO_CHANNELS]
        self.video_encoder = Conv(nn.Conv2d, nn.BatchNorm2d, 3, channels[0], flat(256, pixels), video, drop(0.2))
        self.audio_encoder = Conv(nn.Conv1d, nn.BatchNorm1d, 1, channels[1], flat(128, bands), audio, drop(0.2))
        self.text_encoder = Dense(width(o.text_dim), (width(512), text), (drop(0.2), drop(0.2)))
        pooled, bottleneck = video + audio + text, width(o.bottleneck_dim)
        self.feature_conv = nn.Sequential(*block(pooled, pooled, drop(0.2)))
        first = block(pooled, width(4096), drop(0.3))
        self.to_bottleneck = nn.Sequential(*first, *block(width(4096), bottleneck, drop(0.2)))
        voxels = nn.Linear(width(16384), width(o.n_voxels))
        self.bottleneck_to_voxels = nn.Sequential(*block(bottleneck, width(16384), drop(0.3)), voxels)

    def forward(self, video, audio, text):
        features = self.video_encoder(video), self.audio_encoder(audio[:, None]), self.text_encoder(text)
        bottleneck = self.to_bottleneck(self.feature_conv(torch.cat(features, -1)))
        return bottleneck, self.bottleneck_to_voxels(bottleneck)


class Gen1Decoder(nn.Module):
    def __init__(self, o: Gen1Options):
        super().__init__()
        width, rate = Widths(o.widths), o.decoder_dropout
        one, two, four = (width(k * o.decoder_hidden_dim) for k in (1, 2, 4))
        half = width(o.decoder_hidden_dim // 2)
        make = lambda *pairs: nn.Sequential(*(layer for i, j in pairs for layer in block(i, j, rate)))
        self.layer7, self.layer8, self.layer9 = (
            make((width(o.bottleneck_dim), one)),
            make((one, two)),
            make((two, four)),
        )
        self.layer10_video = make((four, four), (four, two))
        self.layer10_audio = make((four, one), (one, half))
        self.layer10_text = make((four, one), (one, one))
        pixels = width(o.video_height * o.video_width * 3)
        self.layer11_video = nn.Sequential(nn.Linear(two, pixels), nn.Sigmoid())
        self.layer11_audio = nn.Linear(half, width(o.audio_mels))
        self.layer11_text = nn.Linear(one, width(o.text_dim))

    def forward(self, x):
        x = self.layer9(self.layer8(self.layer7(x)))
        return tuple(getattr(self, f"layer11_{k}")(getattr(self, f"layer10_{k}")(x)) for k in KINDS)


class Head(_Autoencoder):
    def __init__(self, options: HeadOptions):
        super().__init__()
        self.encoder, self.decoder = HeadEncoder(options), HeadDecoder(options)
        start_decoder(self.decoder)


class HeadEncoder(nn.Module):
    def __init__(self, o: HeadOptions):
        super().__init__()
        width, drop = Widths(o.widths), _dropout(o)
        video, audio, text = width(o.video_features), width(o.audio_features), width(o.text_features)
        sizes, rates = (width(4096), width(2048), video), (drop(0.3), drop(0.3), drop(0.2))
        self.video_encoder = Dense(width(o.video_columns), sizes, rates)
        self.audio_encoder = Dense(width(o.audio_columns), (width(512), audio), (drop(0.3), drop(0.2)), False)
        self.text_encoder = Dense(width(o.text_dim), (width(512), text), (drop(0.2), drop(0.2)))
        pooled, bottleneck = video + audio + text, width(o.bottleneck_dim)
        self.feature_conv = nn.Sequential(*block(pooled, pooled, drop(0.2)))
        self.layer5 = nn.Sequential(*block(pooled, width(4096), drop(0.3)))
        self.layer6 = nn.Sequential(*block(width(4096), width(8000), drop(0.3)))
        self.layer7_bottleneck = nn.Sequential(nn.Linear(width(8000), bottleneck), nn.BatchNorm1d(bottleneck))
        voxels = nn.Linear(width(16384), width(o.n_voxels))
        self.bottleneck_to_voxels = nn.Sequential(*block(bottleneck, width(16384), drop(0.3)), voxels)

    def forward(self, video, audio, text):
        x = torch.cat((self.video_encoder(video), self.audio_encoder(audio), self.text_encoder(text)), -1)
        bottleneck = self.layer7_bottleneck(self.layer6(self.layer5(self.feature_conv(x))))
        return bottleneck, self.bottleneck_to_voxels(bottleneck)


class HeadDecoder(nn.Module):
    def __init__(self, o: HeadOptions):
        super().__init__()
        width, mels = Widths(o.widths), o.audio_mels
        make = lambda *sizes: nn.Sequential(
            *(
                layer
                for i, j in zip(sizes, sizes[1:], strict=False)
                for layer in block(width(i), width(j), o.decoder_dropout)
            )
        )
        self.layer8, self.layer9 = make(o.bottleneck_dim, 8000), make(8000, 4096)
        self.layer10, self.layer11 = make(4096, 2048), make(2048, 1536)
        self.layer12_video, self.layer12_audio = make(1536, 2048, 4096), make(1536, 2048, 2048)
        self.use_encodec = o.use_encodec
        if not o.use_encodec:
            up = lambda: [nn.ConvTranspose1d(mels, mels, 4, stride=2, padding=1), nn.BatchNorm1d(mels), nn.ReLU()]
            self.audio_temporal_upsample = nn.Sequential(*up(), *up(), *up())
            self.audio_temporal_adjust = nn.Conv1d(mels, mels, 3, padding=1)
        self.layer12_text = make(1536, 1024, 1024)
        pixels = width(o.video_height * o.video_width * 3)
        self.layer13_video = nn.Sequential(nn.Linear(width(4096), pixels), nn.Sigmoid())
        self.frames = ENCODEC_FRAMES if o.use_encodec and o.audio_frames_per_tr == 65 else o.audio_frames_per_tr
        columns = AUDIO_CODEBOOKS * self.frames if o.use_encodec else mels * MEL_UPSAMPLED_FRAMES // 8
        self.layer13_audio = nn.Linear(width(2048), width(columns))
        self.layer13_text = nn.Linear(width(1024), width(o.text_dim))

    def forward(self, x):
        x = self.layer11(self.layer10(self.layer9(self.layer8(x))))
        audio = self.audio(self.layer13_audio(self.layer12_audio(x)))
        audio = audio[..., 0] if self.frames == 1 else audio
        return self.layer13_video(self.layer12_video(x)), audio, self.layer13_text(self.layer12_text(x))

    def audio(self, x):
        if self.use_encodec:
            codes = x.view(len(x), AUDIO_CODEBOOKS, -1).sigmoid() * LARGEST_CODE
            return codes if self.training else codes.round().clamp(0, LARGEST_CODE)
        x = self.audio_temporal_adjust(self.audio_temporal_upsample(x.view(len(x), -1, MEL_UPSAMPLED_FRAMES // 8)))
        x = x[..., : self.frames]
        return functional.pad(x, (0, self.frames - x.shape[-1]))


def _dropout(options):
    given = options.encoder_dropout
    return (lambda rate: rate) if given is None else (lambda rate: given)


def loss(module, batch, config) -> torch.Tensor:
    """The criterion of a config on the valid rows of a batch."""
    valid = batch["valid"].bool()
    batch = {name: value[valid] for name, value in batch.items()}
    outputs, options = call(module, batch), config.loss
    normalized = options.normalize_by_std
    if normalized is None:
        normalized = isinstance(config.model, HeadOptions)
    scale = lambda target: target.std() + 1e-8 if normalized else 1.0
    reconstruction = 0.0
    for kind in KINDS:
        prediction, target = _matched(kind, outputs[f"{kind}_recon"], batch[kind].float())
        error = functional.mse_loss(prediction, target) / scale(target)
        reconstruction = reconstruction + getattr(options, f"{kind}_weight") * error
    prediction, target = outputs["predicted_fmri"], batch["fmri"].float()
    if options.fmri_loss_type == "correlation":
        fmri = 1 - (functional.normalize(prediction) * functional.normalize(target)).sum(-1).mean()
    else:
        function = functional.mse_loss if options.fmri_loss_type == "mse" else functional.l1_loss
        fmri = function(prediction, target) / scale(target)
    return options.reconstruction_weight * reconstruction + options.fmri_weight * fmri


def _matched(kind, prediction, target):
    if kind == "video":
        return prediction, target.flatten(1)[:, : prediction.shape[-1]]
    if kind == "audio" and prediction.ndim != target.ndim:
        if prediction[0].numel() > target[0].numel():
            prediction = prediction[..., : target.shape[1] // prediction.shape[1]]
        return prediction.flatten(1), target.flatten(1)
    return prediction, target
