"""The set completion model: visible tokens of a build and a weapon -> a logit for every token of the full build."""

import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.systems.set_completion.blocks import SetTransformerLayer


class SetCompletionModel(nnx.Module):
    """Embeddings, set transformer layers, a masked mean over the tokens, and a linear read-out.

    Parameters have the names and shapes of the original's state dict. `pooled` [batch, hidden_dim], the input of
    `output_layer`, is what a sparse autoencoder is trained on.
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
        """Logits [batch, output_dim] of int tokens [batch, token] and weapon int [batch, 1] or [batch].

        key_padding_mask: bool [batch, token], True = not there; all tokens count if left out. The result depends on
        neither the order of the tokens nor the amount of padding. A row of padding alone is NaN; no columns at all
        give `output_layer.bias`.
        """
        return self.output_layer(self.pooled(ability_tokens, weapon_token, key_padding_mask, rngs))

    def pooled(self, ability_tokens, weapon_token, key_padding_mask=None, rngs=None):
        """The mean over the visible tokens, [batch, hidden_dim]; arguments as for the call."""
        x, mask = self.encode(ability_tokens, weapon_token, key_padding_mask, rngs)
        return masked_mean(x, mask)

    def encode(self, ability_tokens, weapon_token, key_padding_mask=None, rngs=None):
        """Hidden vectors of the tokens [batch, token, hidden_dim] and the mask used."""
        mask = jnp.zeros(ability_tokens.shape, bool) if key_padding_mask is None else key_padding_mask
        x = self.embed(ability_tokens, weapon_token)
        if ability_tokens.shape[1]:
            for layer in self.transformer_layers:
                x = nn.block(layer, x, mask, rngs=rngs)
        return x, mask

    def embed(self, ability_tokens, weapon_token):
        """[batch, token, hidden_dim]: token and weapon embeddings added, projected."""
        weapon = self.weapon_embedding(weapon_token.reshape(-1, 1))
        return self.input_proj(self.ability_embedding(ability_tokens) + weapon)


def masked_mean(x, key_padding_mask):
    """Mean of x [batch, token, width] over the tokens that are not padding; 0 where all are."""
    visible = ~key_padding_mask[..., None]
    count = jnp.maximum(visible.sum(1), 1)
    return (x * visible).sum(1) / count.astype(x.dtype)
