"""cuDNN's attention for half precision on a GPU: the scores never reach memory, so long sequences cost time alone.

Under `deterministic: true` XLA takes its deterministic backward pass (openxla/xla#14125).
"""

import functools
import logging

import jax
import jax.numpy as jnp

log = logging.getLogger(__name__)
LEAST_TOKENS = 64  # with fewer, the scores are no larger than what they are made of


def takes(q, k, v, mask=None, causal=False) -> bool:
    """Return True if `fused` supports [batch, token, head, width] in half precision, width a multiple of 8 up to 128, a
    mask or bias [batch or 1, head or 1, query or 1, key or 1] only over even numbers of tokens, causal only with as
    many queries as keys."""
    queries, keys = q.shape[1], k.shape[1]
    return (
        q.ndim == 4
        and q.dtype == k.dtype == v.dtype
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and len(q) == len(k) == len(v)
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 128
        and min(queries, keys) >= LEAST_TOKENS
        and (queries == keys or not causal)
        and (mask is None or (mask.ndim == 4 and queries % 2 == keys % 2 == 0))
        and is_available()
    )


def fused(q, k, v, *, mask=None, bias=None, causal=False, scale=None):
    """softmax(q k^T scale + bias) v of what `takes` accepts, with a mask or a bias. A row that may attend to nothing
    (a bias of -inf throughout, or as far as it may look) gives 0. Source: jax.nn.dot_product_attention."""
    given = mask if bias is None else bias
    if given is None:
        return _kernel(q, k, v, scale=scale, is_causal=causal)
    given = jnp.broadcast_to(given, (*given.shape[:2], q.shape[1], k.shape[1]))
    if bias is None:
        y, seen = _kernel(q, k, v, mask=given, scale=scale, is_causal=causal), given
    else:
        finite = jnp.maximum(given.astype(q.dtype), jnp.finfo(q.dtype).min / 2)
        y, seen = _kernel(q, k, v, bias=finite, scale=scale, is_causal=causal), given > -jnp.inf
    seen = seen & jnp.tril(jnp.ones(seen.shape[-2:], bool)) if causal else seen
    return jnp.where(jnp.swapaxes(seen.any(-1), 1, 2)[..., None], y, 0)


_kernel = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")


@functools.cache
def is_available() -> bool:
    """Return True if this process's device runs the kernel, tried once: forward, backward, with a mask."""
    if jax.default_backend() != "gpu":
        return False
    x, mask = jnp.zeros((1, 64, 1, 64), jnp.bfloat16), jnp.ones((1, 1, 64, 64), bool)
    try:
        with jax.ensure_compile_time_eval():
            trial = jax.grad(lambda x: fused(x, x, x, mask=mask).astype(jnp.float32).sum())
            jax.block_until_ready(jax.jit(trial)(x))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        log.info("attention runs as plain XLA: cuDNN's kernel is not available here (%s)", error)
        return False
    log.info("attention runs as cuDNN's fused kernel where it is half precision, without dropout")
    return True
