"""Criteria under their masks and weights, and the metrics over a whole split."""

import jax
import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder import losses, metrics
from tests.unit.fmri_autoencoder import tiny

RNG = np.random.default_rng(0)
PAIR = RNG.normal(size=(2, 5, 7)).astype(np.float32)


def triple(rows: int = 5) -> list[np.ndarray]:
    """Prediction and target of film, sound and text."""
    return [RNG.normal(size=(rows, width)).astype(np.float32) for width in (6, 6, 4, 4, 3, 3)]


def test_weights_scale_the_sum_and_not_its_parts():
    arrays = triple()
    total, parts = losses.ReconstructionLoss(2.0, 3.0, 0.5)(*arrays)
    video, audio, text = (np.square(arrays[2 * i] - arrays[2 * i + 1]).mean() for i in range(3))
    assert total == pytest.approx(2 * video + 3 * audio + 0.5 * text, rel=1e-6)
    assert parts["audio_loss"] == pytest.approx(audio, rel=1e-6)


@pytest.mark.parametrize("kind", ["mse", "mae", "correlation"])
@pytest.mark.parametrize("criterion", [losses.FMRIMatchingLoss, losses.NormalizedFMRIMatchingLoss])
def test_rows_that_are_not_valid_do_not_count(kind, criterion):
    valid = np.array([True, True, False, True, False])
    value = lambda *arguments: jax.tree.leaves(criterion(kind)(*arguments))[0]
    assert value(*PAIR, valid) == pytest.approx(float(value(PAIR[0][valid], PAIR[1][valid])), rel=1e-5)


def test_the_correlation_loss_is_the_uncentred_cosine_of_the_original():
    loss = losses.FMRIMatchingLoss("correlation")
    assert loss(PAIR[0], PAIR[0] * 3) == pytest.approx(0, abs=1e-6)
    assert loss(PAIR[0], np.zeros_like(PAIR[0])) == 1
    assert loss(PAIR[0], PAIR[0] + 5) > 0.01  # a Pearson correlation would not see the shift
    assert np.isfinite(jax.grad(lambda x: loss(x, PAIR[1]))(np.zeros_like(PAIR[0]))).all()


def test_normalised_errors_are_divided_by_the_unbiased_spread_of_the_batch():
    prediction, target = PAIR
    value, parts = losses.NormalizedFMRIMatchingLoss("mse")(prediction, target)
    assert value == pytest.approx(np.square(prediction - target).mean() / (target.std(ddof=1) + 1e-8), rel=1e-5)
    assert parts["fmri_loss_raw"] == pytest.approx(np.square(prediction - target).mean(), rel=1e-6)


def test_an_unknown_kind_of_loss_is_named():
    with pytest.raises(UserError, match="spearman"):
        losses.FMRIMatchingLoss("spearman")(*PAIR)


def test_voxel_correlation_over_a_split_in_batches_is_pearsons():
    config = tiny.config("head")
    prediction = RNG.normal(size=(50, 9)).astype(np.float32)
    target = 0.5 * prediction + RNG.normal(size=(50, 9)).astype(np.float32) + 3
    target[:, 8] = 1.0  # a constant voxel
    sums: dict = {}
    for start in (0, 20, 40):
        rows = slice(start, start + 20)
        x, y = (np.concatenate([z[rows], np.full((20 - len(z[rows]), 9), 1e3)]) for z in (prediction, target))
        batch = {"fmri": y, "valid": np.arange(20) < 50 - start}
        found = metrics.eval_statistics({"predicted_fmri": x}, batch, config).sums
        sums = {name: sums.get(name, 0) + np.asarray(value) for name, value in found.items()}
    pearson = [np.corrcoef(prediction[:, i], target[:, i])[0, 1] for i in range(8)]
    finished = metrics.compute(sums, {}, config)
    assert finished["voxel_correlation"] == pytest.approx(np.mean([*pearson, 0.0]), rel=1e-4)
    assert finished["fmri_mse_of_mean"] == pytest.approx(target.var(0).mean(), rel=1e-4)
    rows = [np.corrcoef(prediction[i], target[i])[0, 1] for i in range(50)]
    assert finished["fmri_correlation"] == pytest.approx(np.mean(rows), rel=1e-4)


def test_predicting_the_mean_scores_zero():
    target = PAIR[1]
    constant = np.broadcast_to(target.mean(0), target.shape)
    found = metrics.voxel_correlation(metrics.voxel_sums(constant, target, np.ones(5, bool)))
    assert np.abs(found).max() < 1e-3
    np.testing.assert_allclose(metrics.compute_r2_score(constant, target, dim=0), 0, atol=1e-5)
