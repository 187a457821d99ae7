"""What a sample draws depends on (seed, epoch, position), whichever generator it draws from, and leaves no trace."""

import random

import numpy as np
import pytest

from jaxtrain.data.sample_reader import Reader, Request

DRAWS = {
    "python": random.random,
    "python, normal": lambda: random.gauss(0, 1),
    "numpy": lambda: np.random.rand(),
    "numpy, normal": lambda: np.random.randn(),
}


class Drawing:
    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"x": self.draw()}


def rows(draw, positions) -> list[float]:
    indices = np.asarray(positions)
    return Reader(Drawing(draw), seed=5)(Request(0, indices, indices))["x"].tolist()


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_sample_draws_the_same_in_every_batch_and_from_every_state(draw):
    whole = rows(draw, range(8))
    draw()  # a normal number may be in stock now
    assert [*rows(draw, [0]), *rows(draw, [1, 2]), *rows(draw, range(3, 8))] == whole
    assert len(set(whole)) == 8


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_callers_own_numbers_go_on_as_if_nothing_had_been_read(draw):
    random.seed(1)
    np.random.seed(1)
    wanted = [draw() for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    got = [draw()]
    rows(draw, range(4))
    got.append(draw())
    rows(draw, range(4))
    assert [*got, draw()] == wanted
