"""Best so far, and when to stop."""

import math

import pytest

from jaxtrain.train.loop.early_stop import EarlyStopping


def stops_after(values, **options):
    best = EarlyStopping("loss", options.pop("mode", "min"), **options)
    for count, value in enumerate(values, 1):
        best.update(value)
        if best.stop:
            return count
    return None


def test_it_stops_after_patience_evaluations_without_progress():
    assert stops_after([1.0, 0.9, 0.95, 0.92, 0.91], patience=3) == 5


def test_a_tie_is_no_progress():
    assert stops_after([1.0, 1.0, 1.0], patience=2) == 3


def test_many_small_gains_together_count():
    """Each gain is below min_delta, their sum is not: the reference stays where the last counted gain left it."""
    losses = [1.0 - 0.004 * i for i in range(30)]
    assert stops_after(losses, patience=3, min_delta=0.01) is None


def test_gains_that_stay_below_min_delta_in_sum_stop():
    assert stops_after([1.0, 0.999, 0.998, 0.997], patience=3, min_delta=0.01) == 4


def test_the_best_is_the_best_ever_seen_even_below_min_delta():
    best = EarlyStopping("loss", "min", min_delta=0.5)
    assert [best.update(v) for v in (1.0, 0.9, 0.95, 0.8)] == [True, True, False, True]
    assert best.best == 0.8


def test_nan_never_is_progress():
    best = EarlyStopping("loss", "min", patience=2)
    assert [best.update(v) for v in (math.nan, 1.0, math.nan, math.nan)] == [False, True, False, False]
    assert best.stop


def test_max_mode():
    assert stops_after([0.5, 0.6, 0.55, 0.58], mode="max", patience=2) == 4


def test_a_resumed_count_goes_on():
    first = EarlyStopping("loss", "min", patience=3)
    for value in (1.0, 1.1, 1.2):
        first.update(value)
    second = EarlyStopping("loss", "min", patience=3)
    second.restore(first.state())
    second.update(1.3)
    assert second.stop
    assert second.best == pytest.approx(1.0)
