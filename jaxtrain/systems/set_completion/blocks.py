"""Set Transformer blocks: attention over sets without positions, after Lee et al. 2019.

Every block takes x [batch, element, width] and, where elements may be padding, `mask` bool [batch, element] with
True = padding, as torch's key_padding_mask. A set of padding alone gives NaN, as in torch; `losses.py` keeps such
rows out of training. No block knows the order of its elements.
"""

import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.nn import initializers


def feedforward(width: int, rngs: nnx.Rngs) -> nn.Sequential:
    """Linear to four times the width, exact GELU, Linear back."""
    return nn.Sequential(
        nn.Linear(width, 4 * width, rngs=rngs), nn.Activation(nn.gelu), nn.Linear(4 * width, width, rngs=rngs)
    )


class MultiheadAttentionBlock(nnx.Module):
    """MAB: attention from query to key, then a feedforward, each with a residual and, if asked, a norm after it."""

    def __init__(
        self, embed_dim: int, num_heads: int, use_layer_norm: bool = False, dropout: float = 0.0, *, rngs: nnx.Rngs
    ):
        self.mha = nn.MultiheadAttention(embed_dim, num_heads, dropout, rngs=rngs)
        self.feedforward = feedforward(embed_dim, rngs)
        self.use_layer_norm = use_layer_norm
        if use_layer_norm:
            self.layer_norm1 = nn.LayerNorm(embed_dim)
            self.layer_norm2 = nn.LayerNorm(embed_dim)

    def __call__(self, query, key=None, mask=None, rngs=None):
        """query: [batch or 1, query, width]; key: [batch, key, width], `query` if left out; mask: bool [batch, key]."""
        # Added, not selected: the gradient of an all-padding row is then NaN wherever torch's is.
        bias = None if mask is None else jnp.where(mask[:, None, None, :], -jnp.inf, 0.0)
        x = query + self.mha(query, key, bias=bias, rngs=rngs)
        if self.use_layer_norm:
            x = self.layer_norm1(x)
        x = x + self.feedforward(x)
        return self.layer_norm2(x) if self.use_layer_norm else x


class SelfAttentionBlock(nnx.Module):
    """SAB: every element attends to all."""

    def __init__(
        self, embed_dim: int, num_heads: int, use_layer_norm: bool = False, dropout: float = 0.0, *, rngs: nnx.Rngs
    ):
        self.mab = MultiheadAttentionBlock(embed_dim, num_heads, use_layer_norm, dropout, rngs=rngs)

    def __call__(self, x, mask=None, rngs=None):
        return self.mab(x, None, mask, rngs)


class InducedSetAttentionBlock(nnx.Module):
    """ISAB: all elements talk through `num_inducing_points` learned ones, linear in the size of the set.

    Its own layer_norm is applied whatever `use_layer_norm` says, as in the original.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_inducing_points: int,
        use_layer_norm: bool = False,
        dropout: float = 0.0,
        *,
        rngs: nnx.Rngs,
    ):
        self.inducing_points = nnx.Param(initializers.xavier_uniform(rngs.params(), (num_inducing_points, embed_dim)))
        self.mab1 = MultiheadAttentionBlock(embed_dim, num_heads, use_layer_norm, dropout, rngs=rngs)
        self.mab2 = MultiheadAttentionBlock(embed_dim, num_heads, use_layer_norm, dropout, rngs=rngs)
        self.layer_norm = nn.LayerNorm(embed_dim)

    def __call__(self, x, mask=None, rngs=None):
        induced = self.mab1(self.inducing_points[None].astype(x.dtype), x, mask, rngs)
        return self.layer_norm(self.mab2(x, induced, rngs=rngs) + x)


class PoolingMultiheadAttention(nnx.Module):
    """PMA: the set summarised in `num_seeds` rows [batch, num_seeds, width]."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_seeds: int,
        use_layer_norm: bool = False,
        dropout: float = 0.0,
        *,
        rngs: nnx.Rngs,
    ):
        self.seed_vectors = nnx.Param(initializers.xavier_uniform(rngs.params(), (num_seeds, embed_dim)))
        self.mab = MultiheadAttentionBlock(embed_dim, num_heads, use_layer_norm, dropout, rngs=rngs)
        self.out_proj = nn.Linear(embed_dim, embed_dim, rngs=rngs)

    def __call__(self, x, mask=None, rngs=None):
        return self.out_proj(self.mab(self.seed_vectors[None].astype(x.dtype), x, mask, rngs))


class SetTransformer(nnx.Module):
    """Two ISABs, each with an outer residual beside its inner one, pooled to `num_seeds` rows, refined by two SABs."""

    def __init__(
        self,
        input_dim: int,
        num_seeds: int,
        embed_dim: int = 128,
        num_heads: int = 4,
        num_inducing_points: int = 32,
        use_layer_norm: bool = False,
        dropout: float = 0.0,
        *,
        rngs: nnx.Rngs,
    ):
        options = (use_layer_norm, dropout)
        self.input_proj = nn.Linear(input_dim, embed_dim, rngs=rngs) if input_dim != embed_dim else nn.Identity()
        self.enc_layer1 = InducedSetAttentionBlock(embed_dim, num_heads, num_inducing_points, *options, rngs=rngs)
        self.enc_layer2 = InducedSetAttentionBlock(embed_dim, num_heads, num_inducing_points, *options, rngs=rngs)
        self.dec_layer1 = PoolingMultiheadAttention(embed_dim, num_heads, num_seeds, *options, rngs=rngs)
        self.dec_layer2 = SelfAttentionBlock(embed_dim, num_heads, *options, rngs=rngs)
        self.dec_layer3 = SelfAttentionBlock(embed_dim, num_heads, *options, rngs=rngs)

    def __call__(self, x, mask=None, rngs=None):
        """x: [batch, element, input_dim]; mask: bool [batch, element]. Gives [batch, num_seeds, embed_dim]."""
        x = self.input_proj(x)
        x = self.enc_layer1(x, mask, rngs) + x
        x = self.enc_layer2(x, mask, rngs) + x
        x = self.dec_layer1(x, mask, rngs)
        x = self.dec_layer2(x, rngs=rngs) + x
        return self.dec_layer3(x, rngs=rngs) + x


class SetTransformerLayer(nnx.Module):
    """Elements read from the set's summary: SetTransformer, cross-attention to it, feedforward. Keeps x's shape."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_inducing_points: int,
        use_layer_norm: bool = True,
        dropout: float = 0.1,
        *,
        rngs: nnx.Rngs,
    ):
        self.set_transformer = SetTransformer(
            embed_dim,
            num_inducing_points,
            embed_dim,
            num_heads,
            num_inducing_points,
            use_layer_norm,
            dropout,
            rngs=rngs,
        )
        self.cross_attention = MultiheadAttentionBlock(embed_dim, num_heads, use_layer_norm, dropout, rngs=rngs)
        self.feedforward = feedforward(embed_dim, rngs)
        self.use_layer_norm = use_layer_norm
        if use_layer_norm:
            self.layer_norm1 = nn.LayerNorm(embed_dim)
            self.layer_norm2 = nn.LayerNorm(embed_dim)
        self.dropout = nn.Dropout(dropout)

    def __call__(self, x, mask=None, rngs=None):
        summary = self.set_transformer(x, mask, rngs)
        x = x + self.dropout(self.cross_attention(x, summary, rngs=rngs), rngs)
        if self.use_layer_norm:
            x = self.layer_norm1(x)
        x = x + self.dropout(self.feedforward(x), rngs)
        return self.layer_norm2(x) if self.use_layer_norm else x
