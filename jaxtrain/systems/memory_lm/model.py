"""MemoryTransformer: a decoder whose selected layers read a bank of learned tokens."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.nn import initializers
from jaxtrain.systems.memory_lm.attention import MLP, MemoryCrossAttention, SelfAttention
from jaxtrain.systems.memory_lm.banks import make_bank
from jaxtrain.systems.memory_lm.cache import Cache, View, empty_cache, empty_routing
from jaxtrain.systems.memory_lm.config import get_memory_bank_assignments, get_memory_layer_indices
from jaxtrain.systems.memory_lm.layers import run_layers
from jaxtrain.systems.memory_lm.memory_read import choose_chapters, read_memory
from jaxtrain.systems.memory_lm.router import ChapterRouter, Routing


class Output(NamedTuple):
    """Output of a model. hidden: [batch, time, width] after the last norm, input of `model.head`. routing: Routing by
    memory layer. blocks: the outputs of all blocks. cache: the updated cache, None if none was given."""

    hidden: jax.Array
    routing: dict[int, Routing]
    blocks: tuple
    cache: Cache | None


class Block(nnx.Module):
    """Pre-norm decoder block. Only memory layers have `memory_attn`: variant A reads before the MLP, B after it."""

    def __init__(self, config, memory, reads_memory: bool, *, rngs: nnx.Rngs):
        norm = lambda: make_norm(config)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.self_attn = SelfAttention(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.reads_memory = reads_memory
        self.variant = memory.memory_block_variant
        if reads_memory:
            self.memory_layernorm = norm()
            self.memory_attn = make_memory_attention(
                memory, config.hidden_dim, config.num_heads, config.kv_heads, config.dropout, rngs=rngs
            )
            if self.variant == "B":
                self.post_memory_layernorm = norm()
                self.post_memory_mlp = MLP(config, rngs=rngs)

    def __call__(self, x, view, layer: int, read, rngs=None):
        """Run the block on x [batch, time, width]. read: (attention, normalised stream) -> the memory's update."""
        x = x + self.self_attn(self.input_layernorm(x), view, layer, rngs)
        if self.reads_memory and self.variant == "A":
            x = x + read(self.memory_attn, self.memory_layernorm(x))
        x = x + self.mlp(self.post_attention_layernorm(x), rngs)
        if self.reads_memory and self.variant == "B":
            x = x + read(self.memory_attn, self.memory_layernorm(x))
            x = x + self.post_memory_mlp(self.post_memory_layernorm(x), rngs)
        return x


