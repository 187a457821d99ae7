"""Set transformer in plain torch: for scripts of the original, for deployment, and as the torch baseline."""

import pathlib
from typing import Any

import torch
from torch import nn


def feedforward(width):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class MultiheadAttentionBlock(nn.Module):
    def __init__(self, embed_dim, num_heads, use_layer_norm=False, dropout=0.0):
        super().__init__()
        self.mha = nn.MultiheadAttention(embed_dim, num_heads, dropout=dropout, batch_first=True)
        self.feedforward = feedforward(embed_dim)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.use_layer_norm, self.dropout = use_layer_norm, dropout
        if use_layer_norm:
            self.layer_norm1 = nn.LayerNorm(embed_dim)
            self.layer_norm2 = nn.LayerNorm(embed_dim)

    def forward(self, query, key, key_padding_mask=None):
        empty = key.shape[1] == 0  # torch handles empty keys only with need_weights=True
        x = query + self.mha(query, key, key, key_padding_mask=key_padding_mask, need_weights=empty)[0]
        x = self.layer_norm1(x) if self.use_layer_norm else x
        x = x + self.feedforward(x)
        return self.layer_norm2(x) if self.use_layer_norm else x


class SelfAttentionBlock(nn.Module):
    def __init__(self, embed_dim, num_heads, use_layer_norm=False, dropout=0.0):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.use_layer_norm, self.dropout = use_layer_norm, dropout
        self.mab = MultiheadAttentionBlock(embed_dim, num_heads, use_layer_norm, dropout)

    def forward(self, x, key_padding_mask=None):
        return self.mab(x, x, key_padding_mask)


class InducedSetAttentionBlock(nn.Module):
    def __init__(self, embed_dim, num_heads, num_inducing_points, use_layer_norm=False, dropout=0.0):
        super().__init__()
        self.embed_dim, self.num_heads, self.num_inducing_points = embed_dim, num_heads, num_inducing_points
        self.use_layer_norm, self.dropout = use_layer_norm, dropout
        self.inducing_points = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_inducing_points, embed_dim)))
        self.mab1 = MultiheadAttentionBlock(embed_dim, num_heads, use_layer_norm, dropout)
        self.mab2 = MultiheadAttentionBlock(embed_dim, num_heads, use_layer_norm, dropout)
        self.layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x, key_padding_mask=None):
        induced = self.mab1(self.inducing_points.expand(len(x), -1, -1), x, key_padding_mask)
        return self.layer_norm(self.mab2(x, induced) + x)


class PoolingMultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, num_seeds, use_layer_norm=False, dropout=0.0):
        super().__init__()
        self.embed_dim, self.num_heads, self.num_seeds = embed_dim, num_heads, num_seeds
        self.use_layer_norm, self.dropout = use_layer_norm, dropout
        self.seed_vectors = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_seeds, embed_dim)))
        self.mab = MultiheadAttentionBlock(embed_dim, num_heads, use_layer_norm, dropout)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, key_padding_mask=None):
        return self.out_proj(self.mab(self.seed_vectors.expand(len(x), -1, -1), x, key_padding_mask))


class SetTransformer(nn.Module):
    def __init__(
        self,
        input_dim,
        num_seeds,
        embed_dim=128,
        num_heads=4,
        num_inducing_points=32,
        use_layer_norm=False,
        dropout=0.0,
    ):
        super().__init__()
        self.input_dim, self.num_seeds, self.embed_dim = input_dim, num_seeds, embed_dim
        self.num_heads, self.num_inducing_points = num_heads, num_inducing_points
        self.use_layer_norm, self.dropout = options = use_layer_norm, dropout
        self.input_proj = nn.Linear(input_dim, embed_dim) if input_dim != embed_dim else nn.Identity()
        self.enc_layer1 = InducedSetAttentionBlock(embed_dim, num_heads, num_inducing_points, *options)
        self.enc_layer2 = InducedSetAttentionBlock(embed_dim, num_heads, num_inducing_points, *options)
        self.dec_layer1 = PoolingMultiheadAttention(embed_dim, num_heads, num_seeds, *options)
        self.dec_layer2 = SelfAttentionBlock(embed_dim, num_heads, *options)
        self.dec_layer3 = SelfAttentionBlock(embed_dim, num_heads, *options)

    def forward(self, x, key_padding_mask=None):
        x = self.input_proj(x)
        x = self.enc_layer1(x, key_padding_mask) + x
        x = self.enc_layer2(x, key_padding_mask) + x
        x = self.dec_layer1(x, key_padding_mask)
        x = self.dec_layer2(x) + x
        return self.dec_layer3(x) + x


