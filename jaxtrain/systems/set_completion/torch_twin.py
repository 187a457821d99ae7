"""The same networks in plain torch: they load an exported state dict with strict=True."""

import torch
from torch import nn
from torch.nn import functional

from jaxtrain.systems.set_completion.torch_buffer import ActivationBuffer


def feedforward(width):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class MultiheadAttentionBlock(nn.Module):
    def __init__(self, embed_dim, num_heads, use_layer_norm=False, dropout=0.0):
        super().__init__()
        self.mha = nn.MultiheadAttention(embed_dim, num_heads, dropout=dropout, batch_first=True)
        self.feedforward = feedforward(embed_dim)
        self.use_layer_norm = use_layer_norm
        if use_layer_norm:
            self.layer_norm1 = nn.LayerNorm(embed_dim)
            self.layer_norm2 = nn.LayerNorm(embed_dim)

    def forward(self, query, key, mask=None):
        x = query + self.mha(query, key, key, key_padding_mask=mask, need_weights=False)[0]
        x = self.layer_norm1(x) if self.use_layer_norm else x
        x = x + self.feedforward(x)
        return self.layer_norm2(x) if self.use_layer_norm else x


class SelfAttentionBlock(nn.Module):
    def __init__(self, embed_dim, num_heads, use_layer_norm=False, dropout=0.0):
        super().__init__()
        self.mab = MultiheadAttentionBlock(embed_dim, num_heads, use_layer_norm, dropout)

    def forward(self, x, mask=None):
        return self.mab(x, x, mask)


class InducedSetAttentionBlock(nn.Module):
    def __init__(self, embed_dim, num_heads, num_inducing_points, use_layer_norm=False, dropout=0.0):
        super().__init__()
        self.inducing_points = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_inducing_points, embed_dim)))
        self.mab1 = MultiheadAttentionBlock(embed_dim, num_heads, use_layer_norm, dropout)
        self.mab2 = MultiheadAttentionBlock(embed_dim, num_heads, use_layer_norm, dropout)
        self.layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x, mask=None):
        induced = self.mab1(self.inducing_points.expand(len(x), -1, -1), x, mask)
        return self.layer_norm(self.mab2(x, induced) + x)


class PoolingMultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, num_seeds, use_layer_norm=False, dropout=0.0):
        super().__init__()
        self.seed_vectors = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_seeds, embed_dim)))
        self.mab = MultiheadAttentionBlock(embed_dim, num_heads, use_layer_norm, dropout)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, mask=None):
        return self.out_proj(self.mab(self.seed_vectors.expand(len(x), -1, -1), x, mask))


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
        options = (use_layer_norm, dropout)
        self.input_proj = nn.Linear(input_dim, embed_dim) if input_dim != embed_dim else nn.Identity()
        self.enc_layer1 = InducedSetAttentionBlock(embed_dim, num_heads, num_inducing_points, *options)
        self.enc_layer2 = InducedSetAttentionBlock(embed_dim, num_heads, num_inducing_points, *options)
        self.dec_layer1 = PoolingMultiheadAttention(embed_dim, num_heads, num_seeds, *options)
        self.dec_layer2 = SelfAttentionBlock(embed_dim, num_heads, *options)
        self.dec_layer3 = SelfAttentionBlock(embed_dim, num_heads, *options)

    def forward(self, x, mask=None):
        x = self.input_proj(x)
        x = self.enc_layer1(x, mask) + x
        x = self.enc_layer2(x, mask) + x
        x = self.dec_layer1(x, mask)
        x = self.dec_layer2(x) + x
        return self.dec_layer3(x) + x


