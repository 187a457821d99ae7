"""MemoryAdapter: a pretrained decoder whose selected layers also read a memory bank, with optional LoRA."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxtrain import hub, nn
from jaxtrain.errors import UserError
from jaxtrain.nn.lora import LoRALinear, replace_linears
from jaxtrain.runtime.prng import initial_rngs
from jaxtrain.systems.memory_lm.backbone_config import BackboneConfig, load_config_file, read_config
from jaxtrain.systems.memory_lm.backbones import CausalLM
from jaxtrain.systems.memory_lm.banks import make_bank
from jaxtrain.systems.memory_lm.cache import Cache, View, empty_cache, empty_routing
from jaxtrain.systems.memory_lm.config import get_memory_bank_assignments, get_memory_layer_indices
from jaxtrain.systems.memory_lm.layers import run_layers
from jaxtrain.systems.memory_lm.memory_read import choose_chapters, read_memory
from jaxtrain.systems.memory_lm.model import (
    Output,
    make_memory_attention,
    make_routers,
    remat_read,
    routing_strategy,
    set_normal,
)
from jaxtrain.systems.memory_lm.router import Routing
from torch_bridge.layouts import named_variables


class Adapter(nnx.Module):
    """Memory read of one decoder layer: h + memory_attn(memory_layernorm(h)). MemoryAdapter.block runs it."""

    def __init__(self, memory, config: BackboneConfig, dropout: float, *, rngs: nnx.Rngs):
        self.memory_layernorm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.memory_attn = make_memory_attention(
            memory, config.hidden_size, config.num_heads, config.kv_heads, dropout, rngs=rngs
        )
        if memory.wo_init_zero:
            weight = self.memory_attn.output.weight
            weight.set_value(jnp.zeros(weight.shape))


class MemoryAdapter(nnx.Module):
    """Pretrained decoder with memory layers.

    config, dtype: of the base model. memory: the `memory` section. dropout: of the memory's attention, unless
    memory.memory_dropout is set. scan_layers: see `layers`. memory.memory_block_variant has no effect: memory is always
    read after the whole decoder layer. Raises UserError if LoRA is enabled and no layer matches its targets.
    """

    def __init__(
        self,
        config: BackboneConfig,
        memory,
        dropout: float = 0.0,
        *,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
        scan_layers: bool = False,
    ):
        self.config, self.memory, self.scan_layers = config, memory, scan_layers
        layers = get_memory_layer_indices(memory, config.num_layers)
        self.bank_of = get_memory_bank_assignments(memory, layers)
        self.base_model = CausalLM(config, rngs=rngs, dtype=dtype)
        if memory.lora:
            self.lora_names = tuple(add_lora(self.base_model, memory, rngs=rngs))
            if not self.lora_names:
                raise UserError(f"memory.lora_targets: no layer's name contains one of {list(memory.lora_targets)}")
        width = config.hidden_size
        banks = max(self.bank_of.values()) + 1 if layers else 0
        self.memory_banks = nnx.List([make_bank(memory, memory.memory_dim or width, rngs) for _ in range(banks)])
        self.routers = make_routers(memory, width, layers, rngs)
        for router in self.routers.values():
            set_normal(router.router, 0.02, rngs)
        self.memory_adapters = nnx.Dict({str(i): Adapter(memory, config, dropout, rngs=rngs) for i in layers})

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
        """Return the Output; arguments as in `MemoryTransformer.__call__`."""
        mask = None if attention_mask is None else attention_mask.astype(bool)
        view = View(mask, position_ids, segment_ids, cache, *input_ids.shape, lengths=lengths)
        strategy = strategy or routing_strategy(self.memory, rngs)
        hidden = self.base_model.model.embed_tokens(input_ids)
        routing: dict[int, Routing] = {}
        hidden, blocks = run_layers(self, hidden, view, strategy, prefill, routing, rngs)
        return Output(self.base_model.model.norm(hidden), routing, blocks, view.close())

    @property
    def layers(self) -> nnx.List:
        """Return the base model's decoder layers."""
        return self.base_model.model.layers

    def plain_block(self, block, hidden, view, layer: int, rngs=None):
        return block(hidden, view, layer, rngs)

    def kind_of(self, layer: int) -> int | None:
        """Return the layer's attention window in tokens; layers with equal windows can be scanned together."""
        return self.config.windows[layer]

    def block(self, layer: int, hidden, view, strategy: str, prefill: bool, rngs=None):
        """Run one decoder layer and its memory read; return the hidden states and the Routing, or None."""
        hidden = nn.block(self.layers[layer], hidden, view, layer, rngs=rngs)
        if layer not in self.bank_of:
            return hidden, None
        chosen = None
        if self.memory.use_chapters:
            router = self.routers[str(layer)]
            chosen = choose_chapters(router, self.memory, hidden, view, layer, strategy, prefill)
        adapter, bank = self.memory_adapters[str(layer)], self.memory_banks[self.bank_of[layer]]
        body = lambda x, chosen: read_memory(adapter.memory_attn, bank, self.memory, x, chosen, strategy, rngs)
        update = remat_read(body, self.memory, rngs)(adapter.memory_layernorm(hidden), chosen)
        return hidden + update.astype(hidden.dtype), chosen

    @property
    def head_weight(self):
        """Return the output weight [vocabulary, width], with a LoRA on lm_head added."""
        head = self.base_model.lm_head
        merged = isinstance(head, nn.Linear) or head.merged
        return head.weight[...] if merged else head.weight[...] + head.update.astype(head.weight[...].dtype)

    def head(self, hidden):
        """Return logits, float [..., vocabulary], of Output.hidden."""
        return self.base_model.lm_head(hidden)

    def logits(self, input_ids, attention_mask=None, **options):
        return self.head(self(input_ids, attention_mask, **options).hidden)

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache for `capacity` tokens per row, padding included."""
        config, dtype = self.config, self.base_model.model.embed_tokens.weight[...].dtype
        routing = empty_routing(self.memory, list(self.bank_of), batch, config.hidden_size, dtype)
        return empty_cache(config.num_layers, capacity, batch, config.kv_heads, config.head_dim, dtype, routing)


def add_lora(module: nnx.Module, memory, *, rngs: nnx.Rngs) -> list[str]:
    """Replace every Linear whose dotted name contains one of `lora_targets` by a LoRALinear; return their names."""
    return replace_linears(
        module,
        lambda name: any(target in name for target in memory.lora_targets),
        lambda base: LoRALinear(base, memory.lora_rank, memory.lora_alpha, memory.lora_dropout, rngs=rngs),
    )


def backbone_config(model) -> BackboneConfig:
    """Return the base model's config from a `model` section: inline, or of a local folder or hub id.

    Raises UserError if neither base_config nor base_model_name is set.
    """
    if model.base_config is not None:
        return read_config(model.base_config)
    if model.base_model_name is None:
        raise UserError(
            "model.base_model_name: missing; name a folder of Hugging Face weights or a hub id, or give "
            "model.base_config to start from random weights"
        )
    return read_config(config_json(model))


def config_json(model) -> dict:
    """Return the content of the base model's config.json: inline, or from its folder."""
    if model.base_config is not None:
        return dict(model.base_config)
    return load_config_file(folder_of(model.base_model_name))


