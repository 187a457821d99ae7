"""Multi-head attention and whole encoder layers as torch computes them in evaluation: one operator without dropout."""

import jax
import jax.numpy as jnp

from torch_bridge.lowering.operators.activations import gelu
from torch_bridge.lowering.operators.normalization import layer_norm
from torch_bridge.lowering.table import lowering

_OF_PAIRS, _OF_KEYS = 0, 1  # torch's mask_type: [query, key], [batch, key]; else [batch, head, query, key]


def _linear(x, weight, bias):
    return jnp.matmul(x, weight.T) + bias


@lowering("_native_multi_head_attention.default")
def native_multi_head_attention(
    call, query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask=None,
    need_weights=True, average_attn_weights=True, mask_type=None,
):  # fmt: skip
    """Return outputs and, if wanted, weights. mask: nonzero where a query may not attend, in the form of mask_type."""
    weights, biases = jnp.split(qkv_weight, 3), jnp.split(qkv_bias, 3)
    heads = lambda x: jnp.swapaxes(x.reshape(*x.shape[:-1], num_head, embed_dim // num_head), 1, 2)
    q, k, v = (heads(_linear(x, w, b)) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * (embed_dim // num_head) ** -0.5
    if mask is not None:
        hidden = mask.astype(bool)
        hidden = hidden[:, None, None] if mask_type == _OF_KEYS else hidden
        scores = jnp.where(hidden, -jnp.inf, scores)
    attended = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.swapaxes(jnp.einsum("bhqk,bhkd->bhqd", attended, v), 1, 2)
    outputs = _linear(mixed.reshape(*query.shape[:-1], embed_dim), proj_weight, proj_bias)
    if not need_weights:
        return outputs, None
    return outputs, attended.mean(1) if average_attn_weights else attended


@lowering("_transformer_encoder_layer_fwd.default")
def transformer_encoder_layer(
    call, src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu, norm_first, eps,
    norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2, ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2,
    mask=None, mask_type=None,
):  # fmt: skip
    def attend(x):
        options = embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type
        return native_multi_head_attention(call, x, x, x, *options)[0]

    def feed(x):
        hidden = _linear(x, ffn_weight_1, ffn_bias_1)
        return _linear(gelu(call, hidden) if use_gelu else jax.nn.relu(hidden), ffn_weight_2, ffn_bias_2)

    first = lambda x: layer_norm(call, x, [embed_dim], norm_weight_1, norm_bias_1, eps)
    second = lambda x: layer_norm(call, x, [embed_dim], norm_weight_2, norm_bias_2, eps)
    if norm_first:
        x = src + attend(first(src))
        return x + feed(second(x))
    x = first(src + attend(src))
    return second(x + feed(x))
