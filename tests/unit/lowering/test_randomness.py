"""Sampling operators have torch's distributions, dtypes and shapes, and take a fresh key each."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.runtime.prng import Rngs
from torch_bridge.lowering.operators import TABLE
from torch_bridge.lowering.table import Call

N = 20_000
LIKE = jnp.zeros(N)
THIRD = jnp.full(N, 1 / 3)

SAMPLES = {  # operator: (arguments, mean, standard deviation)
    "rand.default": (([N],), 0.5, 12**-0.5),
    "rand.generator": (([N],), 0.5, 12**-0.5),
    "rand_like.default": ((LIKE,), 0.5, 12**-0.5),
    "randn.default": (([N],), 0, 1),
    "randn.generator": (([N],), 0, 1),
    "randn_like.default": ((LIKE,), 0, 1),
    "randint.default": ((4, [N]), 1.5, 1.25**0.5),
    "randint.low": ((2, 6, [N]), 3.5, 1.25**0.5),
    "randint_like.default": ((LIKE, 4), 1.5, 1.25**0.5),
    "randint_like.low_dtype": ((LIKE, 2, 6), 3.5, 1.25**0.5),
    "randperm.default": ((N,), (N - 1) / 2, N / 12**0.5),
    "rand_like.generator": ((LIKE,), 0.5, 12**-0.5),
    "randn_like.generator": ((LIKE,), 0, 1),
    "randint.generator": ((4, [N]), 1.5, 1.25**0.5),
    "randint.low_generator": ((2, 6, [N]), 3.5, 1.25**0.5),
    "randperm.generator": ((N,), (N - 1) / 2, N / 12**0.5),
    "random.from": ((LIKE, 2, 6), 3.5, 1.25**0.5),
    "random.to": ((LIKE, 4), 1.5, 1.25**0.5),
    "normal.float_float": ((2, 3, [N]), 2, 3),
    "log_normal.default": ((LIKE, 0.0, 0.25), math.exp(0.03125), math.exp(0.03125) * math.expm1(0.0625) ** 0.5),
    "geometric.default": ((LIKE, 0.25), 4, 12**0.5),
    "poisson.default": ((LIKE + 3,), 3, 3**0.5),
    "binomial.default": ((LIKE + 8, THIRD), 8 / 3, 4 / 3),
    "_standard_gamma.default": ((LIKE + 3,), 3, 3**0.5),
    "_sample_dirichlet.default": ((jnp.ones((N, 2)),), 0.5, 12**-0.5),
    "uniform.default": ((LIKE, -1, 3), 1, 4 / 12**0.5),
    "normal_functional.default": ((LIKE, 2, 3), 2, 3),
    "normal.Tensor_float": ((LIKE + 2, 3), 2, 3),
    "normal.float_Tensor": ((2, LIKE + 3), 2, 3),
    "normal.Tensor_Tensor": ((LIKE + 2, LIKE + 3), 2, 3),
    "exponential.default": ((LIKE, 2.0), 0.5, 0.5),
    "bernoulli.default": ((THIRD,), 1 / 3, 2**0.5 / 3),
    "bernoulli.p": ((LIKE, 1 / 3), 1 / 3, 2**0.5 / 3),
    "bernoulli.Tensor": ((LIKE, THIRD), 1 / 3, 2**0.5 / 3),
    "multinomial.default": ((jnp.array([0.5, 0.5]), N, True), 0.5, 0.5),
    "dropout.default": ((jnp.ones(N), 0.25, True), 1, 3**-0.5),
    "feature_dropout.default": ((jnp.ones((N, 1, 2)), 0.25, True), 1, 3**-0.5),
    "native_dropout.default": ((jnp.ones(N), 0.25, True), 1, 3**-0.5),
    "rrelu_with_noise_functional.default": ((-jnp.ones(N), LIKE, 0.0, 1.0, True), -0.5, 12**-0.5),
}


def _draw(name, seed=0):
    result = TABLE[f"aten.{name}"](Call(Rngs(jax.random.key(seed))), *SAMPLES[name][0])
    return np.asarray(result[0] if isinstance(result, tuple) else result, np.float64)


@pytest.mark.parametrize("name", SAMPLES)
def test_mean_and_deviation_within_three_percent(name):
    _, mean, deviation = SAMPLES[name]
    sample = _draw(name)
    assert abs(sample.mean() - mean) < 0.03 * max(deviation, abs(mean))
    assert sample.std() == pytest.approx(deviation, rel=0.03)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_key_decides(name):
    np.testing.assert_array_equal(_draw(name, 1), _draw(name, 1))
    assert (_draw(name, 1) != _draw(name, 2)).any()


def test_half_of_a_cauchy_sample_lies_within_sigma_of_its_median():
    sample = TABLE["aten.cauchy.default"](Call(), LIKE, 2.0, 3.0)
    assert float(jnp.mean(jnp.abs(sample - 2) < 3)) == pytest.approx(0.5, abs=0.015)


def test_two_draws_of_one_call_differ_and_evaluation_repeats_itself():
    first, second = Call(), Call()
    a, b = (TABLE["aten.rand.default"](first, [8]) for _ in range(2))
    assert (a != b).any()
    np.testing.assert_array_equal(a, TABLE["aten.rand.default"](second, [8]))


def test_dropout_outside_training_returns_its_input():
    x = jnp.arange(5.0)
    for name in ("dropout", "feature_dropout"):
        np.testing.assert_array_equal(TABLE[f"aten.{name}.default"](Call(), x, 0.5, False), x)


def test_multinomial_without_replacement_gives_each_once():
    sample = TABLE["aten.multinomial.default"](Call(), jnp.ones((3, 6)), 6)
    np.testing.assert_array_equal(np.sort(sample, axis=-1), np.tile(np.arange(6), (3, 1)))
