"""Small synthetic recording, as arrays or as the raw files that the pipeline reads.

A few slowly varying features drive film, sound, text and, through the haemodynamic response, the voxels.
"""

import dataclasses
import pathlib
import subprocess
import tempfile
import wave
from collections.abc import Callable, Iterator

import numpy as np

from jaxtrain.systems.fmri_autoencoder import text, volumes
from jaxtrain.systems.fmri_autoencoder.extras import require
from jaxtrain.systems.fmri_autoencoder.hrf import canonical_hrf, causal, respond
from torch_bridge.atomic_file import replacing

FEATURES = ("light", "fire", "water", "crowd", "music", "motion")  # what the words of the annotations name
LEVELS = ("dim", "some", "strong")
FILM_NAME, ANNOTATIONS_NAME, VOLUME_FOLDER = "stimuli_Sherlock.m4v", "annotations.xlsx", "sherlock_nii"
FILM_SIZE, FILM_RATE, SOUND_RATE = (36, 64), 10, 8000  # pixels (height, width), frames per second, hertz
GRID = (9, 10, 7)
COLUMNS = 1 << 15  # film columns that are convolved at a time


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a synthetic recording.

    signal: share of a voxel's variance that the film explains; a perfect model's correlation is about its square root.
    """

    volumes: int = 240
    subjects: int = 2
    tr: float = 1.5
    signal: float = 0.7
    seed: int = 0


def latents(plan: Plan) -> np.ndarray:
    """Return the features as slow random walks within bounds, float32 [volume, feature] in 0..1."""
    rng = np.random.Generator(np.random.Philox(plan.seed))
    state, out = rng.normal(size=len(FEATURES)), []
    for _ in range(plan.volumes):
        state = 0.85 * state + np.sqrt(1 - 0.85**2) * rng.normal(size=len(FEATURES))
        out.append(state)
    return (1 / (1 + np.exp(-1.5 * np.array(out)))).astype(np.float32)


def brain() -> np.ndarray:
    """Return an ellipsoid within the grid, bool [x, y, z]."""
    axes = np.meshgrid(*(np.linspace(-1, 1, size) for size in GRID), indexing="ij")
    return sum(axis**2 for axis in axes) <= 1


def bold(plan: Plan, voxels: int) -> Iterator[np.ndarray]:
    """Yield each subject's response to the latents plus noise: float32 [volume, voxel], zero mean and unit variance."""
    kernel = canonical_hrf(plan.tr)
    driven = causal(latents(plan).astype(np.float64), kernel / kernel.sum())
    driven = (driven - driven.mean(0)) / driven.std(0)
    rng = np.random.Generator(np.random.Philox(plan.seed + 1))
    weights = rng.normal(size=(len(FEATURES), voxels))
    response = driven @ weights
    response /= response.std(0)
    response *= np.sqrt(plan.signal)
    for _ in range(plan.subjects):
        noise = rng.normal(size=response.shape)
        yield (response + np.sqrt(1 - plan.signal) * noise).astype(np.float32)


