"""Temporary memory of the loss over a large vocabulary, plain and in chunks: `python -m benchmarks.chunked_loss`.

Bytes are XLA's analysis of the compiled gradients; a program of that size is not run. "frozen head" differentiates by
the hidden states alone, as an adapter on a frozen base model does. Gradients are computed and compared on --compared
tokens of the same vocabulary.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import parser, save
from jaxtrain.systems.memory_lm.losses import token_losses


def program(chunk_tokens: int, by: tuple[int, ...] = (0, 1)):
    """(hidden, weight, labels) -> gradients of the summed loss by the arguments `by`, jitted."""
    total = lambda hidden, weight, labels: token_losses(hidden, weight, labels, chunk_tokens).sum()
    return jax.jit(jax.grad(total, argnums=by))


def temporary_bytes(tokens: int, vocabulary: int, width: int, chunk_tokens: int, by: tuple[int, ...]) -> int:
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    lowered = program(chunk_tokens, by).lower(shape(tokens, width), shape(vocabulary, width), labels)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def gradient_difference(tokens: int, vocabulary: int, width: int, chunk_tokens: int) -> float:
    """The larger relative L2 distance of the two gradients."""
    random = np.random.default_rng(0)
    hidden, weight = (jnp.asarray(random.normal(size=(rows, width)), jnp.float32) for rows in (tokens, vocabulary))
    labels = jnp.asarray(random.integers(0, vocabulary, tokens))
    plain, chunked = (program(chunk)(hidden, weight / width**0.5, labels) for chunk in (0, chunk_tokens))
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(chunked, plain, strict=True))


def measure(tokens: int, vocabulary: int, width: int, chunks: list[int], compared: int) -> dict:
    result = {}
    for name, by in {"head trained": (0, 1), "frozen head": (0,)}.items():
        size = lambda chunk, by=by: temporary_bytes(tokens, vocabulary, width, chunk, by)
        plain = size(0)
        in_chunks = {chunk: size(chunk) for chunk in chunks}
        times = {chunk: round(plain / bytes_, 1) for chunk, bytes_ in in_chunks.items()}
        in_mb = {chunk: round(bytes_ / 1e6, 1) for chunk, bytes_ in in_chunks.items()}
        result[name] = {"plain_mb": round(plain / 1e6, 1), "chunked_mb": in_mb, "plain_over_chunked": times}
    differences = {chunk: gradient_difference(compared, vocabulary, width, chunk) for chunk in chunks}
    return result | {"gradient_difference": differences}


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--vocabulary", type=int, default=150_000)
    p.add_argument("--width", type=int, default=256)
    p.add_argument("--chunk-tokens", type=int, nargs="+", default=[64, 256])
    p.add_argument("--compared", type=int, default=512, help="tokens that gradients are compared on")
    arguments = p.parse_args()
    sizes = {name: getattr(arguments, name) for name in ("tokens", "vocabulary", "width")}
    result = sizes | measure(*sizes.values(), arguments.chunk_tokens, arguments.compared)
    print(json.dumps(result, indent=1))
    save(result, arguments.json)


if __name__ == "__main__":
    main()
