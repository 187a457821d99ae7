"""Set completion model: from the visible tokens of a build and a weapon to logits of all tokens of the full build."""

import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.nn import initializers


def feedforward(width: int, rngs: nnx.Rngs) -> nn.Sequential:
    """Return a feed-forward layer: Linear to 4 x width, exact GELU, Linear back."""
    return nn.Sequential(
        nn.Linear(width, 4 * width, rngs=rngs), nn.Activation(nn.gelu), nn.Linear(4 * width, width, rngs=rngs)
    )


class MultiheadAttentionBlock(nnx.Module):
    """MAB: attention from query to key, then a feed-forward layer, each with a residual and an optional post-norm."""

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
        """Attend from query [batch or 1, query, width] to key [batch, key, width] (default: query).

        mask: bool [batch, key], True hides a key.
        """
        # An added bias, not a select: then the gradient of an all-padding row is NaN exactly where torch's is.
        bias = None if mask is None else jnp.where(mask[:, None, None, :], -jnp.inf, 0.0)
        x = query + self.mha(query, key, bias=bias, rngs=rngs)
        if self.use_layer_norm:
            x = self.layer_norm1(x)
        x = x + self.feedforward(x)
        return self.layer_norm2(x) if self.use_layer_norm else x


class SelfAttentionBlock(nnx.Module):
    """SAB: every element attends to all elements."""

    def __init__(
        self, embed_dim: int, num_heads: int, use_layer_norm: bool = False, dropout: float = 0.0, *, rngs: nnx.Rngs
    ):
        self.mab = MultiheadAttentionBlock(embed_dim, num_heads, use_layer_norm, dropout, rngs=rngs)

    def __call__(self, x, mask=None, rngs=None):
        return self.mab(x, None, mask, rngs)


class InducedSetAttentionBlock(nnx.Module):
    """ISAB: elements attend to each other through `num_inducing_points` learned points, at linear cost in the set size.

    `layer_norm` is applied even without use_layer_norm, as in the original.
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
    """PMA: pool the set into `num_seeds` rows, [batch, num_seeds, width]."""

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
    """Two ISABs, pooling to `num_seeds` rows, and two SABs; ISABs and SABs have an extra outer residual."""

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
        """Return [batch, num_seeds, embed_dim] for x [batch, element, input_dim]; mask: bool [batch, element]."""
        x = self.input_proj(x)
        x = self.enc_layer1(x, mask, rngs) + x
        x = self.enc_layer2(x, mask, rngs) + x
        x = self.dec_layer1(x, mask, rngs)
        x = self.dec_layer2(x, rngs=rngs) + x
        return self.dec_layer3(x, rngs=rngs) + x


class SetTransformerLayer(nnx.Module):
    """Cross-attention from the elements to a SetTransformer's summary, then a feed-forward layer; keeps x's shape."""

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


class SetCompletionModel(nnx.Module):
    """Embeddings, set transformer layers, a masked mean over the tokens, and a linear output layer.

    Parameters have the names and shapes of the original's state dict. The sparse autoencoder is trained on `pooled`
    [batch, hidden_dim], the input of `output_layer`.
    """

    def __init__(
        self,
        vocab_size: int,
        weapon_vocab_size: int,
        embedding_dim: int,
        hidden_dim: int,
        output_dim: int,
        num_layers: int = 2,
        num_heads: int = 4,
        num_inducing_points: int = 32,
        use_layer_norm: bool = False,
        dropout: float = 0.0,
        pad_token_id: int | None = None,
        *,
        rngs: nnx.Rngs,
    ):
        self.ability_embedding = nn.Embedding(vocab_size, embedding_dim, pad_token_id, rngs=rngs)
        self.weapon_embedding = nn.Embedding(weapon_vocab_size, embedding_dim, rngs=rngs)
        same = embedding_dim == hidden_dim
        self.input_proj = nn.Identity() if same else nn.Linear(embedding_dim, hidden_dim, rngs=rngs)
        self.transformer_layers = nnx.List(
            [
                SetTransformerLayer(hidden_dim, num_heads, num_inducing_points, use_layer_norm, dropout, rngs=rngs)
                for _ in range(num_layers)
            ]
        )
        self.output_layer = nn.Linear(hidden_dim, output_dim, rngs=rngs)

    def __call__(self, ability_tokens, weapon_token, key_padding_mask=None, rngs=None):
        """Return logits [batch, output_dim] for int tokens [batch, token] and weapons int [batch, 1] or [batch].

        key_padding_mask: bool [batch, token], True for padding; default: none. The result depends neither on the order
        of the tokens nor on the amount of padding. A row of padding only gives NaN; zero columns give
        `output_layer.bias`.
        """
        return self.output_layer(self.pooled(ability_tokens, weapon_token, key_padding_mask, rngs))

    def pooled(self, ability_tokens, weapon_token, key_padding_mask=None, rngs=None):
        """Return the mean over the visible tokens, [batch, hidden_dim]; arguments as in `__call__`."""
        x, mask = self.encode(ability_tokens, weapon_token, key_padding_mask, rngs)
        return masked_mean(x, mask)

    def encode(self, ability_tokens, weapon_token, key_padding_mask=None, rngs=None):
        """Return the hidden vectors of the tokens [batch, token, hidden_dim], and the padding mask used."""
        mask = jnp.zeros(ability_tokens.shape, bool) if key_padding_mask is None else key_padding_mask
        x = self.embed(ability_tokens, weapon_token)
        if ability_tokens.shape[1]:
            for layer in self.transformer_layers:
                x = nn.block(layer, x, mask, rngs=rngs)
        return x, mask

    def embed(self, ability_tokens, weapon_token):
        """Return the projected sum of token and weapon embeddings, [batch, token, hidden_dim]."""
        weapon = self.weapon_embedding(weapon_token.reshape(-1, 1))
        return self.input_proj(self.ability_embedding(ability_tokens) + weapon)


def masked_mean(x, key_padding_mask):
    """Return the mean of x [batch, token, width] over the tokens that are not padding; 0 if all are."""
    visible = ~key_padding_mask[..., None]
    count = jnp.maximum(visible.sum(1), 1)
    return (x * visible).sum(1) / count.astype(x.dtype)
