"""Qwen2, Qwen3, Llama and Mistral decoders with Hugging Face's state-dict keys.

Source: the published architectures; checked against transformers in tests/unit/memory_lm/test_backbones.py.
"""

import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.nn import initializers
from jaxtrain.systems.memory_lm.attention import rotary_angles
from jaxtrain.systems.memory_lm.backbone_config import BackboneConfig


class Attention(nnx.Module):
    def __init__(self, config: BackboneConfig, window: int | None, *, rngs: nnx.Rngs):
        width, head = config.hidden_size, config.head_dim
        heads, kv = config.num_heads * head, config.kv_heads * head
        self.q_proj = nn.Linear(width, heads, bias=config.qkv_bias, rngs=rngs)
        self.k_proj = nn.Linear(width, kv, bias=config.qkv_bias, rngs=rngs)
        self.v_proj = nn.Linear(width, kv, bias=config.qkv_bias, rngs=rngs)
        self.o_proj = nn.Linear(heads, width, bias=config.out_bias, rngs=rngs)
        self.q_norm = nn.RMSNorm(head, eps=config.norm_eps) if config.head_norms else None
        self.k_norm = nn.RMSNorm(head, eps=config.norm_eps) if config.head_norms else None
        self.config = config
        self.window = window

    def __call__(self, x, view, layer: int, rngs=None):
        """Attend within x [batch, time, width]; view: `cache.View`."""
        split = lambda y: y.reshape(*x.shape[:2], -1, self.config.head_dim)
        q, k, v = (split(project(x, rngs)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = rotary_angles(view.positions, jnp.asarray(self.config.inv_freq, jnp.float32))
        scale = self.config.attention_scale
        q, k = nn.rotate(q, cos * scale, sin * scale), nn.rotate(k, cos * scale, sin * scale)
        k, v = view.extend(layer, k, v)
        y = view.attend(q, k, v, window=self.window)
        return self.o_proj(y.reshape(*x.shape[:2], -1), rngs)


class MLP(nnx.Module):
    def __init__(self, config: BackboneConfig, *, rngs: nnx.Rngs):
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias, rngs=rngs)
        self.up_proj = nn.Linear(width, inner, bias=bias, rngs=rngs)
        self.down_proj = nn.Linear(inner, width, bias=bias, rngs=rngs)
        self.activation = nn.ACTIVATIONS[config.activation]

    def __call__(self, x, rngs=None):
        return self.down_proj(self.activation(self.gate_proj(x, rngs)) * self.up_proj(x, rngs), rngs)


class DecoderLayer(nnx.Module):
    def __init__(self, config: BackboneConfig, window: int | None, *, rngs: nnx.Rngs):
        self.self_attn = Attention(config, window, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    def __call__(self, x, view, layer: int, rngs=None):
        x = x + self.self_attn(self.input_layernorm(x), view, layer, rngs)
        return x + self.mlp(self.post_attention_layernorm(x), rngs)


class Decoder(nnx.Module):
    def __init__(self, config: BackboneConfig, *, rngs: nnx.Rngs):
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, window, rngs=rngs) for window in config.windows])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)


class CausalLM(nnx.Module):
    """Decoder `model` with `lm_head`, like Hugging Face's ...ForCausalLM; weights are drawn from N(0, 0.02)."""

    def __init__(self, config: BackboneConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.model = Decoder(config, rngs=rngs)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, rngs=rngs)
        self.config = config
        for _, module in nnx.iter_modules(self):
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.set_value(initializers.normal(rngs.params(), module.weight.shape, 0.02))
                if getattr(module, "bias", None) is not None:
                    module.bias.set_value(jnp.zeros(module.bias.shape))
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        if dtype != jnp.float32:
            for _, variable in nnx.iter_graph(self):
                if isinstance(variable, nnx.Param):
                    variable.set_value(variable.get_value().astype(dtype))
