"""Audio features of every fMRI volume: EnCodec codes or a mel spectrogram."""

import math
import pathlib
import subprocess

import numpy as np

from jaxtrain import hub
from jaxtrain.systems.fmri_autoencoder.extras import require

ENCODEC_RATE = 24000  # hertz
CODE_FRAMES_PER_S = 75
CODEBOOKS = {1.5: 2, 3.0: 8, 6.0: 16, 12.0: 32, 24.0: 32}  # the original's table; the codec itself gives 4 at 3 kbps
MEL_FLOOR_DB = -80.0


def code_features(codes: np.ndarray, tr: float, volumes: int, bandwidth: float = 3.0) -> np.ndarray:
    """Cut codes int [codebook, frame] at 75 Hz into int64 [volume, codebooks * frames], codebook by codebook.

    Volume i takes the frames from int(i tr 75) to int((i+1) tr 75), cut or filled with 0 to int(75 tr). The table gives
    the number of codebooks for this bandwidth: missing ones are rows of 0, extra ones are dropped.
    """
    rows, length = CODEBOOKS.get(bandwidth, len(codes)), int(CODE_FRAMES_PER_S * tr)
    out = np.zeros((volumes, rows, length), np.int64)
    frames = codes[:rows]
    for volume in range(volumes):
        start, stop = int(volume * tr * CODE_FRAMES_PER_S), int((volume + 1) * tr * CODE_FRAMES_PER_S)
        part = frames[:, start:stop][:, :length]
        out[volume, : part.shape[0], : part.shape[1]] = part
    return out.reshape(volumes, -1)


def mel_frames(tr: float, rate: int, hop: int = 512) -> int:
    """Return the number of spectrogram frames per volume: 65 at 1.5 s and 22,050 Hz."""
    return math.ceil(int(tr * rate) / hop)


def mel_features(decibels: np.ndarray, tr: float, volumes: int, rate: int, hop: int = 512) -> np.ndarray:
    """Cut a spectrogram float [mels, frame] into float32 [volume, mels, frames], filled with -80.

    decibels: the spectrogram in decibels below its maximum.
    """
    length = mel_frames(tr, rate, hop)
    out = np.full((volumes, len(decibels), length), MEL_FLOOR_DB, np.float32)
    for volume in range(volumes):
        start, stop = int(volume * tr * rate) // hop, int((volume + 1) * tr * rate) // hop
        part = decibels[:, start:stop][:, :length]
        out[volume, :, : part.shape[1]] = part
    return out


def mel_means(decibels: np.ndarray, tr: float, volumes: int, rate: int, hop: int = 256) -> np.ndarray:
    """Return the spectrogram's mean over every volume, float32 [volume, mels]; -80 where there is no sound."""
    out = np.full((volumes, len(decibels)), MEL_FLOOR_DB, np.float32)
    for volume in range(volumes):
        part = decibels[:, int(volume * tr * rate) // hop : int((volume + 1) * tr * rate) // hop]
        if part.shape[1]:
            out[volume] = part.mean(1)
    return out


def spectrogram(sound: np.ndarray, rate: int, mels: int, window: int, hop: int) -> np.ndarray:
    """Return the mel power spectrogram in decibels below its maximum: float32 [mels, frame]."""
    librosa = require("librosa", "for mel spectrograms")
    power = librosa.feature.melspectrogram(y=sound, sr=rate, n_mels=mels, n_fft=window, hop_length=hop)
    return librosa.power_to_db(power, ref=np.max).astype(np.float32)


def sound_of(path, rate: int) -> np.ndarray:
    """Return the film's sound, mono float32 in -1..1, at `rate` hertz."""
    ffmpeg = require("imageio_ffmpeg", "to read the film's sound")
    command = [
        ffmpeg.get_ffmpeg_exe(),
        "-v",
        "error",
        "-i",
        str(path),
        "-f",
        "f32le",
        "-ac",
        "1",
        "-ar",
        str(rate),
        "-",
    ]
    raw = subprocess.run(command, capture_output=True, check=True).stdout
    return np.frombuffer(raw, np.float32)


def encode(sound: np.ndarray, model: str, bandwidth: float) -> np.ndarray:
    """Return EnCodec codes int64 [codebook, frame at 75 Hz] of mono sound at 24 kHz.

    model: a name on the Hugging Face hub, downloaded at first use, or a folder. Raises UserError if it cannot be found.
    """
    transformers = require("transformers", "for EnCodec codes")
    torch = require("torch", "for EnCodec codes")
    if not pathlib.Path(model).is_dir():
        hub.cache_only_if_unreachable()
    try:
        codec = transformers.EncodecModel.from_pretrained(model).eval()
    except OSError as error:
        raise hub.not_to_be_had(model, "data.encodec_model", "data.audio=mel needs none", error) from None
    with torch.no_grad():
        encoded = codec.encode(torch.from_numpy(sound.copy())[None, None], bandwidth=bandwidth)
    return encoded.audio_codes[0, 0].numpy()
