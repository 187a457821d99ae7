"""Initial weights as timm and the original draw them."""

import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn import LayerNorm, Linear
from jaxtrain.nn.initializers import truncated_normal

STD = 0.02


def reset_linear_and_norm(module: nnx.Module, rngs: nnx.Rngs) -> None:
    """Every Linear below `module`: weight from a normal of standard deviation 0.02 cut at +-2, bias 0; every affine
    LayerNorm: 1 and 0. Attention's fused `in_proj_weight` keeps what it has, as in the original."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, Linear):
            node.weight.set_value(truncated_normal(rngs.params(), node.weight.shape, STD))
            if node.bias is not None:
                node.bias.set_value(jnp.zeros(node.bias.shape))
        elif isinstance(node, LayerNorm) and node.weight is not None:
            node.weight.set_value(jnp.ones(node.weight.shape))
            if node.bias is not None:
                node.bias.set_value(jnp.zeros(node.bias.shape))


def copy_weights(source: nnx.Module, target: nnx.Module) -> None:
    """Write every parameter of `source` into the module of the same structure."""
    values = nnx.to_pure_dict(nnx.state(source, nnx.Param))
    state = nnx.state(target, nnx.Param)
    nnx.replace_by_pure_dict(state, values)
    nnx.update(target, state)
