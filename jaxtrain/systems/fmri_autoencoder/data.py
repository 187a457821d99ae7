"""Samples of a config's recording: prepared on first use, or planted in memory."""

import pathlib

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder import synthetic
from jaxtrain.systems.fmri_autoencoder.config import HeadOptions
from jaxtrain.systems.fmri_autoencoder.pipeline import Pipeline, Recording, Settings
from jaxtrain.systems.fmri_autoencoder.sources import ScanSource, split_volumes
from jaxtrain.systems.fmri_autoencoder.volumes import mean_and_std

SPLITS = ("train", "validation")


def build_data(config, split: str) -> ScanSource | None:
    """The samples of `train` or `validation`, else None. Raises UserError where data and model disagree."""
    if split not in SPLITS:
        return None
    recording = planted(config) if config.data.synthetic == "arrays" else prepare(config)
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


def prepare(config, say=lambda line: None, bar=lambda items, name: items) -> Recording:
    """The prepared recording of a config; what the cache lacks is made now, raw files too where they are synthetic."""
    folder = pathlib.Path(config.data.data_dir)
    if config.data.synthetic == "raw" and not (folder / synthetic.FILM_NAME).exists():
        say(f"writing a synthetic recording into {folder}")
        synthetic.write_raw(folder, plan_of(config))
    return Pipeline(Settings.of(config), say, bar).run()


def planted(config) -> Recording:
    """A synthetic recording in memory, as the pipeline would have prepared it."""
    head = isinstance(config.model, HeadOptions)
    stimuli, fmri, mask = synthetic.arrays(plan_of(config), config.model, per_frame=head)
    stop = len(split_volumes(len(fmri[0]), config.data.train_ratio)["train"])
    scale = [mean_and_std(values[:stop]) for values in fmri]
    ids = list(range(1, len(fmri) + 1))
    mean, std = ([pair[i] for pair in scale] for i in (0, 1))
    return Recording(stimuli, fmri, ids, mask, np.eye(4), mean, std, {})


def plan_of(config) -> synthetic.Plan:
    data = config.data
    return synthetic.Plan(data.synthetic_volumes, data.synthetic_subjects, data.tr)


def check(recording: Recording, model) -> None:
    """Raises UserError listing every size of the model that the prepared data does not have."""
    head = isinstance(model, HeadOptions)
    columns = {name: array.shape[1] for name, array in recording.stimuli.items()}
    wanted = {
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
        f"{name} has {columns[name]} columns per volume, the model wants {wanted[name]} ({advice[name]})"
        for name in wanted
        if columns[name] != wanted[name]
    ]
    voxels = recording.fmri[0].shape[1]
    if voxels != model.n_voxels:
        wrong.append(f"the mask keeps {voxels} voxels: set model.n_voxels={voxels}, it is {model.n_voxels}")
    if wrong:
        raise UserError("the model does not fit the recording: " + "; ".join(wrong))