class SetTransformerLayer(nn.Module):
    def __init__(self, embed_dim, num_heads, num_inducing_points, use_layer_norm=True, dropout=0.1):
        super().__init__()
        self.embed_dim, self.num_heads, self.num_inducing_points = embed_dim, num_heads, num_inducing_points
        points = num_inducing_points
        self.set_transformer = SetTransformer(embed_dim, points, embed_dim, num_heads, points, use_layer_norm, dropout)
        self.cross_attention = MultiheadAttentionBlock(embed_dim, num_heads, use_layer_norm, dropout)
        self.feedforward = feedforward(embed_dim)
        self.use_layer_norm = use_layer_norm
        if use_layer_norm:
            self.layer_norm1 = nn.LayerNorm(embed_dim)
            self.layer_norm2 = nn.LayerNorm(embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, key_padding_mask=None):
        x = x + self.dropout(self.cross_attention(x, self.set_transformer(x, key_padding_mask)))
        x = self.layer_norm1(x) if self.use_layer_norm else x
        x = x + self.dropout(self.feedforward(x))
        return self.layer_norm2(x) if self.use_layer_norm else x


class SetCompletionModel(nn.Module):
    """Model that maps part of a build and the weapon to logits of every token of the full build.

    The arguments are those in model_params.json; they are attributes too. Call it with (ability_tokens int [batch,
    token], weapon_token int [batch, 1], key_padding_mask bool [batch, token], True = padding).
    """

    def __init__(
        self,
        vocab_size,
        weapon_vocab_size,
        embedding_dim,
        hidden_dim,
        output_dim,
        num_layers=2,
        num_heads=4,
        num_inducing_points=32,
        use_layer_norm=False,
        dropout=0.0,
        pad_token_id=None,
    ):
        super().__init__()
        self.vocab_size, self.weapon_vocab_size = vocab_size, weapon_vocab_size
        self.embedding_dim, self.hidden_dim, self.output_dim = embedding_dim, hidden_dim, output_dim
        self.num_layers, self.num_heads, self.num_inducing_points = num_layers, num_heads, num_inducing_points
        self.use_layer_norm, self.dropout, self.pad_token_id = use_layer_norm, dropout, pad_token_id
        self.ability_embedding = nn.Embedding(vocab_size, embedding_dim, padding_idx=pad_token_id)
        self.weapon_embedding = nn.Embedding(weapon_vocab_size, embedding_dim)
        self.input_proj = nn.Linear(embedding_dim, hidden_dim) if embedding_dim != hidden_dim else nn.Identity()
        self.transformer_layers = nn.ModuleList(
            SetTransformerLayer(hidden_dim, num_heads, num_inducing_points, use_layer_norm, dropout)
            for _ in range(num_layers)
        )
        self.output_layer = nn.Linear(hidden_dim, output_dim)

    def pooled(self, ability_tokens, weapon_token, key_padding_mask=None):
        """Return the input of output_layer, [batch, hidden_dim]; the sparse autoencoder is trained on it."""
        if key_padding_mask is None:
            key_padding_mask = torch.zeros_like(ability_tokens, dtype=torch.bool)
        x = self.ability_embedding(ability_tokens) + self.weapon_embedding(weapon_token.reshape(-1, 1))
        x = self.input_proj(x)
        for layer in self.transformer_layers:
            x = layer(x, key_padding_mask)
        return self.masked_mean(x, key_padding_mask)

    def masked_mean(self, x, key_padding_mask):
        """Return the mean of x [batch, token, width] over the real tokens, [batch, width]; 0 for a row of padding."""
        visible = (~key_padding_mask).unsqueeze(-1)
        return (x * visible).sum(1) / visible.sum(1).clamp(min=1)

    def forward(self, ability_tokens, weapon_token, key_padding_mask=None):
        return self.output_layer(self.pooled(ability_tokens, weapon_token, key_padding_mask))

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: str | pathlib.Path, **model_args: Any) -> "SetCompletionModel":
        """Return a model of these arguments with a file's weights, without DDP prefixes.

        The file holds a state dict, or a dict with `model_state_dict`. Raises RuntimeError, as torch does, if the
        weights do not fit.
        """
        from torch_bridge.state_dict import convert_ddp_state

        state = torch.load(checkpoint_path, map_location="cpu", weights_only=True)
        model = cls(**model_args)
        model.load_state_dict(convert_ddp_state(state.get("model_state_dict", state)))
        return model
