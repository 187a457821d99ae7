"""Random losses written with torch's operators train as in torch; 500 draws: python -m tests.chaos.random_losses."""

import pytest

from tests.chaos.random_losses import LIMIT, difference

FEW = 3  # for `make test`


@pytest.mark.parametrize("seed", [*range(FEW), *(pytest.param(n, marks=pytest.mark.slow) for n in range(FEW, 30))])
def test_a_random_loss_trains_to_torchs_weights(seed):
    off, word = difference(seed)
    assert off <= LIMIT, word
