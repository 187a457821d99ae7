"""Precision policies: the dtype that stores the weights, and the dtype that computes.

A layer of `jaxtrain.nn` computes in its weight's dtype, and normalisations in float32. So a policy only casts weights
with two or more axes for the forward pass; gains and biases stay in float32, as under torch autocast.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Precision:
    """A precision policy. params: dtype of the weights between steps. compute: dtype of forward and backward pass."""

    params: jnp.dtype
    compute: jnp.dtype
    scaled: bool = False  # the loss is multiplied by a dynamic scale, so that float16 gradients do not vanish
    float8: bool = False  # linear layers multiply in 8 bits while training (jaxtrain.nn.float8)

    def for_compute(self, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {
            key: value.astype(self.compute) if value.ndim > 1 and jnp.issubdtype(value.dtype, jnp.floating) else value
            for key, value in params.items()
        }

    def for_storage(self, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {
            key: value.astype(self.params) if jnp.issubdtype(value.dtype, jnp.floating) else value
            for key, value in params.items()
        }


POLICIES = {
    "fp32": Precision(jnp.dtype("float32"), jnp.dtype("float32")),
    "bf16": Precision(jnp.dtype("float32"), jnp.dtype("bfloat16")),
    "bf16_params": Precision(jnp.dtype("bfloat16"), jnp.dtype("bfloat16")),
    "fp16": Precision(jnp.dtype("float32"), jnp.dtype("float16"), scaled=True),
    "fp8": Precision(jnp.dtype("float32"), jnp.dtype("bfloat16"), float8=True),
}
