"""Dropout's random words: as many kept as asked for, unrelated to their neighbours, a function of key and place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import nn
from jaxtrain.nn import Rngs
from jaxtrain.nn.dropout import bits, threshold

COUNT = 1 << 20
KEY = jax.random.key(3)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_the_share_that_is_kept_is_the_one_asked_for(kept):
    share = float((bits(KEY, (1024, 1024)) < threshold(kept)).mean())
    assert abs(share - kept) < 4 * np.sqrt(kept * (1 - kept) / COUNT)


@pytest.mark.parametrize("apart", [1, 2, 64, 1024, 65536])
@pytest.mark.parametrize("width", [64, 1024, COUNT])
def test_words_are_unrelated_to_their_neighbours_and_to_other_keys(apart, width):
    signs = lambda key: 2.0 * np.asarray(bits(key, (COUNT // width, width)) >> 31, np.float64).ravel() - 1
    one = signs(KEY)
    for other in (np.roll(one, apart), signs(jax.random.fold_in(KEY, apart))):
        assert abs((one * other).mean()) < 4.5 / np.sqrt(COUNT)


@pytest.mark.parametrize("bit", range(32))
def test_every_bit_is_as_often_one_as_zero(bit):
    share = float(((bits(KEY, (1024, 1024)) >> bit) & 1).mean())
    assert abs(share - 0.5) < 4.5 * 0.5 / np.sqrt(COUNT)


def test_a_word_depends_on_its_row_and_column_alone():
    rows = bits(KEY, (6, 4))
    np.testing.assert_array_equal(bits(KEY, (2, 3, 4)).reshape(6, 4), rows)
    np.testing.assert_array_equal(bits(KEY, (3, 9))[:, :4], rows[:3])
    np.testing.assert_array_equal(jax.jit(bits, static_argnums=1)(KEY, (6, 4)), rows)


def test_rate_one_keeps_nothing():
    y = nn.Dropout(1.0)(jnp.ones(8), Rngs(KEY))
    assert not np.asarray(jnp.nan_to_num(y)).any()