def frame(levels: np.ndarray, time: float, size=FILM_SIZE) -> np.ndarray:
    """Draw a film frame, uint8 [height, width, 3]: a strip per feature, as bright as its level, plus moving texture."""
    height, width = size
    strips = np.minimum(np.arange(width) * len(levels) // width, len(levels) - 1)
    light = np.repeat(levels[strips][None], height, 0)
    texture = 0.08 * np.sin(np.arange(height)[:, None] / 3 + np.arange(width) / 5 + time)
    tint = np.array([1.0, 0.8, 0.6])
    return (np.clip(light + texture, 0, 1)[..., None] * tint * 255).astype(np.uint8)


def sentence(levels: np.ndarray) -> str:
    """Return the levels as a text like "strong-light; dim-fire; ..."."""
    degrees = np.minimum((levels * len(LEVELS)).astype(int), len(LEVELS) - 1)
    return "; ".join(f"{LEVELS[degree]}-{name}" for degree, name in zip(degrees, FEATURES, strict=True))


Create = Callable[[str, tuple[int, ...], type], np.ndarray]  # name, shape, dtype -> an array to write into


def in_memory(name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.empty(shape, dtype)


def arrays(
    plan: Plan, model, per_frame: bool, create: Create = in_memory
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Return stimuli as the pipeline would (response applied), and voxels per subject, without any files.

    model: options of either generation, which give the arrays' sizes. per_frame: True for a window of frames per
    volume.
    create: creates the arrays to fill, named video, audio, text, bold_1, bold_2, ...; besides these, at most one
    subject and a few of the film's columns are held in memory.
    """
    levels, rng = latents(plan), np.random.Generator(np.random.Philox(plan.seed + 2))
    columns = model.audio_columns if per_frame else model.audio_mels
    if getattr(model, "use_encodec", False):
        sound = np.round(levels @ rng.uniform(size=(len(FEATURES), columns)) * 1023 / len(FEATURES)).astype(np.int16)
    else:
        sound = levels @ rng.normal(size=(len(FEATURES), columns)).astype(np.float32)
    words = text.hashed([sentence(row) for row in levels], model.text_dim)
    film = windows(levels, (model.video_height, model.video_width), model.video_frames_per_tr if per_frame else 1)
    stimuli = {"video": film, "audio": sound, "text": words}
    out = {}
    for name, features in stimuli.items():
        dtype = np.float32 if features.dtype == np.uint8 else features.dtype
        out[name] = create(name, features.shape, dtype)
        for start in range(0, features.shape[1], COLUMNS):
            part = features[:, start : start + COLUMNS]
            part = part / np.float32(255) if part.dtype == np.uint8 else part
            out[name][:, start : start + COLUMNS] = respond(part, plan.tr)
    voxels = []
    for subject, values in enumerate(bold(plan, model.n_voxels), 1):
        voxels.append(create(f"bold_{subject}", values.shape, np.float32))
        voxels[-1][:] = values
    return out, voxels


def windows(levels: np.ndarray, size: tuple[int, int], frames: int) -> np.ndarray:
    """Return the film of every volume, flattened: uint8 [volume, frames * height * width * 3]."""
    out = np.empty((len(levels), frames, *size, 3), np.uint8)
    for volume, row in enumerate(levels):
        for moment in range(frames):
            out[volume, moment] = frame(row, volume + moment, size)
    return out.reshape(len(levels), -1)


def write_raw(folder: pathlib.Path, plan: Plan) -> None:
    """Write the files that a real recording has: film with sound, annotations, one NIfTI per subject."""
    folder.mkdir(parents=True, exist_ok=True)
    levels = latents(plan)
    _write_annotations(folder / ANNOTATIONS_NAME, levels, plan)
    _write_volumes(folder / VOLUME_FOLDER, plan)
    _write_film(folder / FILM_NAME, levels, plan)


def _write_film(path: pathlib.Path, levels: np.ndarray, plan: Plan) -> None:
    ffmpeg = require("imageio_ffmpeg", "to write the film")
    seconds = plan.volumes * plan.tr
    times = np.arange(int(seconds * SOUND_RATE)) / SOUND_RATE
    tones = np.stack([np.sin(2 * np.pi * 200 * 1.5**k * times) for k in range(len(FEATURES))], 1)
    loud = levels[np.minimum((times / plan.tr).astype(int), plan.volumes - 1)]
    samples = ((tones * loud).mean(1) * 32767 * 0.9).astype("<i2")
    with tempfile.TemporaryDirectory() as scratch:
        sound = pathlib.Path(scratch) / "sound.wav"
        with wave.open(str(sound), "wb") as file:
            file.setparams((1, 2, SOUND_RATE, len(samples), "NONE", ""))
            file.writeframes(samples.tobytes())
        height, width = FILM_SIZE
        with replacing(path) as aside:  # an interrupted write leaves no partial film
            command = [ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", "-f", "rawvideo", "-pix_fmt", "rgb24"]
            command += ["-s", f"{width}x{height}", "-r", str(FILM_RATE), "-i", "-", "-i", str(sound)]
            command += ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-c:a", "aac", "-f", "mp4", str(aside)]
            with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
                for number in range(int(seconds * FILM_RATE)):
                    row = levels[min(int(number / FILM_RATE / plan.tr), plan.volumes - 1)]
                    process.stdin.write(frame(row, number / FILM_RATE).tobytes())
            if process.returncode:
                raise OSError(f"ffmpeg failed with {process.returncode} while writing {path}")


def _write_annotations(path: pathlib.Path, levels: np.ndarray, plan: Plan) -> None:
    pandas = require("pandas", "to write the annotations")
    require("openpyxl", "to write the annotations")
    starts = np.arange(plan.volumes) * plan.tr
    texts = [sentence(row) for row in levels]
    table = {f" {text.START}": starts, text.END: starts + plan.tr, text.TEXT_COLUMNS[0]: texts}
    pandas.DataFrame({**table, text.TEXT_COLUMNS[2]: "studio"}).to_excel(path, index=False)


def _write_volumes(folder: pathlib.Path, plan: Plan) -> None:
    nibabel = require("nibabel", "to write NIfTI volumes")
    folder.mkdir(exist_ok=True)
    mask = brain()
    rng = np.random.Generator(np.random.Philox(plan.seed + 3))
    for subject, signal in enumerate(bold(plan, int(mask.sum())), 1):
        level = rng.uniform(500, 1500, mask.sum())
        image = volumes.to_volume((level * (1 + 0.02 * signal)).astype(np.float32), mask)
        header = nibabel.Nifti1Image(image, np.diag([3.0, 3.0, 3.0, 1.0]))
        header.header.set_zooms((3.0, 3.0, 3.0, plan.tr))
        nibabel.save(header, folder / volumes.FILE_NAME.format(subject))
