"""Pipeline from a recording's raw files to arrays on disk, in stages cached under the hash of their inputs."""

import dataclasses
import pathlib
import re
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder import audio, cache, hrf, text, video, volumes
from jaxtrain.systems.fmri_autoencoder.config import Data, HeadOptions
from jaxtrain.systems.fmri_autoencoder.errors import MissingFile
from jaxtrain.systems.fmri_autoencoder.extras import require
from jaxtrain.systems.fmri_autoencoder.sources import split_volumes
from jaxtrain.systems.fmri_autoencoder.synthetic import ANNOTATIONS_NAME, FILM_NAME, VOLUME_FOLDER

HEAD_SPECTROGRAM, GEN1_SPECTROGRAM = (4096, 512), (1024, 256)  # window and hop, samples
CHUNK_COLUMNS = 1 << 16  # features that are convolved at a time


@dataclasses.dataclass(frozen=True)
class Recording:
    """A prepared recording, with arrays mapped from disk.

    stimuli: `video`, `audio`, `text`, [volume, columns]. fmri: per subject [volume, voxel], as measured. mean, std: per
    subject [voxel], or None. mask: bool [x, y, z]; affine: [4, 4].
    """

    stimuli: dict[str, np.ndarray]
    fmri: list[np.ndarray]
    subject_ids: list[int]
    mask: np.ndarray
    affine: np.ndarray
    mean: list[np.ndarray] | None
    std: list[np.ndarray] | None
    folders: dict[str, pathlib.Path]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the data section with every default of the task filled in."""

    video: str
    audio: str
    text: str
    hrf: str | None
    normalize: str
    size: tuple[int, int]
    mels: int
    text_width: int
    data: Data

    @classmethod
    def of(cls, config) -> "Settings":
        data, model, head = config.data, config.model, isinstance(config.model, HeadOptions)
        original = config.compat == "original"
        pick = lambda value, default: default if value is None else value
        kind = pick(data.text, "concatenate" if head else "average")
        scenes = data.max_annotations_per_tr if kind == "concatenate" else 1
        if model.text_dim % scenes:
            raise UserError(
                f"model.text_dim: {model.text_dim} is not {scenes} embeddings side by side "
                "(data.max_annotations_per_tr); 3072 holds three of 1024"
            )
        sound = "mel_mean" if not head else "encodec" if model.use_encodec else "mel"
        return cls(
            video=pick(data.video, "window" if head else "mean"),
            audio=pick(data.audio, sound),
            text=kind,
            hrf=pick(data.hrf, "original" if original else "causal") if data.apply_hrf else None,
            normalize=pick(data.normalize_fmri, ("all" if head else "none") if original else "train"),
            size=(model.video_height, model.video_width),
            mels=model.audio_mels,
            text_width=model.text_dim // scenes,
            data=data,
        )


class Pipeline:
    """Preparation of what the settings ask for; finished stages are taken from the cache.

    info: called with one line per stage. bar: wraps an iterable with a progress bar.
    """

    def __init__(self, settings: Settings, info=lambda line: None, bar=lambda items, name: items):
        self.settings, self.data = settings, settings.data
        self.raw = pathlib.Path(self.data.data_dir)
        self.cache = cache.cache_of(self.data)
        self.info, self.bar = info, bar

    def run(self) -> Recording:
        """Run every stage and return the recording. Raises UserError naming the raw files that are missing."""
        files = self._files()
        film, subjects = files["film"], files["subjects"]
        video_folder = self._stage("video", {**self._video_key(), "film": self.cache.fingerprint(film)}, film)
        frames = len(cache.load(video_folder, "video"))
        keys = {"film": self.cache.fingerprint(film), "volumes": frames}
        audio_folder = self._stage("audio", {**self._audio_key(), **keys}, film)
        notes = files["annotations"]
        text_key = {**self._text_key(), "volumes": frames, "annotations": self.cache.fingerprint(notes)}
        text_folder = self._stage("text", text_key, notes)
        mask_folder, bold_folders = self._voxels(subjects)
        stages = {"video": video_folder, "audio": audio_folder, "text": text_folder}
        lengths = [len(cache.load(folder, name)) for name, folder in stages.items()]
        length = min(*lengths, *(len(cache.load(folder, "bold")) for folder in bold_folders))
        aligned_key = {
            "stages": {name: folder.name for name, folder in stages.items()},
            "length": length,
            "hrf": self.settings.hrf,
            "tr": self.data.tr,
        }
        aligned = self._stage("aligned", aligned_key, stages, length)
        fmri = [cache.load(folder, "bold")[:length] for folder in bold_folders]
        scale = self._scale(bold_folders, length)
        ids = list(subjects)
        if self.data.mode == "cross_subject":
            key = {"bold": [folder.name for folder in bold_folders], "scale": scale and scale.name, "length": length}
            fmri, ids, scale = [cache.load(self._stage("average", key, fmri, scale), "bold")], [0], None
        return Recording(
            stimuli={name: cache.load(aligned, name) for name in stages},
            fmri=fmri,
            subject_ids=ids,
            mask=np.load(mask_folder / "mask.npy"),
            affine=np.load(mask_folder / "affine.npy"),
            mean=None if scale is None else list(cache.load(scale, "mean")),
            std=None if scale is None else list(cache.load(scale, "std")),
            folders={**stages, "mask": mask_folder, "aligned": aligned},
        )

    def _stage(self, name: str, key: dict[str, Any], *arguments) -> pathlib.Path:
        folder = self.cache.folder(name, key)
        self.info(f"{name}: {folder}{' (ready)' if folder.exists() else ''}")
        return self.cache.build(name, key, lambda out: getattr(self, f"_make_{name}")(out, *arguments))

    # --- raw files ----------------------------------------------------------------------------------------------

    def _files(self) -> dict[str, Any]:
        film, notes = self.raw / FILM_NAME, self.raw / ANNOTATIONS_NAME
        folder = self.raw / VOLUME_FOLDER
        missing = [str(path) for path in (film, notes) if not path.exists()]
        pattern = re.compile(volumes.FILE_NAME.format(r"(\d+)").replace(".nii.gz", r"\.nii(\.gz)?$"))
        present = {int(match.group(1)): path for path in folder.glob("*") if (match := pattern.match(path.name))}
        subjects = sorted(present) if self.data.subjects == "all" else self.data.subjects
        missing += [str(folder / volumes.FILE_NAME.format(s)) for s in subjects or [1] if s not in present]
        if missing:
            raise MissingFile(
                f"data.data_dir: {', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''} missing. To try without "
                "the film: python -m jaxtrain.systems.fmri_autoencoder.prepare --synthetic --data-dir DIR"
            )
        return {"film": film, "annotations": notes, "subjects": {s: present[s] for s in subjects}}

    def _video_key(self) -> dict[str, Any]:
        keys = {"kind": self.settings.video, "tr": self.data.tr, "size": self.settings.size, "max": self.data.max_trs}
        return keys | ({"skip": self.data.frame_skip} if self.settings.video == "window" else {})

    def _audio_key(self) -> dict[str, Any]:
        kind = self.settings.audio
        key = {"kind": kind, "tr": self.data.tr}
        if kind == "encodec":
            return {**key, "rate": self.data.encodec_bandwidth, "model": self.data.encodec_model}
        return {**key, "rate": self.data.audio_sample_rate, "mels": self.settings.mels}

    def _text_key(self) -> dict[str, Any]:
        data = self.data
        keys = {"kind": self.settings.text, "tr": data.tr, "encoder": data.text_encoder, "gap": data.text_gap}
        scenes = {"scenes": data.max_annotations_per_tr} if self.settings.text == "concatenate" else {}
        return {**keys, **scenes, "width": self.settings.text_width}

    def _make_video(self, out: pathlib.Path, path: pathlib.Path) -> None:
        frames, total, fps = video.film(path)
        data, size = self.data, self.settings.size
        frames = self.bar(frames, "film")
        if self.settings.video == "mean":
            cache.save(out, "video", video.mean_features(frames, total, fps, data.tr, size, data.max_trs))
            return
        count = min(video.volumes_of(total, fps, data.tr), data.max_trs or total)
        shape = (count, video.frames_per_volume(fps, data.tr, data.frame_skip), *size, 3)
        target = cache.create(out, "video", shape, np.uint8)
        video.window_features(frames, total, fps, data.tr, data.frame_skip, size, data.max_trs, target)

    def _make_audio(self, out: pathlib.Path, path: pathlib.Path) -> None:
        tr, rate, kind = self.data.tr, self.data.audio_sample_rate, self.settings.audio
        count = self._volumes()
        if kind == "encodec":
            bandwidth = self.data.encodec_bandwidth
            codes = audio.encode(audio.sound_of(path, audio.ENCODEC_RATE), self.data.encodec_model, bandwidth)
            cache.save(out, "audio", audio.code_features(codes, tr, count, bandwidth).astype(np.int16))
            return
        window, hop = HEAD_SPECTROGRAM if kind == "mel" else GEN1_SPECTROGRAM
        decibels = audio.spectrogram(audio.sound_of(path, rate), rate, self.settings.mels, window, hop)
        make = audio.mel_features if kind == "mel" else audio.mel_means
        cache.save(out, "audio", make(decibels, tr, count, rate, hop))

    def _make_text(self, out: pathlib.Path, path: pathlib.Path) -> None:
        start, end, texts = text.annotations(path)
        vectors = text.embed(texts, self.data.text_encoder, self.settings.text_width)
        count, tr, gap = self._volumes(), self.data.tr, self.data.text_gap
        if self.settings.text == "concatenate":
            features = text.concatenated(vectors, start, end, count, tr, self.data.max_annotations_per_tr, gap)
        else:
            features = text.averaged(vectors, start, end, count, tr, gap=gap)
        cache.save(out, "text", features)

    def _volumes(self) -> int:
        key = {**self._video_key(), "film": self.cache.fingerprint(self.raw / FILM_NAME)}
        return len(cache.load(self.cache.folder("video", key), "video"))

    # --- voxels -------------------------------------------------------------------------------------------------

    def _voxels(self, subjects: dict[int, pathlib.Path]) -> tuple[pathlib.Path, list[pathlib.Path]]:
        prints = {
            subject: self.cache.fingerprint(path) for subject, path in self.bar(subjects.items(), "hashing volumes")
        }
        masks = [self._stage("spread", {"volume": prints[s]}, path) for s, path in self.bar(subjects.items(), "masks")]
        mask = self._stage("mask", {"subjects": [folder.name for folder in masks]}, masks)
        key = lambda s: {"volume": prints[s], "mask": mask.name, "max": self.data.max_trs}
        bold = [self._stage("bold", key(s), path, mask) for s, path in self.bar(subjects.items(), "voxels")]
        return mask, bold

    def _make_spread(self, out: pathlib.Path, path: pathlib.Path) -> None:
        image = volumes.open_volume(path)
        first = np.asarray(image.dataobj[..., : volumes.MASK_VOLUMES], np.float32)
        cache.save(out, "mask", volumes.scan_mask(first))
        cache.save(out, "affine", image.affine)

    def _make_mask(self, out: pathlib.Path, folders: list[pathlib.Path]) -> None:
        cache.save(out, "mask", volumes.shared_mask(np.load(folder / "mask.npy") for folder in folders))
        cache.save(out, "affine", np.load(folders[0] / "affine.npy"))

    def _make_bold(self, out: pathlib.Path, path: pathlib.Path, mask: pathlib.Path) -> None:
        volume = np.asarray(volumes.open_volume(path).dataobj, np.float32)
        cache.save(out, "bold", volumes.voxels(volume, np.load(mask / "mask.npy"), self.data.max_trs))

    def _scale(self, folders: list[pathlib.Path], length: int) -> pathlib.Path | None:
        """Return the folder of each subject's voxel means and stds, over training or all volumes; None if unscaled."""
        kind, data = self.settings.normalize, self.data
        if kind == "none":
            return None
        by_time = kind == "train" and data.split_by == "time"
        stop = len(split_volumes(length, data.train_ratio)["train"]) if by_time else None
        return self._stage("scale", {"bold": [folder.name for folder in folders], "volumes": stop}, folders, stop)

    def _make_scale(self, out: pathlib.Path, folders: list[pathlib.Path], stop: int | None) -> None:
        pairs = [volumes.mean_and_std(cache.load(f, "bold")[:stop]) for f in self.bar(folders, "mean and spread")]
        cache.save(out, "mean", np.stack([mean for mean, _ in pairs]))
        cache.save(out, "std", np.stack([std for _, std in pairs]))

    def _make_average(self, out: pathlib.Path, fmri: list[np.ndarray], scale: pathlib.Path | None) -> None:
        total = np.zeros(fmri[0].shape)
        for subject, values in enumerate(self.bar(fmri, "average over subjects")):
            if scale is not None:
                values = (values - cache.load(scale, "mean")[subject]) / cache.load(scale, "std")[subject]
            total += values
        cache.save(out, "bold", (total / len(fmri)).astype(np.float32))

    # --- one time axis ------------------------------------------------------------------------------------------

    def _make_aligned(self, out: pathlib.Path, stages: dict[str, pathlib.Path], length: int) -> None:
        for name, folder in self.bar(stages.items(), "alignment"):
            raw = cache.load(folder, name)
            flat = raw.reshape(len(raw), -1)
            codes = name == "audio" and self.settings.audio == "encodec"
            target = cache.create(out, name, (length, flat.shape[1]), np.int16 if codes else np.float32)
            rest = audio.MEL_FLOOR_DB if name == "audio" else 0.0  # value before the film starts
            for start in range(0, flat.shape[1], CHUNK_COLUMNS):
                part = np.asarray(flat[:, start : start + CHUNK_COLUMNS])
                if not codes:
                    part = part.astype(np.float32) / 255 if part.dtype == np.uint8 else part.astype(np.float32)
                part = hrf.resample(part, length)
                if self.settings.hrf == "causal" and not codes:
                    part = hrf.respond(part - np.float32(rest), self.data.tr) + np.float32(rest)
                elif self.settings.hrf is not None:
                    part = hrf.respond(part, self.data.tr, self.settings.hrf)
                target[:, start : start + CHUNK_COLUMNS] = part


def progress(items, name: str):
    """Wrap items in a progress bar on stderr, if that is a terminal."""
    tqdm = require("tqdm", "to show progress")
    return tqdm.tqdm(items, desc=name, leave=False, disable=None)