class SetTransformerLayer(nn.Module):
    def __init__(self, embed_dim, num_heads, num_inducing_points, use_layer_norm=True, dropout=0.1):
        super().__init__()
        points = num_inducing_points
        self.set_transformer = SetTransformer(embed_dim, points, embed_dim, num_heads, points, use_layer_norm, dropout)
        self.cross_attention = MultiheadAttentionBlock(embed_dim, num_heads, use_layer_norm, dropout)
        self.feedforward = feedforward(embed_dim)
        self.use_layer_norm = use_layer_norm
        if use_layer_norm:
            self.layer_norm1 = nn.LayerNorm(embed_dim)
            self.layer_norm2 = nn.LayerNorm(embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask=None):
        x = x + self.dropout(self.cross_attention(x, self.set_transformer(x, mask)))
        x = self.layer_norm1(x) if self.use_layer_norm else x
        x = x + self.dropout(self.feedforward(x))
        return self.layer_norm2(x) if self.use_layer_norm else x


class SetCompletionModel(nn.Module):
    """Takes the arguments that model_params.json holds."""

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
        self.ability_embedding = nn.Embedding(vocab_size, embedding_dim, padding_idx=pad_token_id)
        self.weapon_embedding = nn.Embedding(weapon_vocab_size, embedding_dim)
        self.input_proj = nn.Linear(embedding_dim, hidden_dim) if embedding_dim != hidden_dim else nn.Identity()
        self.transformer_layers = nn.ModuleList(
            SetTransformerLayer(hidden_dim, num_heads, num_inducing_points, use_layer_norm, dropout)
            for _ in range(num_layers)
        )
        self.output_layer = nn.Linear(hidden_dim, output_dim)

    def pooled(self, ability_tokens, weapon_token, key_padding_mask=None):
        if key_padding_mask is None:
            key_padding_mask = torch.zeros_like(ability_tokens, dtype=torch.bool)
        x = self.ability_embedding(ability_tokens) + self.weapon_embedding(weapon_token.reshape(-1, 1))
        x = self.input_proj(x)
        for layer in self.transformer_layers:
            x = layer(x, key_padding_mask)
        visible = (~key_padding_mask).unsqueeze(-1)
        return (x * visible).sum(1) / visible.sum(1).clamp(min=1)

    def forward(self, ability_tokens, weapon_token, key_padding_mask=None):
        return self.output_layer(self.pooled(ability_tokens, weapon_token, key_padding_mask))


class SparseAutoencoder(nn.Module):
    def __init__(self, input_dim, expansion_factor=8, train_decoder=False, top_k=0):
        super().__init__()
        hidden_dim = int(input_dim * expansion_factor)
        self.decoder_bias = nn.Parameter(torch.zeros(input_dim))
        self.register_buffer("usage_ema", torch.zeros(hidden_dim))
        self.encoder = nn.Linear(input_dim, hidden_dim)
        self.decoder = nn.Linear(hidden_dim, input_dim)
        for layer in (self.encoder, self.decoder):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(self.encoder.bias)
        self.train_decoder, self.top_k = train_decoder, top_k
        self.normalize_decoder()

    @torch.no_grad()
    def normalize_decoder(self):
        self.decoder.weight.copy_(functional.normalize(self.decoder.weight, dim=0))

    def directions(self):
        weight = self.decoder.weight if self.train_decoder else self.decoder.weight.detach()
        return functional.normalize(weight, dim=0)

    def encode(self, x):
        h_pre = self.encoder(x - self.decoder_bias)
        h = functional.relu(h_pre).clamp(0, 6)
        if self.top_k:
            h = torch.where(h >= h.topk(self.top_k, dim=-1).values[..., -1:], h, 0.0)
        return h_pre, h

    def decode(self, h):
        return h @ self.directions().T + self.decoder_bias

    def forward(self, x):
        h = self.encode(x)[1]
        return self.decode(h), h


class FeatureModel(nn.Module):
    """The frozen model and the autoencoder on its pooled vectors: what the `sae` task exports.

    recent: the pooled vectors of the last batches, for training only.
    """

    def __init__(self, primary, sae, recent):
        super().__init__()
        self.primary, self.sae, self.recent = primary, sae, recent

    def train(self, mode=True):
        super().train(mode)
        self.primary.eval()  # it is frozen, and drops nothing
        return self


def build(config):
    return SetCompletionModel(**config.model.arguments())