class MemoryTransformer(nnx.Module):
    """Decoder with memory layers. config, memory: sections of a `memory_lm.scratch` run. guard: see `View.attend`."""

    def __init__(self, config, memory, *, rngs: nnx.Rngs, guard: bool = True):
        self.config, self.memory, self.guard = config, memory, guard
        self.scan_layers = config.scan_layers
        layers = get_memory_layer_indices(memory, config.num_layers)
        self.bank_of = get_memory_bank_assignments(memory, layers)
        width = config.hidden_dim
        self.embed_tokens = nn.Embedding(config.vocab_size, width, rngs=rngs)
        banks = max(self.bank_of.values()) + 1 if layers else 0
        self.memory_banks = nnx.List([make_bank(memory, memory.memory_dim or width, rngs) for _ in range(banks)])
        self.routers = make_routers(memory, width, list(set(layers)), rngs)  # in set order, as in the original
        self.layers = nnx.List([Block(config, memory, i in self.bank_of, rngs=rngs) for i in range(config.num_layers)])
        self.norm = make_norm(config)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False, rngs=rngs)
        initialise(self, config, memory, rngs)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        segment_ids=None,
        cache: Cache | None = None,
        prefill: bool = False,
        strategy: str | None = None,
        lengths=None,
        rngs=None,
    ) -> Output:
        """Return the Output for input_ids, int [batch, time].

        attention_mask: [batch, time], 0 marks padding. position_ids: int [batch, time], by default counted from the
        cache's length, or 0. segment_ids: int [batch, time], attention stays within equal ones. cache: of earlier
        calls; prefill: True in the first call with it. strategy: overrides the routing strategy. lengths: int [batch],
        row sums of the attention_mask, given only if it hides just the last tokens. rngs=None means evaluation.
        """
        view = View(
            None if attention_mask is None else attention_mask.astype(bool),
            position_ids,
            segment_ids,
            cache,
            *input_ids.shape,
            self.guard,
            lengths,
        )
        strategy = strategy or routing_strategy(self.memory, rngs)
        routing: dict[int, Routing] = {}
        hidden = self.embed_tokens(input_ids)
        hidden, blocks = run_layers(self, hidden, view, strategy, prefill, routing, rngs)
        return Output(self.norm(hidden), routing, blocks, view.close())

    def block(self, layer: int, hidden, view, strategy: str, prefill: bool, rngs=None):
        """Run one block; return its output and its Routing, or None."""
        chosen = None
        if layer in self.bank_of and self.memory.use_chapters:
            router = self.routers[str(layer)]
            chosen = choose_chapters(router, self.memory, hidden, view, layer, strategy, prefill)

        def read(attention, x):
            bank = self.memory_banks[self.bank_of[layer]]
            body = lambda x, chosen: read_memory(attention, bank, self.memory, x, chosen, strategy, rngs)
            return remat_read(body, self.memory, rngs)(x, chosen)

        return nn.block(self.layers[layer], hidden, view, layer, read, rngs=rngs), chosen

    def plain_block(self, block: Block, hidden, view, layer: int, rngs=None):
        return block(hidden, view, layer, None, rngs)

    def kind_of(self, layer: int) -> None:
        """Return None: all layers without memory are of one kind."""
        return

    @property
    def head_weight(self):
        """Return the output weight, [vocabulary, width]."""
        return self.lm_head.weight[...]

    def head(self, hidden):
        """Return logits, float [..., vocabulary], of Output.hidden."""
        return self.lm_head(hidden)

    def logits(self, input_ids, attention_mask=None, **options):
        return self.head(self(input_ids, attention_mask, **options).hidden)

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache for `capacity` tokens per row, padding included."""
        config, dtype = self.config, self.embed_tokens.weight[...].dtype
        routing = empty_routing(self.memory, list(self.bank_of), batch, config.hidden_dim, dtype)
        head = config.hidden_dim // config.num_heads
        return empty_cache(config.num_layers, capacity, batch, config.kv_heads, head, dtype, routing)


def make_norm(config):
    kind = nn.RMSNorm if config.use_rms_norm else nn.LayerNorm
    return kind(config.hidden_dim, eps=config.norm_eps)


def make_routers(memory, width: int, layers: list[int], rngs) -> nnx.Dict:
    """Return one router per memory layer, by layer number; none without chapters."""
    make = lambda: ChapterRouter(
        width,
        memory.num_chapters,
        memory.top_k_chapters,
        memory.num_shared_chapters,
        memory.routing_window_size,
        rngs=rngs,
    )
    return nnx.Dict({str(layer): make() for layer in (layers if memory.use_chapters else [])})


def make_memory_attention(
    memory, width: int, heads: int, kv_heads: int, dropout: float, *, rngs
) -> MemoryCrossAttention:
    """Return a memory layer's attention. heads, kv_heads, dropout: the model's, which the section may override."""
    reduced = memory.use_low_rank_memory and memory.low_rank_mode == "reduced_dim"
    return MemoryCrossAttention(
        width,
        memory.memory_rank if reduced else memory.memory_dim or width,
        memory.memory_num_heads or heads,
        memory.memory_num_kv_heads or kv_heads,
        dropout if memory.memory_dropout is None else memory.memory_dropout,
        memory.projection_rank if memory.use_low_rank_projections else None,
        reduced,
        rngs=rngs,
    )


def routing_strategy(memory, rngs) -> str:
    return memory.routing_strategy_inference if rngs is None else memory.routing_strategy_train


def remat_read(body, memory, rngs):
    """Return `body`, recomputed in the backward pass if memory_gradient_checkpointing is set (in training only)."""
    return jax.checkpoint(body) if memory.memory_gradient_checkpointing and rngs is not None else body


def initialise(model: Any, config, memory, rngs: nnx.Rngs) -> None:
    """Initialise every Linear and Embedding from a normal, biases 0; then apply overrides and zero memory outputs."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            set_normal(module, config.initializer_range, rngs)
    for block in model.layers:
        if config.self_attn_wo_init_std is not None:
            set_normal(block.self_attn.o_proj, config.self_attn_wo_init_std, rngs)
        if config.mlp_down_proj_init_std is not None:
            for mlp in (block.mlp, getattr(block, "post_memory_mlp", None)):
                if mlp is not None:
                    set_normal(mlp.down_proj, config.mlp_down_proj_init_std, rngs)
        if block.reads_memory and memory.wo_init_zero:
            weight = block.memory_attn.output.weight
            weight.set_value(jnp.zeros(weight.shape))


def set_normal(layer, std: float, rngs: nnx.Rngs) -> None:
    layer.weight.set_value(initializers.normal(rngs.params(), layer.weight.shape, std))
    if getattr(layer, "bias", None) is not None:
        layer.bias.set_value(jnp.zeros(layer.bias.shape))


def build_model(config, rngs: nnx.Rngs) -> MemoryTransformer:
    """Return the model of a `memory_lm.scratch` config. It is traced, so it must do no I/O."""
    guard = config.compat != "original"
    return MemoryTransformer(config.model, config.memory, rngs=rngs, guard=guard)
