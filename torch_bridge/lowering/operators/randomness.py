"""Operators that sample: each takes the call's next key. Distributions are torch's, the numbers are JAX's."""

import jax
import jax.numpy as jnp

from torch_bridge.lowering.dtypes import cast, jax_dtype
from torch_bridge.lowering.table import lowering


@lowering("native_dropout.default")
def native_dropout(call, x, p, train=True):
    """Return the output, and the mask of kept elements."""
    if not train or p == 0:
        return x, jnp.ones(x.shape, bool)
    if p == 1:
        return jnp.zeros_like(x), jnp.zeros(x.shape, bool)
    keep = jax.random.bernoulli(call.key(), 1 - p, x.shape)
    return jnp.where(keep, x / (1 - p), 0).astype(x.dtype), keep


@lowering("dropout.default")
def dropout(call, x, p, train):
    return native_dropout(call, x, p, train)[0]


@lowering("feature_dropout.default")
def feature_dropout(call, x, p, train):
    """Drop whole channels: one draw per [batch, channel]."""
    if not train or p == 0:
        return x
    keep = jax.random.bernoulli(call.key(), 1 - p, x.shape[:2] + (1,) * (x.ndim - 2))
    return jnp.where(keep, x / max(1 - p, 1e-30), 0).astype(x.dtype)


@lowering("bernoulli.default")
def bernoulli(call, x, *, generator=None):
    return jax.random.bernoulli(call.key(), x, x.shape).astype(x.dtype)


@lowering("bernoulli.p", "bernoulli.Tensor")
def bernoulli_p(call, x, p=0.5, *, generator=None):
    return jax.random.bernoulli(call.key(), p, x.shape).astype(x.dtype)


def _dtype(dtype, like=None):
    if dtype is not None:
        return jax_dtype(dtype)
    return jnp.float32 if like is None else like.dtype


@lowering("rand.default", "rand.generator")
def rand(call, size, *, dtype=None, **placement):
    return jax.random.uniform(call.key(), tuple(size), _dtype(dtype))


@lowering("rand_like.default", "rand_like.generator")
def rand_like(call, x, *, dtype=None, **placement):
    return jax.random.uniform(call.key(), x.shape, _dtype(dtype, x))


@lowering("randn.default", "randn.generator")
def randn(call, size, *, dtype=None, **placement):
    return jax.random.normal(call.key(), tuple(size), _dtype(dtype))


@lowering("randn_like.default", "randn_like.generator")
def randn_like(call, x, *, dtype=None, **placement):
    return jax.random.normal(call.key(), x.shape, _dtype(dtype, x))


@lowering("randint.default", "randint.generator")
def randint(call, high, size, **options):
    return randint_low(call, 0, high, size, **options)


@lowering("randint.low", "randint.low_generator")
def randint_low(call, low, high, size, *, dtype=None, **placement):
    return jax.random.randint(call.key(), tuple(size), low, high).astype(jnp.int32 if dtype is None else _dtype(dtype))


@lowering("randint_like.default", "randint_like.low_dtype")
def randint_like(call, x, *bounds, dtype=None, **placement):
    low, high = (0, bounds[0]) if len(bounds) == 1 else bounds
    return jax.random.randint(call.key(), x.shape, low, high).astype(_dtype(dtype, x))


@lowering("randperm.default", "randperm.generator")
def randperm(call, n, *, dtype=None, **placement):
    return jax.random.permutation(call.key(), n).astype(jnp.int32 if dtype is None else _dtype(dtype))


@lowering("uniform.default")
def uniform(call, x, low=0.0, high=1.0, *, generator=None):
    return jax.random.uniform(call.key(), x.shape, x.dtype, low, high)


@lowering("normal_functional.default")
def normal_functional(call, x, mean=0.0, std=1.0, *, generator=None):
    return jax.random.normal(call.key(), x.shape, x.dtype) * std + mean


@lowering("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor")
def normal(call, mean, std=1.0, *, generator=None):
    """Sample from a normal distribution; mean and std get gradient 0, as in torch."""
    mean, std = jax.lax.stop_gradient((mean, std))
    like = mean if hasattr(mean, "shape") else std
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    return jax.random.normal(call.key(), shape, like.dtype) * std + mean


@lowering("normal.float_float")
def normal_numbers(call, mean, std, size, *, dtype=None, **placement):
    return jax.random.normal(call.key(), tuple(size), _dtype(dtype)) * std + mean


@lowering("log_normal.default")
def log_normal(call, x, mean=1.0, std=2.0, *, generator=None):
    return jnp.exp(jax.random.normal(call.key(), x.shape, x.dtype) * std + mean)


@lowering("cauchy.default")
def cauchy(call, x, median=0.0, sigma=1.0, *, generator=None):
    return jax.random.cauchy(call.key(), x.shape, x.dtype) * sigma + median


@lowering("geometric.default")
def geometric(call, x, p, *, generator=None):
    return jax.random.geometric(call.key(), p, x.shape).astype(x.dtype)


@lowering("random.from")
def random_from(call, x, low, high, *, generator=None):
    return jax.random.randint(call.key(), x.shape, low, high).astype(x.dtype)


@lowering("random.to")
def random_to(call, x, high, *, generator=None):
    return random_from(call, x, 0, high)


@lowering("poisson.default")
def poisson(call, rate, generator=None):
    return jax.random.poisson(call.key(), rate).astype(rate.dtype)


@lowering("binomial.default")
def binomial(call, count, prob, generator=None):
    return jax.random.binomial(call.key(), count, prob).astype(count.dtype)


@lowering("_standard_gamma.default")
def standard_gamma(call, shape, generator=None):
    return jax.random.gamma(call.key(), shape)


@lowering("_sample_dirichlet.default")
def sample_dirichlet(call, concentration, generator=None):
    return jax.random.dirichlet(call.key(), concentration)


@lowering("exponential.default")
def exponential(call, x, rate=1.0, *, generator=None):
    return jax.random.exponential(call.key(), x.shape, x.dtype) / rate


@lowering("multinomial.default")
def multinomial(call, probabilities, num_samples, replacement=False, *, generator=None):
    logits = jnp.log(probabilities)
    if replacement:
        shape = (num_samples, *probabilities.shape[:-1])
        return jnp.moveaxis(jax.random.categorical(call.key(), logits, shape=shape), 0, -1).astype(jnp.int32)
    noisy = logits + jax.random.gumbel(call.key(), logits.shape, logits.dtype)
    return jax.lax.top_k(noisy, num_samples)[1].astype(jnp.int32)


@lowering("rrelu_with_noise_functional.default")
def rrelu(call, x, noise, lower=0.125, upper=1 / 3, training=False, generator=None):
    slope = jax.random.uniform(call.key(), x.shape, x.dtype, lower, upper) if training else (lower + upper) / 2
    slope = cast(slope, x.dtype) if not hasattr(slope, "dtype") else slope
    return jnp.where(x > 0, x, x * slope), jnp.where(x > 0, jnp.ones_like(x), slope)
