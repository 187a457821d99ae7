"""Random numbers: the generator's published answers, the distributions, and no more memory than the array's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.nn import initializers
from jaxtrain.runtime import threefry
from jaxtrain.runtime.prng import initial_rngs

SHAPE = (1500, 1001)
DRAWS = {
    "uniform": (functools.partial(initializers.uniform, bound=3.0), 3.0 / np.sqrt(3)),
    "normal": (functools.partial(initializers.normal, std=0.5), 0.5),
    "truncated_normal": (functools.partial(initializers.truncated_normal, std=0.5), 0.5),
}
PUBLISHED = {  # key and counter -> bits: Random123's kat_vectors of threefry2x32 with 20 rounds
    (0, 0, 0, 0): (0x6B200159, 0x99BA4EFE),
    (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF): (0x1CB996FC, 0xBB002BE7),
    (0x13198A2E, 0x03707344, 0x243F6A88, 0x85A308D3): (0xC4923A9C, 0x483DF7A0),
}


@pytest.mark.parametrize("given", PUBLISHED)
def test_the_generator_gives_its_published_answers(given):
    bits = jax.jit(threefry.threefry)(*map(jnp.uint32, given))
    assert tuple(int(value) for value in bits) == PUBLISHED[given]


def test_a_cpu_compiles_a_draw_without_a_loop_and_to_the_bits_of_jax():
    """jax.random.key(0)'s first bits as jax's own lowering gives them."""
    drawn = jax.jit(lambda key: jax.random.bits(key, (4,))).lower(jax.random.key(0)).compile()
    assert "while" not in drawn.as_text()
    assert drawn(jax.random.key(0)).tolist() == [4070199207, 4202968722, 1427181096, 2012915765]


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_has_its_spread_and_no_row_twice(name):
    draw, std = DRAWS[name]
    values = np.asarray(jax.jit(lambda key: draw(key, SHAPE))(jax.random.key(0)))
    assert values.std() == pytest.approx(std, rel=0.01)
    assert abs(values.mean()) < 0.01 * std
    assert len(np.unique(values[:, 0])) > 0.999 * len(values)


def test_a_large_array_takes_no_memory_but_its_own():
    draw = jax.jit(lambda key: initializers.normal(key, (4096, 4096), 1.0))
    memory = draw.lower(jax.random.key(0)).compile().memory_analysis()
    assert memory.output_size_in_bytes == 4 * 4096**2
    assert memory.temp_size_in_bytes < 1e5


def test_weights_begin_with_the_keys_of_flax():
    ours, flaxs = initial_rngs(7), nnx.Rngs(7)
    keys = [[rngs.params(), rngs(), rngs.default.fork().key[...], rngs.dropout()] for rngs in (ours, flaxs)]
    assert [jax.random.key_data(key).tolist() for key in keys[0]] == [
        jax.random.key_data(key).tolist() for key in keys[1]
    ]
