"""Video features: the film frames of every volume."""

import math
from collections.abc import Iterable, Iterator

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder.extras import require


def frames_per_volume(fps: float, tr: float, skip: int) -> int:
    """Return the frames per window: 38 at 25 fps and 1.5 s (37.5 rounds to even), 19 of them at skip 2."""
    return math.ceil(int(np.round(fps * tr)) / skip)


def volumes_of(total_frames: int, fps: float, tr: float) -> int:
    """Return the number of whole volumes that a film covers."""
    return math.floor(total_frames / fps / tr)


def window(volume: int, fps: float, tr: float, skip: int) -> np.ndarray:
    """Return frame numbers of a volume's window, which ends with the volume; negative ones precede the film."""
    stop = int((volume + 1) * tr * fps)
    return np.arange(stop - int(np.round(fps * tr)), stop, skip)


def span(volume: int, fps: float, tr: float) -> np.ndarray:
    """Return the frame numbers between a volume's start and end."""
    return np.arange(int(volume * tr * fps), int((volume + 1) * tr * fps))


def resize(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize by the mean over the area of each target pixel: uint8 [H, W, C] -> uint8 [height, width, C].

    Source: OpenCV's INTER_AREA, with its rounding (half up if both sides halve, else half to even). Raises UserError if
    the target is larger than the frame.
    """
    rows, columns = frame.shape[:2]
    if (rows, columns) == (height, width):
        return frame
    if height > rows or width > columns:
        raise UserError(f"the film has frames of {columns}x{rows}, data asks for {width}x{height}; lower model.video_*")
    if rows == 2 * height and columns == 2 * width:
        blocks = frame.reshape(height, 2, width, 2, -1).astype(np.uint16)
        return ((blocks.sum((1, 3)) + 2) >> 2).astype(np.uint8)
    if rows % height == 0 and columns % width == 0:
        blocks = frame.reshape(height, rows // height, width, columns // width, -1)
        scale = np.float32(1 / (blocks.shape[1] * blocks.shape[3]))
        return np.rint(blocks.sum((1, 3), dtype=np.uint32).astype(np.float32) * scale).astype(np.uint8)
    image = np.tensordot(_coverage(rows, height), frame.astype(np.float32), 1)
    return np.rint(np.einsum("hwc,vw->hvc", image, _coverage(columns, width))).astype(np.uint8)


def _coverage(size: int, target: int) -> np.ndarray:
    """Return how much of each target pixel every source pixel covers: float32 [target, size]."""
    edges = np.arange(target + 1) * (size / target)
    low, high = edges[:-1, None], edges[1:, None]
    pixel = np.arange(size)[None]
    overlap = np.clip(np.minimum(high, pixel + 1) - np.maximum(low, pixel), 0, None)
    return (overlap / (size / target)).astype(np.float32)


def window_features(
    frames: Iterable[np.ndarray],
    total: int,
    fps: float,
    tr: float,
    skip: int,
    size,
    volumes: int | None = None,
    out=None,
) -> np.ndarray:
    """Return the windows of all volumes, uint8 [volume, frames, height, width, 3], from RGB frames in order.

    Frames outside the film are black. size: (height, width). volumes: use only the first n. out: array to write into,
    for arrays on disk.
    """
    count = min(volumes_of(total, fps, tr), volumes or total)
    places: dict[int, list[tuple[int, int]]] = {}
    for volume in range(count):
        for slot, number in enumerate(window(volume, fps, tr, skip)):
            places.setdefault(int(number), []).append((volume, slot))
    shape = (count, frames_per_volume(fps, tr, skip), *size, 3)
    out = np.zeros(shape, np.uint8) if out is None else out
    for number, frame in enumerate(frames):
        if number in places:
            small = resize(frame, *size)
            for volume, slot in places[number]:
                out[volume, slot] = small
    return out


def mean_features(
    frames: Iterable[np.ndarray], total: int, fps: float, tr: float, size, volumes: int | None = None
) -> np.ndarray:
    """Return the mean frame of every volume, float32 [volume, height, width, 3] in 0..1."""
    count = min(volumes_of(total, fps, tr), volumes or total)
    sums, counts = np.zeros((count, *size, 3)), np.zeros(count)
    owner = {int(number): volume for volume in range(count) for number in span(volume, fps, tr)}
    for number, frame in enumerate(frames):
        if number in owner:
            sums[owner[number]] += resize(frame, *size)
            counts[owner[number]] += 1
    return (sums / np.maximum(counts, 1)[:, None, None, None] / 255).astype(np.float32)


def film(path) -> tuple[Iterator[np.ndarray], int, float]:
    """Return (RGB frames uint8 [height, width, 3] in order, how many, frames per second) of a film file."""
    ffmpeg = require("imageio_ffmpeg", "to read the film")
    total, _ = ffmpeg.count_frames_and_secs(str(path))
    reader = ffmpeg.read_frames(str(path), pix_fmt="rgb24")
    meta = next(reader)
    width, height = meta["size"]

    def frames():
        for data in reader:
            yield np.frombuffer(data, np.uint8).reshape(height, width, 3)

    return frames(), int(total), float(meta["fps"])
