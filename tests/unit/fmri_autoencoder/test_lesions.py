"""Silenced units and voxels, and what they do to the decoded film."""

import functools

import numpy as np
import pytest
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder import Lesion, effects, simulate
from jaxtrain.systems.fmri_autoencoder.data import build_data
from jaxtrain.systems.fmri_autoencoder.evals.lesions import explain
from jaxtrain.systems.fmri_autoencoder.evals.report import report_lesion
from tests.unit.fmri_autoencoder import tiny


@pytest.fixture(scope="module")
def recording():
    config = tiny.config("head", "lesion.at=voxels", "lesion.places=[0,1,2]", "lesion.samples=3")
    source = build_data(config, "validation")
    items = [source[i] for i in range(3)]
    return config, tiny.model("head"), source, {name: np.stack([item[name] for item in items]) for name in items[0]}


@functools.partial(nnx.jit, static_argnums=2)
def silenced(model, batch, lesion: Lesion) -> dict:
    return simulate(model, batch, lesion)


def test_a_factor_of_one_changes_nothing(recording):
    _, model, _, batch = recording
    found = silenced(model, batch, Lesion("bottleneck", tuple(range(28)), factor=1.0))
    assert all(not rms.any() for rms in effects(found["intact"], found["lesioned"]).values())


def test_a_silenced_unit_is_zero_and_moves_what_is_decoded(recording):
    _, model, _, batch = recording
    found = silenced(model, batch, Lesion("bottleneck", (3, -1)))
    lesioned = np.asarray(found["lesioned"]["bottleneck"])
    assert not lesioned[:, [3, 27]].any()
    np.testing.assert_array_equal(np.delete(lesioned, [3, 27], 1), np.delete(found["intact"]["bottleneck"], [3, 27], 1))
    assert min(effects(found["intact"], found["lesioned"])["fmri"]) > 0


def test_changed_voxels_are_explained_by_the_bottleneck_that_gives_them(recording):
    _, model, _, _ = recording
    rng = np.random.default_rng(0)
    start = rng.normal(size=(3, 28)).astype(np.float32)
    predict = nnx.jit(lambda m, b: m.encoder.bottleneck_to_voxels(b))
    wanted = predict(model, start + rng.normal(scale=0.3, size=start.shape).astype(np.float32))
    found = nnx.jit(functools.partial(explain, ridge=1e-3))(model, start, wanted)
    distance = lambda bottleneck: float(np.square(predict(model, bottleneck) - wanted).sum())
    assert distance(found) < 0.02 * distance(start)


def test_the_report_holds_the_effects(recording, tmp_path):
    config, model, source, _ = recording
    files = {path.name for path in report_lesion(model, source, config, tmp_path)}
    assert files == {"lesion.json", "lesion_frames.png"}  # a planted recording in memory has no grid
    assert '"places": 3' in (tmp_path / "lesion.json").read_text()


def test_places_outside_are_named(recording):
    _, model, _, batch = recording
    with pytest.raises(UserError, match=r"bottleneck \[28\] lie outside the 28 there are"):
        simulate(model, batch, Lesion("bottleneck", [28]))
    with pytest.raises(UserError, match="at is 'film'"):
        simulate(model, batch, Lesion("film", [0]))


def test_a_lesion_of_nothing_is_refused():
    with pytest.raises(UserError, match="a lesion needs places"):
        tiny.config("head", "lesion.at=voxels")
