"""Count parameters and floating-point operations of a config without allocating or training a model.

A multiplication and an addition are two operations. A Linear takes 2 x rows x in x out; attention 4 x queries x keys x
width plus 8 per score (scale, mask, softmax); RMSNorm 4 per element; rotary positions 3 per element. The backward pass
counts twice the forward pass; recomputation (remat) is not counted. Sequence routing projects its chapters once per
sequence.
"""

import dataclasses

from flax import nnx

from jaxtrain.runtime.prng import initial_rngs
from jaxtrain.systems.memory_lm.config import get_memory_layer_indices
from jaxtrain.systems.memory_lm.param_groups import param_group
from torch_bridge.layouts import named_variables

PER_SCORE = 8


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that the FLOP count needs, for either kind of model."""

    width: int
    heads: int
    kv_heads: int
    head: int
    layers: int
    inner: int
    vocabulary: int
    gated: bool


def sizes_of(config) -> Sizes:
    model = config.model
    if model.base_config is None and model.base_model_name is None:
        head = model.hidden_dim // model.num_heads
        gated = model.hidden_activation == "swiglu"
        shape = (model.hidden_dim, model.num_heads, model.kv_heads, head, model.num_layers, model.intermediate_dim)
        return Sizes(*shape, model.vocab_size, gated)
    from jaxtrain.systems.memory_lm.adapter import backbone_config

    base = backbone_config(model)
    shape = (base.hidden_size, base.num_heads, base.kv_heads, base.head_dim, base.num_layers, base.intermediate_size)
    return Sizes(*shape, base.vocab_size, True)


def parameters(config, build_model) -> dict[str, int]:
    """Return the number of parameters by group (memory, memory_bank, lora, base_model); tied ones count once."""
    model = nnx.eval_shape(lambda: build_model(config, initial_rngs(0)))
    counts: dict[str, int] = {}
    seen = set()
    for key, variable in named_variables(model):
        if isinstance(variable, nnx.Param) and id(variable) not in seen:
            seen.add(id(variable))
            group = param_group(key, config)
            counts[group] = counts.get(group, 0) + int(variable.size)
    return counts


def forward_flops(config, length: int) -> float:
    """Return the operations of the forward pass of one sequence of `length` tokens."""
    s, memory = sizes_of(config), config.memory
    attended, kv = s.heads * s.head, s.kv_heads * s.head
    linear = 2 * length * (2 * s.width * attended + 2 * s.width * kv + (3 if s.gated else 2) * s.width * s.inner)
    attention = 4 * length * length * attended + PER_SCORE * s.heads * length * length
    rotary = 3 * length * (attended + kv)
    norms = 2 * _norm(length, s.width)
    rest = 5 * length * s.inner + 2 * length * s.width  # activation, residuals
    layer = linear + attention + rotary + norms + rest
    readers = len(get_memory_layer_indices(memory, s.layers))
    head = 2 * length * s.width * s.vocabulary + _norm(length, s.width)
    return float(s.layers * layer + head + readers * _memory_layer(config, s, length))


def _memory_layer(config, s: Sizes, length: int) -> float:
    memory = config.memory
    tokens = memory.num_memory_tokens
    read = tokens  # tokens that each query attends to
    projected = tokens  # tokens that are projected to keys and values
    router = 0
    if memory.use_chapters:
        per_token = memory.routing_strategy_train in ("token", "prefix")
        routed = min(memory.top_k_chapters, memory.num_chapters - memory.num_shared_chapters)
        read = (routed + memory.num_shared_chapters) * (tokens // memory.num_chapters)
        projected = tokens if per_token else read
        router = 2 * s.width * memory.num_chapters * (length if per_token else 1)
    heads, kv_heads = memory.memory_num_heads or s.heads, memory.memory_num_kv_heads or s.kv_heads
    reduced = memory.use_low_rank_memory and memory.low_rank_mode == "reduced_dim"
    wide = memory.memory_rank if reduced else memory.memory_dim or s.width
    inner = wide if reduced else s.width
    kv = kv_heads * (inner // heads)
    rank = memory.projection_rank if memory.use_low_rank_projections and not reduced else None
    cost = lambda into, out: 2 * into * out if rank is None else 2 * rank * (into + out)
    projections = length * (cost(s.width, inner) + cost(inner, s.width)) + projected * 2 * cost(wide, kv)
    attention = 4 * length * read * inner + PER_SCORE * heads * length * read
    block = 0
    adapter = config.model.base_config is not None or config.model.base_model_name is not None
    if memory.memory_block_variant == "B" and not adapter:
        block = 2 * length * (3 if s.gated else 2) * s.width * s.inner + _norm(length, s.width)
    expand = 2 * projected * memory.memory_rank * wide if memory.use_low_rank_memory and not reduced else 0
    return router + projections + attention + block + expand + _norm(length, s.width)


def _norm(rows: int, width: int) -> int:
    return rows * (4 * width + 4)


def training_flops(config, length: int) -> float:
    """Return the operations of one sequence, forward and backward."""
    return 3 * forward_flops(config, length)


def describe(config) -> str:
    """Return two lines for `jaxtrain.run --dry-run`: parameters and operations."""
    from jaxtrain.systems.memory_lm import adapter, model

    is_adapter = config.model.base_config is not None or config.model.base_model_name is not None
    counts = parameters(config, (adapter if is_adapter else model).build_model)
    groups = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    length = config.data.max_length
    one = training_flops(config, length)
    return (
        f"parameters: {sum(counts.values()):,} ({groups})\n"
        f"operations: {_readable(one)} per sequence of {length} tokens, forward and backward; "
        f"{_readable(one * config.data.batch_size)} per step"
    )


def _readable(operations: float) -> str:
    unit, size = ("TFLOP", 1e12) if operations >= 1e11 else ("GFLOP", 1e9)
    return f"{operations / size:.3f} {unit}"
