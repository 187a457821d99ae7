"""A user's session with the original's dataset classes over a cache file of the original."""

import pickle

import numpy as np
import pytest
import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder import MultimodalDataset, SherlockDataset
from jaxtrain.systems.fmri_autoencoder.original.datasets import DataDict
from tests.unit.fmri_autoencoder.test_torch_compat import write_cache

HEAD = "_hrf_per_subject_encodec_12khz_3.0kbps_skip2"
FEATURES = ["video_features", "audio_features", "text_features", "fmri_features"]


@pytest.fixture
def found(tmp_path):
    return write_cache(tmp_path / "cache", suffix=HEAD, video=72, audio=24)


def test_all_arguments_may_be_given_by_place(found, tmp_path):
    more = (True, "per_subject", None, True, 1.5, None, True, 3.0, 12000, 2, None, True)
    assert len(MultimodalDataset(tmp_path, [1, 3], "train", *more)) == 32


def test_an_unknown_keyword_is_a_type_error_beside_a_cache_too(found, tmp_path):
    for kind in (SherlockDataset, MultimodalDataset):
        with pytest.raises(TypeError, match=f"{kind.__name__}: unexpected keyword argument nonsense"):
            kind(tmp_path, subjects=[1, 3], nonsense=1)


def test_features_are_arrays_of_the_split(found, tmp_path):
    data = MultimodalDataset(tmp_path, subjects=[1, 3], split="val")
    for name in FEATURES:
        np.testing.assert_array_equal(getattr(data, name), found[name][:, 16:])
        np.testing.assert_array_equal(getattr(pickle.loads(pickle.dumps(data)), name), found[name][:, 16:])


def test_shared_data_may_be_plain_arrays(found, tmp_path):
    shared = {**found, "metadata": MultimodalDataset(tmp_path, subjects=[1, 3]).metadata}
    data = MultimodalDataset(tmp_path / "none", subjects=[1, 3], split="val", shared_data=shared)
    assert torch.equal(data[5]["fmri"], torch.from_numpy(found["fmri_features"][1, 17]))
    with pytest.raises(UserError, match="shared_data: has no metadata; it holds video_features"):
        MultimodalDataset(tmp_path, subjects=[1, 3], shared_data=found)


def test_the_shared_data_has_the_originals_keys_and_pickles_as_a_dict(found, tmp_path):
    shared = MultimodalDataset(tmp_path, subjects=[1, 3], split="train").get_data_dict()
    again = pickle.loads(pickle.dumps(shared))
    assert type(again) is dict
    assert [list(shared), list(again)] == [[*FEATURES, "metadata"]] * 2
    assert all(np.array_equal(again[name], found[name]) for name in FEATURES)


def test_features_of_a_recording_are_shared_film_and_scaled_voxels():
    stimuli, voxels = {"video": np.arange(6.0).reshape(3, 2)}, [np.ones((3, 2)), np.full((3, 2), 5.0)]
    scale = {"mean": [np.zeros(2), np.ones(2)], "std": [np.ones(2), np.full(2, 2.0)]}
    shared = DataDict({"stimuli": stimuli, "fmri": voxels, **scale, "metadata": {}})
    assert np.shares_memory(shared["video_features"], stimuli["video"])
    assert shared["video_features"].shape == (2, 3, 2)
    np.testing.assert_array_equal(shared["fmri_features"][:, 0, 0], [1, 2])


@pytest.mark.parametrize("kind", [SherlockDataset, MultimodalDataset])
def test_a_recording_that_is_not_there_is_a_missing_file(kind, tmp_path):
    for error in (UserError, FileNotFoundError):
        with pytest.raises(error, match=r"stimuli_Sherlock\.m4v"):
            kind(tmp_path, subjects=[1])


def test_a_datasets_processors_have_its_settings(tmp_path):
    write_cache(tmp_path / "cache", suffix=HEAD, video=72, audio=24)
    data = MultimodalDataset(tmp_path, subjects=[1, 3])
    assert (data.video_processor.frame_skip, data.video_processor.tr) == (2, 1.5)
    assert data.audio_processor.n_features == 896
    assert data.text_processor.effective_dim == 3072
    assert data.fmri_processor.normalize
