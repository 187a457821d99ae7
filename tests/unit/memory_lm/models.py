"""Small models and batches that several tests share."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.systems.memory_lm.config import Memory, Model
from jaxtrain.systems.memory_lm.model import MemoryTransformer

MODEL = {
    "hidden_dim": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_layers": 2,
    "intermediate_dim": 48,
    "vocab_size": 61,
    "max_seq_len": 64,
}
CHAPTERS = {
    "num_memory_tokens": 24,
    "use_chapters": True,
    "num_chapters": 6,
    "top_k_chapters": 2,
    "num_shared_chapters": 1,
    "wo_init_zero": False,
    "memory_gradient_checkpointing": False,
}


logits = nnx.jit(lambda model, *given, **named: model.logits(*given, **named))  # (model, ids, mask)


def small(seed: int = 0, guard: bool = True, model: dict | None = None, **memory) -> MemoryTransformer:
    """A random model whose weights are large enough that everything shows in its logits."""
    built = MemoryTransformer(
        Model(**{**MODEL, **(model or {})}), Memory(**{**CHAPTERS, **memory}), rngs=nnx.Rngs(seed), guard=guard
    )
    spread(built, seed)
    return built


def spread(model: nnx.Module, seed: int = 0) -> None:
    """Every matrix normal with std 1/sqrt(width)."""
    keys = iter(jax.random.split(jax.random.key(seed), 1000))
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Param) and variable.ndim == 2:
            shape = variable.shape
            variable.set_value(jax.random.normal(next(keys), shape, variable.dtype) * shape[-1] ** -0.5)


def ids(rows: int = 2, length: int = 10, seed: int = 0, vocabulary: int = 61):
    return jnp.asarray(np.random.default_rng(seed).integers(2, vocabulary, (rows, length)), jnp.int32)


def strategy(name: str) -> dict:
    """Settings for one routing strategy, in training where it exists there."""
    train = name if name in ("sequence", "sequence-rolling", "token", "prefix") else "sequence"
    return {"routing_strategy_train": train, "routing_strategy_inference": name}
