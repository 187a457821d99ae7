"""The original's processors, from a recording's files to features per volume (TR), with the numbers of a run's data.

Where the original's form of a result is not known, it is `(features, metadata)`: a pandas DataFrame with tr_index,
start_time and end_time in seconds.
"""

import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder import audio, text, video, volumes
from jaxtrain.systems.fmri_autoencoder.extras import require

FPS = 25.0  # the Sherlock film's; VideoProcessor.n_features assumes it
ENCODEC = "facebook/encodec_24khz"
BGE_WIDTH = 1024


def times(count: int, tr: float) -> Any:
    pandas = require("pandas", "for the times of the volumes")
    starts = np.arange(count) * tr
    return pandas.DataFrame({"tr_index": np.arange(count), "start_time": starts, "end_time": starts + tr})


def _film_volumes(path: str | pathlib.Path, tr: float) -> int:
    _, total, fps = video.film(_existing(path))
    return video.volumes_of(total, fps, tr)


def _existing(path: str | pathlib.Path) -> pathlib.Path:
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file")
    return pathlib.Path(path)


class VideoProcessor:
    """Film frames of every volume, resized by area and flattened as (frame, height, width, RGB), float32.

    normalize: divide by 255. frame_skip: take every n-th frame of a volume's window. n_features: values per volume at
    25 frames per second; frame_features: of one frame.
    """

    frame_skip: int | None

    def __init__(
        self,
        target_height: int = 90,
        target_width: int = 160,
        tr: float = 1.5,
        normalize: bool = True,
        frame_skip: int = 2,
    ):
        self._set(target_height, target_width, tr, normalize)
        self.frame_skip = frame_skip
        self.n_features = video.frames_per_volume(FPS, tr, frame_skip) * self.frame_features

    def _set(self, height: int, width: int, tr: float, normalize: bool) -> None:
        self.target_height, self.target_width, self.tr, self.normalize = height, width, tr, normalize
        self.frame_skip = None
        self.n_features = self.frame_features = height * width * 3

    def video_to_features(self, video_path: str | pathlib.Path, max_trs: int | None = None) -> tuple[np.ndarray, Any]:
        """Return features [volume, value] and the volumes' times."""
        frames, total, fps = video.film(_existing(video_path))
        size = (self.target_height, self.target_width)
        if self.frame_skip is None:
            features = video.mean_features(frames, total, fps, self.tr, size, max_trs)
            features = features if self.normalize else features * np.float32(255)
        else:
            windows = video.window_features(frames, total, fps, self.tr, self.frame_skip, size, max_trs)
            features = windows.astype(np.float32) / np.float32(255 if self.normalize else 1)
        return features.reshape(len(features), -1), times(len(features), self.tr)

    def frame_to_features(self, frame: np.ndarray) -> np.ndarray:
        """Return one frame's features [value] from RGB uint8 [height, width, 3]."""
        flat = video.resize(np.asarray(frame), self.target_height, self.target_width).reshape(-1).astype(np.float32)
        return flat / np.float32(255) if self.normalize else flat

    def features_to_frame(self, features: np.ndarray) -> np.ndarray:
        """Return RGB uint8 [height, width, 3] from one frame's features [value]."""
        pixels = np.asarray(features, np.float32) * (255 if self.normalize else 1)
        return np.clip(np.rint(pixels), 0, 255).astype(np.uint8).reshape(self.target_height, self.target_width, 3)

    def features_to_video(
        self, features: np.ndarray, output_path: str | pathlib.Path, fps: float = 25, metadata: Any = None
    ) -> None:
        """Write features [volume, value] as a film: each volume's frames, over tr seconds. metadata: not used."""
        ffmpeg = require("imageio_ffmpeg", "to write the film")
        size, shown = (self.target_width, self.target_height), int(np.round(fps * self.tr))
        writer = ffmpeg.write_frames(str(output_path), size, fps=fps, macro_block_size=2)
        writer.send(None)
        for row in np.asarray(features):
            frames = row.reshape(-1, self.frame_features)
            for i in range(shown):
                writer.send(self.features_to_frame(frames[i * len(frames) // shown]))
        writer.close()

    def get_video_info(self, video_path: str | pathlib.Path) -> dict[str, float]:
        """Return fps, total_frames, duration in seconds, and n_trs, the number of whole volumes."""
        _, total, fps = video.film(_existing(video_path))
        return {
            "fps": fps,
            "total_frames": total,
            "duration": total / fps,
            "n_trs": video.volumes_of(total, fps, self.tr),
        }


class AudioProcessor:
    """Sound of every volume: EnCodec codes int64 [volume, codebooks * frames], or mel decibels [volume, mels, frames].

    The codec is loaded at its first use, from the Hugging Face hub or its cache, on the CPU. sample_rate: of the mel
    spectrogram; codes are of sound at 24 kHz.
    """

    def __init__(
        self,
        use_encodec: bool = True,
        encodec_bandwidth: float = 3.0,
        sample_rate: int = 22050,
        n_mels: int = 2048,
        n_fft: int = 4096,
        hop_length: int = 512,
        tr: float = 1.5,
        device: str = "cpu",
    ):
        self.use_encodec, self.encodec_bandwidth, self.device = use_encodec, encodec_bandwidth, device
        self.encodec_sample_rate, self.encodec_model, self.encodec_processor = audio.ENCODEC_RATE, ENCODEC, None
        self._set(sample_rate, n_mels, n_fft, hop_length, tr)
        if use_encodec:
            rows = audio.CODEBOOKS.get(encodec_bandwidth)
            if rows is None:
                raise UserError(
                    f"encodec_bandwidth={encodec_bandwidth}: wanted one of {', '.join(map(str, audio.CODEBOOKS))}"
                )
            self.n_features = rows * int(audio.CODE_FRAMES_PER_S * tr)
        else:
            self.n_features = n_mels * audio.mel_frames(tr, sample_rate, hop_length)

    def _set(self, sample_rate: int, n_mels: int, n_fft: int, hop_length: int, tr: float) -> None:
        self.sample_rate, self.n_mels, self.n_fft, self.hop_length, self.tr = sample_rate, n_mels, n_fft, hop_length, tr
        self.n_features = n_mels

    def audio_to_features(
        self,
        audio_source: str | pathlib.Path,
        max_trs: int | None = None,
        from_video: bool = True,
        tr_length: float | None = None,
    ) -> tuple[np.ndarray, Any]:
        """Return features per volume and the volumes' times. tr_length: another duration of a volume than `tr`.

        from_video: the volumes are those of the film; else as many as the sound fills.
        """
        tr = self.tr if tr_length is None else tr_length
        count = self._count(audio_source, from_video, tr, max_trs)
        if self.use_encodec:
            sound = audio.sound_of(audio_source, self.encodec_sample_rate)
            codes = audio.encode(sound, self.encodec_model, self.encodec_bandwidth)
            return audio.code_features(codes, tr, count, self.encodec_bandwidth), times(count, tr)
        decibels = self._decibels(audio_source)
        return audio.mel_features(decibels, tr, count, self.sample_rate, self.hop_length), times(count, tr)

    def _decibels(self, path: str | pathlib.Path) -> np.ndarray:
        sound = audio.sound_of(path, self.sample_rate)
        return audio.spectrogram(sound, self.sample_rate, self.n_mels, self.n_fft, self.hop_length)

    def _count(self, path: str | pathlib.Path, from_video: bool, tr: float, most: int | None) -> int:
        _existing(path)
        if from_video:
            volumes = _film_volumes(path, tr)
        else:
            volumes = math.floor(len(audio.sound_of(path, self.sample_rate)) / self.sample_rate / tr)
        return volumes if most is None else min(volumes, most)

    def get_audio_info(self, audio_source: str | pathlib.Path, from_video: bool = True) -> dict[str, float]:
        """Return sample_rate in hertz, duration in seconds and n_trs."""
        count = self._count(audio_source, from_video, self.tr, None)
        duration = len(audio.sound_of(audio_source, self.sample_rate)) / self.sample_rate
        return {"sample_rate": self.sample_rate, "duration": duration, "n_trs": count}


class TextProcessor:
    """Embeddings of the scene annotations of every volume, by a sentence-transformers model, of length 1.

    temporal_mode: `concatenate` (the first max_annotations_per_tr scenes side by side) or `average`, combined by
    `aggregation`: mean, first, last or max. gap_fill: forward_fill, zero or interpolate. device: torch chooses it.
    temporal_window: volumes whose scenes count; only 1.0. Raises ValueError for others.
    """

    def __init__(
        self,
        model_name: str = "BAAI/bge-large-en-v1.5",
        tr: float = 1.5,
        aggregation: str = "mean",
        gap_fill: str = "forward_fill",
        device: str | None = None,
        temporal_mode: str = "concatenate",
        max_annotations_per_tr: int = 3,
        temporal_window: float = 1.0,
    ):
        known = {
            "aggregation": (aggregation, ("mean", "first", "last", "max")),
            "gap_fill": (gap_fill, ("forward_fill", "zero", "interpolate")),
            "temporal_mode": (temporal_mode, ("concatenate", "average")),
            "temporal_window": (temporal_window, (1.0,)),
        }
        for name, (value, values) in known.items():
            if value not in values:
                raise UserError(f"{name}={value!r}: wanted {' or '.join(map(repr, values))}")
        self.model_name, self.tr, self.aggregation, self.gap_fill = model_name, tr, aggregation, gap_fill
        self.device, self.temporal_mode, self.temporal_window = device, temporal_mode, temporal_window
        self.max_annotations_per_tr, self.n_features = max_annotations_per_tr, BGE_WIDTH
        self._known: tuple[list[str], np.ndarray] | None = None

    @property
    def effective_dim(self) -> int:
        """Values per volume."""
        return self.n_features * (self.max_annotations_per_tr if self.temporal_mode == "concatenate" else 1)

    def load_annotations(self, xlsx_path: str | pathlib.Path) -> Any:
        """Return the file as a pandas DataFrame. Raises ValueError if a time column is missing."""
        return text.read_table(_existing(xlsx_path))

    def combine_text_columns(
        self, annotations: Any, text_columns: Sequence[str] | None = None, separator: str = "; "
    ) -> list[str]:
        """Return one text per row. text_columns: the file's scene details, names and location if left out."""
        return text.scene_texts(annotations, text_columns or text.TEXT_COLUMNS, separator)

    def align_to_trs(self, annotations: Any, embeddings: np.ndarray, n_trs: int) -> np.ndarray:
        """Return features [volume, value] from one embedding [scene, width] per row of `annotations`."""
        if len(embeddings) != len(annotations):
            raise UserError(f"{len(embeddings)} embeddings for {len(annotations)} annotations")
        start, end = (annotations[name].to_numpy(np.float64) for name in (text.START, text.END))
        if self.temporal_mode == "average":
            return text.averaged(embeddings, start, end, n_trs, self.tr, self.aggregation, self.gap_fill)
        return text.concatenated(embeddings, start, end, n_trs, self.tr, self.max_annotations_per_tr, self.gap_fill)

    def annotations_to_embeddings(
        self,
        xlsx_path: str | pathlib.Path,
        n_trs: int,
        text_columns: Sequence[str] | None = None,
        cache_annotations: bool = True,
    ) -> tuple[np.ndarray, Any]:
        """Return features [volume, value] and the volumes' times. cache_annotations: for `embeddings_to_text`."""
        table = self.load_annotations(xlsx_path)
        texts = self.combine_text_columns(table, text_columns)
        spoken = [i for i, words in enumerate(texts) if words]
        texts = [texts[i] for i in spoken]
        embeddings = text.embed(texts, self.model_name, self.n_features)
        if cache_annotations:
            self._known = (texts, embeddings)
        return self.align_to_trs(table.iloc[spoken], embeddings, n_trs), times(n_trs, self.tr)

    def embeddings_to_text(
        self, embeddings: np.ndarray, metadata: Any = None, method: str = "nearest_neighbor", top_k: int = 1
    ) -> list[Any]:
        """Return the text of the nearest cached annotation for each row, or lists of the top_k. metadata: not used.

        Of concatenated features the first annotation counts. Raises ValueError before `annotations_to_embeddings`.
        """
        if method != "nearest_neighbor":
            raise UserError(f"method={method!r}: wanted 'nearest_neighbor'")
        if self._known is None:
            raise UserError("embeddings_to_text: call annotations_to_embeddings first, whose annotations are searched")
        texts, known = self._known
        order = np.argsort(-(np.asarray(embeddings)[:, : known.shape[1]] @ known.T), axis=1, kind="stable")[:, :top_k]
        return [texts[row[0]] if top_k == 1 else [texts[i] for i in row] for row in order]

    def get_embedding_info(self) -> dict[str, Any]:
        """Return the settings by name."""
        names = ("model_name", "n_features", "effective_dim", "tr", "aggregation", "gap_fill", "temporal_mode")
        return {name: getattr(self, name) for name in names}


class FMRIProcessor:
    """Voxels of every volume [volume, voxel], float32, of NIfTI files [x, y, z, time].

    mask_threshold: share of the subjects in whose volumes a voxel must vary. normalize: to mean 0 and standard
    deviation 1 over each subject's volumes. max_trs: take only the first volumes.
    """

    def __init__(
        self, tr: float = 1.5, max_trs: int | None = None, mask_threshold: float = 0.5, normalize: bool = True
    ):
        self.tr, self.max_trs, self.mask_threshold, self.normalize = tr, max_trs, mask_threshold, normalize
        self._mask: np.ndarray | None = None
        self._affine: np.ndarray | None = None

    def create_shared_mask(self, nii_files: Iterable[str | pathlib.Path]) -> np.ndarray:
        """Return and keep the mask of all subjects, bool [x, y, z]."""
        masks = []
        for path in nii_files:
            image = volumes.open_volume(_existing(path))
            masks.append(volumes.scan_mask(np.asarray(image.dataobj[..., : volumes.MASK_VOLUMES], np.float32)))
            self._affine = image.affine
        if not masks:
            raise UserError("nii_files: got none, wanted at least one NIfTI file")
        self._mask = volumes.shared_mask(masks, self.mask_threshold)
        return self._mask

    def nii_to_features(
        self, nii_path: str | pathlib.Path, brain_mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return features [volume, voxel] and the voxels' grid coordinates int [voxel, 3].

        brain_mask: bool [x, y, z]; the shared mask, else the file's own, if left out.
        """
        image = volumes.open_volume(_existing(nii_path))
        volume = np.asarray(image.dataobj, np.float32)
        mask = self._mask if brain_mask is None else np.asarray(brain_mask, bool)
        mask = volumes.scan_mask(volume) if mask is None else mask
        if mask.shape != volume.shape[:3]:
            raise UserError(f"{nii_path}: its grid is {volume.shape[:3]}, the mask's {mask.shape}")
        self._affine = image.affine
        features = volumes.voxels(volume, mask, self.max_trs)
        if self.normalize:
            mean, deviation = volumes.mean_and_std(features)
            features = (features - mean) / deviation
        return features, np.argwhere(mask)

    def features_to_nii(
        self,
        features: np.ndarray,
        coordinates: np.ndarray,
        output_path: str | pathlib.Path,
        template_img: Any = None,
        template_shape: Sequence[int] | None = None,
    ) -> Any:
        """Write features [volume, voxel], or of one volume [voxel], as NIfTI; return the nibabel image.

        template_img: gives grid and affine. template_shape: the grid; the smallest that holds the coordinates if both
        are left out.
        """
        nibabel = require("nibabel", "to write NIfTI volumes")
        values, coordinates = np.asarray(features, np.float32), np.asarray(coordinates)
        shape = template_shape if template_img is None else template_img.shape[:3]
        shape = tuple(coordinates.max(0) + 1 if shape is None else shape)[:3]
        grid = np.zeros((*shape, *values.shape[:-1]), np.float32)
        grid[tuple(coordinates.T)] = np.moveaxis(values, -1, 0)
        affine = self._affine if template_img is None else template_img.affine
        image = nibabel.Nifti1Image(grid, np.eye(4) if affine is None else affine)
        nibabel.save(image, output_path)
        return image

    def average_across_subjects(self, subject_features_list: Sequence[np.ndarray]) -> np.ndarray:
        """Return the mean [volume, voxel], over the volumes that all subjects have."""
        length = min(map(len, subject_features_list))
        total = sum(features[:length].astype(np.float64) for features in subject_features_list)
        return np.asarray(total / len(subject_features_list), np.float32)

    def load_all_subjects(
        self, data_dir: str | pathlib.Path, pattern: str = "sherlock_movie_s*.nii.gz"
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the features of each file, by subject number, on one shared mask, and the voxels' coordinates."""
        number = lambda path: int("".join(filter(str.isdigit, path.name.partition(".")[0])) or 0)
        files = sorted(pathlib.Path(data_dir).glob(pattern), key=lambda path: (number(path), path.name))
        if not files:
            raise FileNotFoundError(f"{data_dir}: no file {pattern}")
        mask = self.create_shared_mask(files)
        return [self.nii_to_features(path, mask)[0] for path in files], np.argwhere(mask)

    def get_mask_info(self) -> dict[str, Any]:
        """Return the kept mask's shape, n_voxels and mask_threshold. Raises ValueError without a mask."""
        mask = self._shared()
        return {"shape": mask.shape, "n_voxels": int(mask.sum()), "mask_threshold": self.mask_threshold}

    def save_mask(self, output_path: str | pathlib.Path) -> None:
        """Write the kept mask as NIfTI, uint8."""
        nibabel = require("nibabel", "to write NIfTI volumes")
        affine = np.eye(4) if self._affine is None else self._affine
        nibabel.save(nibabel.Nifti1Image(self._shared().astype(np.uint8), affine), output_path)

    def load_mask(self, mask_path: str | pathlib.Path) -> np.ndarray:
        """Read a mask of `save_mask`, keep and return it, bool [x, y, z]."""
        image = require("nibabel", "to read NIfTI volumes").load(_existing(mask_path))
        self._mask, self._affine = np.asarray(image.dataobj) > 0, image.affine
        return self._mask

    def _shared(self) -> np.ndarray:
        if self._mask is None:
            raise UserError("FMRIProcessor: there is no mask; call create_shared_mask, load_all_subjects or load_mask")
        return self._mask
