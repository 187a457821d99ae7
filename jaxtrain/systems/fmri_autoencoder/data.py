"""Samples of a config's recording: prepared from raw files on first use, or synthetic."""

import dataclasses
import pathlib

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder import cache, synthetic
from jaxtrain.systems.fmri_autoencoder.cache import cache_of
from jaxtrain.systems.fmri_autoencoder.config import HeadOptions
from jaxtrain.systems.fmri_autoencoder.pipeline import Pipeline, Recording, Settings
from jaxtrain.systems.fmri_autoencoder.sources import ScanSource, split_volumes
from jaxtrain.systems.fmri_autoencoder.volumes import mean_and_std

SPLITS = ("train", "validation")


def build_data(config, split: str) -> ScanSource | None:
    """Return the samples of `train` or `validation`, else None. Raises UserError if data and model disagree."""
    if split not in SPLITS:
        return None
    recording = planted(config) if config.data.synthetic in ("arrays", "mapped") else prepare(config)
    check(recording, config.model)
    data = config.data
    chosen = range(len(recording.subject_ids))
    length = len(recording.fmri[0])
    times = split_volumes(length, data.train_ratio, data.gap_trs)[split]
    if data.split_by == "subject":
        times = range(length)
        held_out = set(data.validation_subjects)
        chosen = [i for i in chosen if (recording.subject_ids[i] in held_out) == (split == "validation")]
        if not chosen:
            raise UserError(f"data.validation_subjects: {sorted(held_out)} leaves no subject to {split} on")
    head = isinstance(config.model, HeadOptions)
    return ScanSource(
        recording.stimuli,
        [recording.fmri[i] for i in chosen],
        [recording.subject_ids[i] for i in chosen],
        times,
        mean=None if recording.mean is None else [recording.mean[i] for i in chosen],
        std=None if recording.std is None else [recording.std[i] for i in chosen],
        frame=None if head else (config.model.video_height, config.model.video_width),
        geometry=(recording.mask, recording.affine),
    )


def example(config) -> ScanSource | None:
    """Return a short synthetic recording with the shapes of the training samples."""
    short = {"synthetic": "arrays", "synthetic_volumes": 64, "synthetic_subjects": 1, "split_by": "time"}
    return build_data(config.model_copy(update={"data": config.data.model_copy(update=short)}), "train")


def prepare(config, info=lambda line: None, bar=lambda items, name: items) -> Recording:
    """Return a config's prepared recording, creating what the cache lacks, and raw files if they are synthetic."""
    folder = pathlib.Path(config.data.data_dir)
    if config.data.synthetic == "raw" and not (folder / synthetic.FILM_NAME).exists():
        info(f"writing a synthetic recording into {folder}")
        synthetic.write_raw(folder, plan_of(config))
    return Pipeline(Settings.of(config), info, bar).run()


def planted(config) -> Recording:
    """Return a synthetic recording as the pipeline would prepare it, in memory or mapped from the cache."""
    head = isinstance(config.model, HeadOptions)
    plan = plan_of(config)
    stop = len(split_volumes(plan.volumes, config.data.train_ratio)["train"])
    if config.data.synthetic == "mapped":
        (stimuli, fmri), (mean, std) = mapped(config, plan, head, stop)
    else:
        stimuli, fmri = synthetic.arrays(plan, config.model, head)
        mean, std = zip(*(mean_and_std(values[:stop]) for values in fmri), strict=True)
    mask = np.ones((config.model.n_voxels, 1, 1), bool)
    return Recording(stimuli, fmri, list(range(1, len(fmri) + 1)), mask, np.eye(4), list(mean), list(std), {})


def mapped(config, plan: synthetic.Plan, head: bool, stop: int):
    """Return `synthetic.arrays` and the voxels' mean and std, written to the cache once and mapped from there."""
    model, store = config.model, cache_of(config.data)
    sizes = ("video_height", "video_width", "video_frames_per_tr", "audio_mels", "audio_frames_per_tr", "use_encodec")
    sizes = {name: getattr(model, name, None) for name in (*sizes, "text_dim", "n_voxels")}
    key = {"plan": dataclasses.asdict(plan), **sizes}

    def make(folder: pathlib.Path) -> None:
        synthetic.arrays(plan, model, head, lambda *array: cache.create(folder, *array))

    folder = store.build("planted", key, make)
    stimuli = {name: cache.load(folder, name) for name in ("video", "audio", "text")}
    fmri = [cache.load(folder, f"bold_{subject}") for subject in range(1, plan.subjects + 1)]

    def scale(folder: pathlib.Path) -> None:
        for name, values in zip(
            ("mean", "std"), zip(*(mean_and_std(v[:stop]) for v in fmri), strict=True), strict=True
        ):
            cache.save(folder, name, np.stack(values))

    folder = store.build("planted_scale", {**key, "volumes": stop}, scale)
    return (stimuli, fmri), (cache.load(folder, "mean"), cache.load(folder, "std"))


def plan_of(config) -> synthetic.Plan:
    data = config.data
    return synthetic.Plan(data.synthetic_volumes, data.synthetic_subjects, data.tr)


def check(recording: Recording, model) -> None:
    """Raise UserError listing every size of the model that does not match the prepared data."""
    head = isinstance(model, HeadOptions)
    columns = {name: array.shape[1] for name, array in recording.stimuli.items()}
    expected = {
        "video": model.video_columns if head else model.video_height * model.video_width * 3,
        "audio": model.audio_columns if head else model.audio_mels,
        "text": model.text_dim,
    }
    advice = {
        "video": "model.video_frames_per_tr, video_height, video_width and data.frame_skip",
        "audio": "model.use_encodec, audio_mels, audio_frames_per_tr and data.audio, audio_sample_rate",
        "text": "model.text_dim and data.text, max_annotations_per_tr",
    }
    wrong = [
        f"{name} has {columns[name]} columns per volume, the model wants {expected[name]} ({advice[name]})"
        for name in expected
        if columns[name] != expected[name]
    ]
    voxels = recording.fmri[0].shape[1]
    if voxels != model.n_voxels:
        wrong.append(f"the mask keeps {voxels} voxels: set model.n_voxels={voxels}, it is {model.n_voxels}")
    if wrong:
        raise UserError("the model does not fit the recording: " + "; ".join(wrong))
