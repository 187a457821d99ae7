"""A GPU's fused kernels of attention against the formula: `python -m benchmarks.attention_kernels`.

Prints how far results and gradients are from the formula's in float32, beside the formula's own in bfloat16, and
milliseconds of forward and backward: the kernel, the formula in bfloat16, in float32.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import parser, save
from jaxtrain.nn import fused_attention
from jaxtrain.nn.attention_formula import formula

CALLS = 10
PLAIN: dict[str, tuple] = {
    "plain": (8, 512, 12, 64, 12, {}),
    "odd": (8, 197, 12, 64, 12, {}),
    "causal": (4, 1024, 12, 64, 4, {"causal": True}),
    "lengths": (8, 512, 12, 64, 12, {"lengths": True}),
    "mask": (4, 256, 8, 64, 8, {"mask": True}),
    "wide": (2, 512, 12, 128, 2, {"causal": True}),
}
DROPPED: dict[str, tuple] = {
    "dropped": (8, 512, 12, 64, 12, {"lengths": True, "drop": True}),
    "dropped, causal": (2, 300, 4, 128, 4, {"causal": True, "drop": True}),
}


def main() -> None:
    arguments = parser(__doc__).parse_args()
    found = {}
    for kinds in (PLAIN, DROPPED):
        found |= compare(kinds)
    for name, entry in found.items():
        print(f"{name:20} {entry}")
    save(found, arguments.json)


def compare(kinds: dict[str, tuple]) -> dict[str, Any]:
    """By name: distances of the kernel's results and gradients, and of the formula's in bfloat16, from the formula's in
    float32; milliseconds. kinds: batch, tokens, heads, width, kv heads, options."""
    found: dict[str, Any] = {"available": fused_attention.is_available()}
    for name, kind in kinds.items():
        kernel, plain, arrays = case(*kind)
        results, times = zip(
            measured(kernel, arrays, jnp.bfloat16),
            measured(plain, arrays, jnp.bfloat16),
            measured(plain, arrays, jnp.float32),
            strict=True,
        )
        off = [max(map(distance, result, results[2])) for result in results[:2]]
        found[name] = {"off": [round(x, 5) for x in off], "ms": [round(ms, 3) for ms in times]}
    wrong = [name for name, entry in found.items() if isinstance(entry, dict) and entry["off"][0] > 2e-2]
    if wrong:
        raise RuntimeError(f"{', '.join(wrong)}: further off than 0.02: {found}")
    return found


def case(batch: int, tokens: int, heads: int, width: int, kv_heads: int, options: dict):
    """The kernel, the formula, and queries, keys, values and a gradient of the result."""
    keys = jax.random.split(jax.random.key(0), 4)
    counts = (heads, kv_heads, kv_heads, heads)
    arrays = [jax.random.normal(key, (batch, tokens, n, width)) for key, n in zip(keys, counts, strict=True)]
    more: dict[str, Any] = {"causal": options.get("causal", False)}
    if "lengths" in options:
        more["lengths"] = jnp.arange(1, batch + 1) * tokens // batch
    if "mask" in options:
        more["mask"] = jax.random.bernoulli(jax.random.key(9), 0.7, (batch, 1, tokens, tokens))
    if "drop" not in options:
        return functools.partial(fused_attention.fused, **more), functools.partial(formula, **more), arrays
    rngs = lambda: jax.random.key(7)
    kernel = lambda q, k, v: fused_attention.dropped(q, k, v, rngs(), 0.9, **more)
    return kernel, functools.partial(formula, dropout_rate=0.1, rngs=rngs, **more), arrays


def measured(attend: Callable, arrays: list, dtype: Any) -> tuple[list, float]:
    """The result and the gradients, and milliseconds of both passes."""

    @jax.jit
    def run(q, k, v, grad):
        y, pull = jax.vjp(attend, q, k, v)
        return [y, *pull(grad.astype(y.dtype))]

    given = [x.astype(jnp.bfloat16).astype(dtype) for x in arrays]
    with jax.default_matmul_precision("float32"):
        found = jax.block_until_ready(run(*given))
        began = time.perf_counter()
        for _ in range(CALLS):
            last = run(*given)
        jax.block_until_ready(last)
    return found, (time.perf_counter() - began) / CALLS * 1e3


def distance(ours, wanted) -> float:
    return float(jnp.linalg.norm((ours.astype(jnp.float32) - wanted).ravel()) / jnp.linalg.norm(wanted.ravel()))


if __name__ == "__main__":
    main()
