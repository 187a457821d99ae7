import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import f1_score, hamming_loss

from jaxtrain.systems.set_completion import metrics
from tests.unit.set_completion.golden import config, table

DATA = table("dataset")


def scored(logits, target, visible=None):
    visible = np.zeros(target.shape, bool) if visible is None else visible
    return metrics.compute(
        metrics.counts(jnp.asarray(logits), target, visible, jnp.ones((len(target), 1), bool)), {}, None
    )


def test_precision_recall_f1_equal_the_originals():
    shape = tuple(DATA["multi_hot_shape"])
    target, predicted = np.zeros(shape, bool), np.full(shape, -1.0)
    target[tuple(np.transpose(DATA["multi_hot_nonzero"]))] = True
    predicted[tuple(np.transpose(DATA["metrics"]["pred_nonzero"]))] = 1.0
    got = scored(predicted, target)
    for name in ("precision", "recall", "f1"):
        assert got[name] == pytest.approx(DATA["metrics"]["result"][name], abs=1e-7)
    assert scored(np.full(shape, -1.0), target)["f1"] == 0.0


def test_f1_and_hamming_equal_scikit_learn():
    generator = np.random.default_rng(0)
    logits, target = generator.normal(size=(50, 9)), generator.random((50, 9)) < 0.3
    got = scored(logits, target)
    assert got["f1"] == pytest.approx(f1_score(target, logits >= 0, average="micro"), abs=1e-6)
    assert got["hamming"] == pytest.approx(hamming_loss(target, logits >= 0), abs=1e-6)


def test_completion_counts_hidden_tokens_among_the_best_guesses_not_shown():
    target = np.array([[True, True, True, False]])
    visible = np.array([[True, False, False, False]])
    assert scored(np.array([[9.0, 3.0, -1.0, 2.0]]), target, visible)["completion"] == 0.5
    assert scored(np.array([[9.0, 3.0, 2.5, 2.0]]), target, visible)["completion"] == 1.0


def test_padded_rows_count_nowhere():
    settings = config("splat_tiny")
    batch = {"targets": np.array([[1, 2, -1], [1, 2, 3]]), "inputs": np.array([[1, -1, -1], [1, -1, -1]])}
    given = {"logits": jnp.ones((2, 140))}
    one = metrics.eval_statistics(given, {**batch, "valid": jnp.array([True, False])}, settings).sums
    assert (float(one["sets"]), float(one["target"]), float(one["hidden"])) == (1.0, 2.0, 1.0)
