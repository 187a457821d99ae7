"""Attention as its formula says and as `jaxtrain.nn` computes it: `python -m benchmarks.attention --rounds 9`.

Milliseconds of the forward pass and of the gradients of queries, keys and values, in turns, float32 on this device.
"""

import statistics
import time

import jax
import jax.numpy as jnp

from benchmarks import parser, save
from jaxtrain import nn

SHAPES = ((32, 13, 4, 8), (128, 17, 4, 32), (16, 128, 4, 64), (4, 256, 12, 64))  # batch, tokens, heads, width
CALLS = 20


def plain(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--rounds", type=int, default=9)
    arguments = p.parse_args()
    found = {}
    for shape in SHAPES:
        given = [jax.random.normal(jax.random.key(i), shape) for i in range(4)]
        for what, program in {"forward": forward, "gradients": gradients}.items():
            name = f"{shape} {what}"
            found[name] = in_turns(program(plain), program(nn.attention), given, arguments.rounds)
            plain_ms, ours_ms, ratio = (statistics.median(values) for values in found[name].values())
            spread = f"{min(found[name]['ratio']):.2f} to {max(found[name]['ratio']):.2f}"
            print(f"{name:28} plain {plain_ms:8.3f} ms  jaxtrain {ours_ms:8.3f} ms  ratio {ratio:.2f} ({spread})")
    save(found, arguments.json)


def forward(function):
    return jax.jit(lambda q, k, v, grad: function(q, k, v))


def gradients(function):
    return jax.jit(lambda q, k, v, grad: jax.vjp(function, q, k, v)[1](grad))


def in_turns(plain, ours, given, rounds: int) -> dict[str, list[float]]:
    times = {"plain": [], "jaxtrain": []}
    for number in range(rounds + 1):
        for values, program in zip(times.values(), (plain, ours), strict=True):
            milliseconds = _milliseconds(program, given)
            if number:  # the first compiles
                values.append(milliseconds)
    return times | {"ratio": [a / b for a, b in zip(*times.values(), strict=True)]}


def _milliseconds(program, given) -> float:
    started = time.perf_counter()
    for _ in range(CALLS):
        result = program(*given)
    jax.block_until_ready(result)
    return 1e3 * (time.perf_counter() - started) / CALLS


if __name__ == "__main__":
    main()