def build_features(config):
    settings = config.sae
    trained = settings.train_decoder and config.compat != "original"
    sae = SparseAutoencoder(config.model.hidden_dim, settings.expansion_factor, trained, settings.top_k)
    return FeatureModel(build(config), sae, ActivationBuffer(settings.buffer_size, device=None))


def inputs_of(module, batch):
    """Token ids, weapons and the padding mask of a batch as the trainer has it (-1 and <PAD> are padding)."""
    ids = (batch["inputs"] if "inputs" in batch else batch["targets"]).long()
    pad = module.ability_embedding.padding_idx
    hidden = (ids < 0) | (ids == pad) if pad is not None else ids < 0
    empty = hidden.all(1)
    hidden[:, 0] &= ~empty  # a row of padding alone is computed on a made-up token and counts nowhere
    return torch.where(ids < 0, pad or 0, ids), batch["weapon"].long(), hidden, ~empty


def call(module, batch):
    tokens, weapon, hidden, _ = inputs_of(module, batch)
    pooled = module.pooled(tokens, weapon, hidden)
    return {"logits": module.output_layer(pooled), "pooled": pooled}


def multi_hot(ids, size, pad):
    """float [batch, size]; -1 and `pad` count nowhere."""
    ids = ids.long()
    kept = (ids >= 0) & (ids != pad) if pad is not None else ids >= 0
    target = torch.zeros(len(ids), size, device=ids.device)
    return target.scatter_add_(1, ids.clamp(min=0), kept.float()).clamp_(max=1)


def as_evaluated(module, batch, config):
    """In evaluation, a batch that hides nothing yet (of the training split) is masked as `losses.visible_ids` does."""
    if module.training or "inputs" in batch:
        return batch
    from jaxtrain.systems.set_completion.losses import visible_ids

    ids = visible_ids({name: batch[name].cpu().numpy() for name in ("targets", "index")}, config, None)
    return {**batch, "inputs": torch.tensor(ids.tolist(), device=batch["targets"].device)}


def loss(module, batch, config):
    tokens, weapon, hidden, present = inputs_of(module, as_evaluated(module, batch, config))
    logits = module(tokens, weapon, hidden)
    target = multi_hot(batch["targets"], logits.shape[1], config.model.padding)
    rows = functional.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1)
    counted = present & batch["valid"]
    return rows[counted].mean()


def call_features(module, batch):
    tokens, weapon, hidden, _ = inputs_of(module.primary, batch)
    pooled = module.primary.pooled(tokens, weapon, hidden)
    reconstruction, h = module.sae(pooled)
    output_layer = module.primary.output_layer
    return {
        "pooled": pooled,
        "reconstruction": reconstruction,
        "features": h,
        "logits": output_layer(pooled),
        "reconstructed_logits": output_layer(reconstruction),
    }


def loss_features(module, batch, config):
    """Evaluation: the loss on the batch's own pooled vectors. Training: on rows of the buffer that they go into, and 0
    until it holds sae.steps_before_train; the usage average moves. Coefficients are those that the schedules end at."""
    settings, sae = config.sae, module.sae
    with torch.no_grad():
        tokens, weapon, hidden, present = inputs_of(module.primary, as_evaluated(module, batch, config))
        x = module.primary.pooled(tokens, weapon, hidden)[present & batch["valid"]]
    if module.training:
        module.recent.add(x)
        if len(module.recent) < settings.steps_before_train:
            return 0.0 * sae.encoder.bias.sum()
        x = module.recent.sample(settings.batch_size)
    reconstruction, h = sae(x)
    if module.training:
        sae.usage_ema.lerp_((h > 0).float().mean(0).detach(), 0.01)
    rho, p = settings.target_usage, sae.usage_ema.clamp(1e-7, 1 - 1e-7)
    usage = (rho * torch.log(rho / p) + (1 - rho) * torch.log((1 - rho) / (1 - p))).mean()
    mse = (reconstruction - x).square().mean()
    return mse + settings.l1_coefficient * h.abs().sum(1).mean() + settings.usage_coefficient * usage


def after_update_features(module, updates, config):
    """Unit columns again. Dead features are not resampled here."""
    module.sae.normalize_decoder()
