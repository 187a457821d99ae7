"""The original's processors give the features of a run's data, from the same files."""

import nibabel
import numpy as np
import pytest

from jaxtrain import config_io
from jaxtrain.systems import fmri_autoencoder as giblet
from jaxtrain.systems.fmri_autoencoder import synthetic, text
from jaxtrain.systems.fmri_autoencoder.data import plan_of, prepare
from jaxtrain.systems.fmri_autoencoder.original import first_generation
from tests.unit.fmri_autoencoder import tiny

VOLUMES = 12
SIZE = (9, 16)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """A recording's folder, the config that reads it, and what a run's data makes of it, without response and scale."""
    folder = tmp_path_factory.mktemp("recording")
    given = [f"data.data_dir={folder}", f"data.synthetic_volumes={VOLUMES}", "data.apply_hrf=false"]
    config = config_io.load(tiny.CONFIGS / "sherlock_tiny.yaml", [*given, "data.normalize_fmri=none"])[1]
    return folder, config, prepare(config)


def test_film_windows_are_the_runs(recording, tmp_path):
    folder, config, run = recording
    film = folder / synthetic.FILM_NAME
    processor = giblet.VideoProcessor(*SIZE, config.data.tr, frame_skip=config.data.frame_skip)
    found, times = processor.video_to_features(film)
    np.testing.assert_allclose(found, run.stimuli["video"], atol=1e-6)
    assert times["start_time"].tolist() == [i * config.data.tr for i in range(VOLUMES)]
    assert processor.get_video_info(film)["n_trs"] == VOLUMES
    raw, _ = giblet.VideoProcessor(*SIZE, config.data.tr, False, config.data.frame_skip).video_to_features(film, 2)
    np.testing.assert_allclose(raw, 255 * found[:2], rtol=1e-6)
    frame = found[3, -processor.frame_features :]
    picture = processor.features_to_frame(frame)
    assert np.array_equal(processor.frame_to_features(picture), frame)
    wide = giblet.VideoProcessor(18, 32, config.data.tr, frame_skip=config.data.frame_skip)
    wide.features_to_video(np.full((4, wide.frame_features), 0.5), tmp_path / "x.mp4")
    assert wide.get_video_info(tmp_path / "x.mp4")["n_trs"] == 4
    with pytest.raises(FileNotFoundError, match="no such file"):
        processor.video_to_features(tmp_path / "none.m4v")


def test_the_first_generation_takes_mean_frames(recording):
    folder, config, _ = recording
    processor = first_generation.VideoProcessor(*SIZE, config.data.tr)
    found, _ = processor.video_to_features(folder / synthetic.FILM_NAME)
    assert found.shape == (VOLUMES, processor.n_features) == (VOLUMES, 432)
    levels = synthetic.latents(plan_of(config))
    strips = found.reshape(VOLUMES, *SIZE, 3)[..., 0].mean(1)[:, [1, 4, 6, 9, 11, 14]]
    assert min(np.corrcoef(strips[:, i], levels[:, i])[0, 1] for i in range(6)) > 0.95


def test_spectrograms_have_the_models_shape(recording):
    folder, config, _ = recording
    film = folder / synthetic.FILM_NAME
    processor = giblet.AudioProcessor(False, n_mels=16, n_fft=1024, tr=config.data.tr)
    found, _ = processor.audio_to_features(film)
    assert found.shape[:2] == (VOLUMES, 16)
    assert found[0].size == processor.n_features
    assert found.max() <= 0
    mean, _ = first_generation.AudioProcessor(n_mels=16, tr=config.data.tr).audio_to_features(film, 3)
    assert mean.shape == (3, 16)
    with pytest.raises(ValueError, match="encodec_bandwidth=5"):
        giblet.AudioProcessor(encodec_bandwidth=5.0)


def test_annotations_are_aligned_as_the_runs(recording):
    folder, config, run = recording
    processor = giblet.TextProcessor("hashing", config.data.tr, max_annotations_per_tr=1)
    processor.n_features = run.stimuli["text"].shape[1]
    path = folder / synthetic.ANNOTATIONS_NAME
    found, times = processor.annotations_to_embeddings(path, VOLUMES)
    table = processor.load_annotations(path)
    words = processor.combine_text_columns(table)
    assert len(times) == VOLUMES
    assert processor.embeddings_to_text(found)[0] == next(filter(None, words))
    assert len(processor.embeddings_to_text(found, top_k=2)[0]) == 2
    wanted = text.concatenated(
        text.hashed(words, processor.n_features), table[text.START], table[text.END], VOLUMES, config.data.tr, 1
    )
    np.testing.assert_array_equal(found, wanted)
    assert first_generation.TextProcessor().effective_dim == 1024
    with pytest.raises(ValueError, match="gap_fill='x'"):
        giblet.TextProcessor(gap_fill="x")


def test_voxels_are_the_runs_and_go_back_onto_the_grid(recording, tmp_path):
    folder, _, run = recording
    volumes = folder / synthetic.VOLUME_FOLDER
    processor = first_generation.FMRIProcessor()
    features, coordinates = processor.load_all_subjects(volumes)
    for found, wanted in zip(features, run.fmri, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert processor.get_mask_info()["n_voxels"] == len(coordinates) == features[0].shape[1]
    image = processor.features_to_nii(features[0], coordinates, tmp_path / "back.nii.gz")
    original = nibabel.load(next(volumes.glob("*s1.nii.gz")))
    np.testing.assert_allclose(
        image.get_fdata()[tuple(coordinates.T)], original.get_fdata()[tuple(coordinates.T)], rtol=1e-5
    )
    processor.save_mask(tmp_path / "mask.nii.gz")
    scaled = giblet.FMRIProcessor(max_trs=5)
    mask = scaled.load_mask(tmp_path / "mask.nii.gz")
    z, places = scaled.nii_to_features(next(volumes.glob("*s1.nii.gz")))
    np.testing.assert_allclose([z.mean(0), z.std(0)], [np.zeros(len(places)), np.ones(len(places))], atol=1e-4)
    assert len(z) == 5
    assert mask.sum() == len(places)
    np.testing.assert_allclose(processor.average_across_subjects(features), np.mean(features, axis=0), rtol=1e-5)