def build_model(config, rngs: nnx.Rngs) -> MemoryAdapter:
    """Return the model of a `memory_lm.adapter` config, before the base weights are loaded."""
    return MemoryAdapter(
        backbone_config(config.model),
        config.memory,
        config.model.dropout,
        rngs=rngs,
        dtype=jnp.dtype(base_dtype(config)),
        scan_layers=config.model.scan_layers,
    )


def base_dtype(config) -> str:
    """Return the dtype of the base model's weights: model.base_dtype if they are frozen, else float32."""
    return config.model.base_dtype if config.model.freeze_base_model else "float32"


def folder_of(name: str) -> pathlib.Path:
    """Return the folder of a local path or hub id. Raises UserError if there is neither."""
    return hub.folder_of(name, "model.base_model_name")


def initial_weights(config) -> Mapping[str, Any] | None:
    """Return the base model's weights under the adapter's keys, read lazily; None without a base_model_name.

    Raises UserError if the folder lacks a weight of the model.
    """
    if config.model.base_model_name is None:
        return None
    from torch_bridge import files

    weights = files.open_weights(folder_of(config.model.base_model_name))
    state = {f"base_model.{name}": leaf for name, leaf in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    if backbone_config(config.model).tied and "base_model.model.embed_tokens.weight" in state:
        state.setdefault("base_model.lm_head.weight", state["base_model.model.embed_tokens.weight"])
    missing = [key for key in base_keys(config) if key not in state]
    if missing:
        raise UserError(f"{config.model.base_model_name}: {len(missing)} weights missing, as {', '.join(missing[:3])}")
    return state


def base_keys(config) -> list[str]:
    """Return the keys of the base model's weights, without LoRA."""
    model = nnx.eval_shape(lambda: build_model(config, initial_rngs(0)))
    keys = [key for key, _ in named_variables(model) if key.startswith("base_model.")]
    return [key for key in keys if not key.endswith((".lora_A", ".lora_B"))]
