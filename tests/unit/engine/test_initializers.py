"""Large arrays are drawn in blocks on a CPU: the same distribution, and hardly more memory than the array's own."""

import functools

import jax
import numpy as np
import pytest

from jaxtrain.nn import initializers

LARGE = (1500, 1001)  # more than a block, and no multiple of one
DRAWS = {
    "uniform": (functools.partial(initializers.uniform, bound=3.0), 3.0 / np.sqrt(3)),
    "normal": (functools.partial(initializers.normal, std=0.5), 0.5),
    "truncated_normal": (functools.partial(initializers.truncated_normal, std=0.5), 0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_blocks_have_the_spread_and_no_row_twice(name):
    draw, std = DRAWS[name]
    values = np.asarray(jax.jit(lambda key: draw(key, LARGE))(jax.random.key(0)))
    assert values.size > initializers.BLOCK
    assert values.std() == pytest.approx(std, rel=0.01)
    assert abs(values.mean()) < 0.01 * std
    assert len(np.unique(values[:, 0])) > 0.999 * len(values)


def test_a_large_array_takes_little_more_memory_than_its_own():
    shape = (64 * initializers.BLOCK // 1024, 1024)
    memory = (
        jax.jit(lambda key: initializers.normal(key, shape, 1.0)).lower(jax.random.key(0)).compile().memory_analysis()
    )
    assert memory.output_size_in_bytes == 4 * np.prod(shape)
    assert memory.temp_size_in_bytes < 0.15 * memory.output_size_in_bytes
