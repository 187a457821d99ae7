"""The original's dataset classes on this project's pipeline; they also read the originals' own cache files."""

import pathlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder.config import Data, Gen1Options, HeadOptions
from jaxtrain.systems.fmri_autoencoder.errors import UnknownOption
from jaxtrain.systems.fmri_autoencoder.pipeline import Pipeline, Settings
from jaxtrain.systems.fmri_autoencoder.sources import ScanSource, split_volumes

ALL_SUBJECTS = 17
KINDS = ("video", "audio", "text", "fmri")
SPLITS = {None: None, "train": "train", "val": "validation", "validation": "validation"}


def _split_features(kind: str, doc: str) -> property:
    return property(lambda data: _array(data.shared, kind, slice(data.times.start, data.times.stop)), doc=doc)


def _processor(kind: str) -> property:
    return property(lambda data: data.processor(kind), doc=f"A {kind} with this data's settings.")


class SherlockDataset(ScanSource, Dataset):
    """Samples of the first generation: mean frame [3, 90, 160], 128 mel bands, one embedding, voxels.

    A torch Dataset: `dataset[i]` is a dict of float32 tensors (codes are int64), `tr_index` and `subject_id`. split:
    None for everything, train or val. Film, sound and text are held once for all subjects. If cache_dir holds the
    original's cache pickle under the original's file name, it is used.
    """

    generation = "gen1"
    KEYWORDS: tuple[str, ...] = ("shared_data",)  # keywords that are not settings of the pipeline

    def __init__(
        self,
        data_dir: str = "data/",
        subjects: str | int | Sequence[int] = "all",
        split: str | None = None,
        apply_hrf: bool = True,
        mode: str = "per_subject",
        cache_dir: str | None = None,
        preprocess: bool = True,
        tr: float = 1.5,
        max_trs: int | None = None,
        **options: Any,
    ):
        unknown = sorted(set(options) - {*Data.model_fields, *self.KEYWORDS})
        if unknown:
            raise UnknownOption(f"{type(self).__name__}: unexpected keyword argument {', '.join(unknown)}")
        if split not in SPLITS:
            raise UserError(f"split is {split!r}, wanted train, val or None")
        subjects = [subjects] if isinstance(subjects, int) else subjects
        self.data_dir, self.split, self.tr, self.mode = pathlib.Path(data_dir), split, tr, mode
        self.subjects, self.apply_hrf, self.max_trs, self.preprocess = subjects, apply_hrf, max_trs, preprocess
        self.cache_dir = pathlib.Path(cache_dir or self.data_dir / "cache")
        shared = options.pop("shared_data", None)
        self._shares = shared is not None
        if shared is not None:
            recording = shared.recording if isinstance(shared, DataDict) else _of_arrays(shared, "shared_data")
        else:
            original = self._original_cache(self.cache_dir, subjects, apply_hrf, options)
            data = {"data_dir": str(data_dir), "cache_dir": cache_dir, "subjects": subjects, "apply_hrf": apply_hrf}
            data |= {"mode": mode, "tr": tr, "max_trs": max_trs}
            if original is not None:
                recording = read_original_cache(original)
            else:
                recording = self._prepared(data, options)
        self.shared = recording
        self.metadata = recording["metadata"]
        length = len(recording["fmri"][0])
        name = SPLITS[split]
        times = range(length) if name is None else split_volumes(length, 0.8)[name]
        super().__init__(
            recording["stimuli"],
            recording["fmri"],
            recording["metadata"]["subject_ids"] if mode == "per_subject" else [0],
            times,
            mean=recording["mean"],
            std=recording["std"],
            frame=self._frame(recording),
            named=mode == "per_subject",
        )

    def _original_cache(self, folder, subjects, apply_hrf: bool, options: dict) -> pathlib.Path | None:
        ids = list(range(1, ALL_SUBJECTS + 1)) if subjects == "all" else list(subjects)
        who = "all" if len(ids) == ALL_SUBJECTS else "s" + "_".join(map(str, ids))
        hrf = "hrf" if apply_hrf else "nohrf"
        path = folder / f"sherlock_{who}_{hrf}_{self.mode}{self._cache_suffix(options)}.pkl"
        return path if path.exists() else None

    def _cache_suffix(self, options: dict) -> str:
        return ""

    def _frame(self, recording) -> tuple[int, int] | None:
        width = recording["metadata"]["feature_dims"]["video"]
        return (90, 160) if width == 90 * 160 * 3 else None

    def _prepared(self, data: dict, options: dict) -> dict[str, Any]:
        return _run(_Arrays(Gen1Options(), Data(**data, **options)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        return {name: _tensor(value) if isinstance(value, np.ndarray) else value for name, value in item.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the arrays that `stimuli` and `fmri` are views of, or a worker process would get them twice."""
        return vars(self) | {"shared": {name: value for name, value in self.shared.items() if name != "arrays"}}

    @property
    def n_subjects(self) -> int:
        return len(self.subject_ids)

    @property
    def n_trs(self) -> int:
        """Return the number of volumes of each subject in this split."""
        return len(self.times)

    @property
    def n_samples(self) -> int:
        return len(self)

    @property
    def feature_dims(self) -> dict[str, int]:
        """Return the width of each modality, flattened."""
        return self.metadata["feature_dims"]

    # --- further members of the original ----------------------------------------------------------------------

    video_features = _split_features("video", "The film [subject, volume of the split, column].")
    audio_features = _split_features("audio", "The sound [subject, volume of the split, column].")
    text_features = _split_features("text", "The annotations [subject, volume of the split, column].")
    fmri_features = _split_features("fmri", "The voxels as items have them [subject, volume of the split, voxel].")

    video_processor = _processor("VideoProcessor")
    audio_processor = _processor("AudioProcessor")
    text_processor = _processor("TextProcessor")
    fmri_processor = _processor("FMRIProcessor")

    def processor(self, kind: str) -> Any:
        """Return a new processor with this data's settings. kind: its class's name."""
        from jaxtrain.systems.fmri_autoencoder.original import first_generation

        further = {"FMRIProcessor": {"max_trs": self.max_trs}}.get(kind, {})
        return getattr(first_generation, kind)(tr=self.tr, **further)

    def get_data_dict(self) -> "DataDict":
        """Return the data of all volumes, which other splits can share by passing it as `shared_data`."""
        return DataDict(self.shared)

    @property
    def shared_data(self) -> "DataDict | None":
        """Return the data that the constructor's `shared_data` gave; None if this dataset has read its files."""
        return self.get_data_dict() if self._shares else None

    def get_batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        return torch.utils.data.default_collate([self[int(i)] for i in indices])

    def get_subject_data(self, subject_id: int) -> dict[str, torch.Tensor]:
        """Return all volumes of one subject in this split. Raises UserError for an unknown subject."""
        if not self.named or subject_id not in self.subject_ids:
            raise UserError(f"subject {subject_id} is not among {self.subject_ids} (mode {self.mode})")
        first = self.subject_ids.index(subject_id) * len(self.times)
        return self.get_batch(range(first, first + len(self.times)))

    def get_feature_stats(self) -> dict[str, dict[str, float]]:
        """Return mean, std, min and max of every modality over the split's volumes."""
        stats = {}
        for name in KINDS:
            columns = (
                self.fmri
                if name == "fmri"
                else [stimuli[name] for stimuli in {id(s): s for s in self.stimuli}.values()]
            )
            values = np.concatenate([np.asarray(column[self.times.start : self.times.stop]) for column in columns])
            stats[name] = {k: float(getattr(values, k)()) for k in ("mean", "std", "min", "max")}
        return stats


class MultimodalDataset(SherlockDataset):
    """Samples of the second generation: a window of frames, EnCodec codes or a spectrogram, three embeddings, voxels.

    use_encodec, encodec_bandwidth, frame_skip, normalize_fmri: as in the original. encodec_sample_rate: the
    spectrogram's rate if use_encodec is off. shared_data: the result of `get_data_dict`.
    """

    generation = "head"
    KEYWORDS = ("shared_data", "use_encodec", "encodec_sample_rate")

    def __init__(
        self,
        data_dir: str = "data/",
        subjects: str | int | Sequence[int] = "all",
        split: str | None = None,
        apply_hrf: bool = True,
        mode: str = "per_subject",
        cache_dir: str | None = None,
        preprocess: bool = True,
        tr: float = 1.5,
        max_trs: int | None = None,
        use_encodec: bool = True,
        encodec_bandwidth: float = 3.0,
        encodec_sample_rate: int = 12000,
        frame_skip: int = 2,
        shared_data: Mapping[str, Any] | None = None,
        normalize_fmri: bool = True,
        **options: Any,
    ):
        self.use_encodec, self.frame_skip, self.normalize_fmri = use_encodec, frame_skip, normalize_fmri
        self.encodec_bandwidth, self.encodec_sample_rate = encodec_bandwidth, encodec_sample_rate
        super().__init__(
            *(data_dir, subjects, split, apply_hrf, mode, cache_dir, preprocess, tr, max_trs),
            shared_data=shared_data,
            use_encodec=use_encodec,
            encodec_bandwidth=encodec_bandwidth,
            encodec_sample_rate=encodec_sample_rate,
            frame_skip=frame_skip,
            normalize_fmri=normalize_fmri,
            **options,
        )

    def processor(self, kind: str) -> Any:
        from jaxtrain.systems.fmri_autoencoder.original import processors

        further = {
            "VideoProcessor": {"frame_skip": self.frame_skip},
            "AudioProcessor": {"use_encodec": self.use_encodec, "encodec_bandwidth": self.encodec_bandwidth},
            "FMRIProcessor": {"max_trs": self.max_trs, "normalize": self.normalize_fmri},
        }
        return getattr(processors, kind)(tr=self.tr, **further.get(kind, {}))

    def _cache_suffix(self, options: dict) -> str:
        rate, bandwidth = options["encodec_sample_rate"] // 1000, options["encodec_bandwidth"]
        sound = f"encodec_{rate}khz_{bandwidth}kbps" if options["use_encodec"] else "mel"
        return f"_{sound}_skip{options['frame_skip']}"

    def _frame(self, recording) -> None:
        return None

    def _prepared(self, data: dict, options: dict) -> dict[str, Any]:
        options = dict(options)
        encodec, rate = options.pop("use_encodec"), options.pop("encodec_sample_rate")
        options["normalize_fmri"] = "train" if options["normalize_fmri"] else "none"
        if not encodec:
            options["audio_sample_rate"] = rate
        return _run(_Arrays(HeadOptions(use_encodec=encodec, text_dim=3072), Data(**data, **options)))


def _tensor(value: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(value))
    return tensor if tensor.is_floating_point() else tensor.long()


class _Arrays:
    """Stand-in for a config, with only the parts that Settings.of reads."""

    compat = "correct"

    def __init__(self, model, data):
        self.model, self.data = model, data


def _run(source: _Arrays) -> dict[str, Any]:
    recording = Pipeline(Settings.of(source)).run()
    width = lambda array: array.shape[1]
    dims = {name: width(array) for name, array in recording.stimuli.items()} | {"fmri": width(recording.fmri[0])}
    ids, length = recording.subject_ids, len(recording.fmri[0])
    metadata = {
        "subject_ids": ids,
        "n_subjects": len(ids),
        "n_trs": length,
        "n_samples": len(ids) * length,
        "feature_dims": dims,
        "tr": source.data.tr,
        "apply_hrf": source.data.apply_hrf,
        "mode": source.data.mode,
    }
    arrays = {"stimuli": recording.stimuli, "fmri": recording.fmri, "mean": recording.mean, "std": recording.std}
    return {**arrays, "metadata": metadata}


def read_original_cache(path: pathlib.Path) -> dict[str, Any]:
    """Read an original's cache pickle, unpickling only numpy arrays and plain containers. Raises UserError for
    others."""
    with open(path, "rb") as file:
        try:
            content = _Unpickler(file).load()
            return _of_arrays(content, path)
        except (pickle.UnpicklingError, UserError, EOFError, TypeError) as error:
            raise UserError(
                f"{path}: not a cache of the original: {error}. Remove it to prepare the data anew"
            ) from None


def _of_arrays(content: Mapping[str, Any], source: Any) -> dict[str, Any]:
    """Return a recording of the original's arrays [subject, volume, column]. Raises UserError if one is missing."""
    missing = [name for name in DataDict.KEYS if name not in content]
    if missing:
        held = ", ".join(map(str, list(content)[:6]))
        raise UserError(f"{source}: has no {', '.join(missing)}; it holds {held}")
    arrays = {kind: content[f"{kind}_features"] for kind in KINDS}
    stimuli = [{kind: arrays[kind][i] for kind in KINDS[:3]} for i in range(len(arrays["fmri"]))]
    scale = {"mean": None, "std": None}
    return {
        "stimuli": stimuli,
        "fmri": list(arrays["fmri"]),
        **scale,
        "metadata": content["metadata"],
        "arrays": arrays,
    }


def _array(recording: Mapping[str, Any], kind: str, times: slice) -> np.ndarray:
    """Return a modality as [subject, volume, column], scaled; if all subjects share it, as a view of one copy."""
    if "arrays" in recording:
        return recording["arrays"][kind][:, times]
    if kind != "fmri" and not isinstance(recording["stimuli"], Mapping):
        return np.stack([scan[kind][times] for scan in recording["stimuli"]])
    if kind != "fmri":
        column = np.asarray(recording["stimuli"][kind][times])
        return np.broadcast_to(column, (len(recording["fmri"]), *column.shape))
    voxels = np.stack([np.asarray(scan[times], np.float32) for scan in recording["fmri"]])
    for number in range(len(voxels) if recording["mean"] is not None else 0):
        voxels[number] = (voxels[number] - recording["mean"][number]) / recording["std"][number]
    return voxels


class DataDict(Mapping):
    """The original's shared data by name: arrays [subject, volume, column], created when they are read, and metadata.

    It is pickled as a plain dict.
    """

    KEYS = (*(f"{kind}_features" for kind in KINDS), "metadata")

    def __init__(self, recording: Mapping[str, Any]):
        self.recording = recording

    def __getitem__(self, name: str) -> Any:
        if name not in self.KEYS:
            raise KeyError(name)
        if name == "metadata":
            return self.recording["metadata"]
        return _array(self.recording, name.removesuffix("_features"), slice(None))

    def __iter__(self) -> Iterator[str]:
        return iter(self.KEYS)

    def __len__(self) -> int:
        return len(self.KEYS)

    def __reduce__(self):
        return dict, (dict(self),)


class _Unpickler(pickle.Unpickler):
    _ALLOWED = {
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
        *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
        *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    }

    def find_class(self, module: str, name: str):
        if (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}, wanted arrays and plain values")
