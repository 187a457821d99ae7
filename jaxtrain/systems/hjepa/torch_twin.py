"""H-JEPA and the world model in plain torch; both load exported state dicts with strict=True."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from jaxtrain.errors import UserError
from jaxtrain.nn.vit import INIT_STD, overrides, vit_size
from jaxtrain.systems.hjepa import device_images, device_masks
from jaxtrain.systems.hjepa.losses import jepa_options, level_weights
from jaxtrain.systems.hjepa.pretraining import momentum
from jaxtrain.systems.hjepa.torch_vit import DropPath, Encoder
from jaxtrain.systems.hjepa.views import sample_keys


class PredictorBlock(nn.Module):
    """Pre-norm transformer block. drop_path: rate of samples whose branch is dropped in training."""

    def __init__(self, embed_dim, num_heads=12, mlp_ratio=4.0, dropout=0.0, drop_path=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(embed_dim)
        self.attn = nn.MultiheadAttention(embed_dim, num_heads, dropout, batch_first=True)
        self.norm2 = nn.LayerNorm(embed_dim)
        self.mlp = mlp(embed_dim, int(embed_dim * mlp_ratio), dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.drop_path(self.attn(y, y, y, need_weights=False)[0])
        return x + self.drop_path(self.mlp(self.norm2(x)))


def mlp(width, hidden, dropout):
    layers = (nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width), nn.Dropout(dropout))
    return nn.Sequential(*layers)


class Predictor(nn.Module):
    def __init__(self, width, depth, num_heads, mlp_ratio, drop_path_rate, dropout=0.0):
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed_predictor = nn.Parameter(torch.zeros(1, 1, width))
        rates = [drop_path_rate * i / max(1, depth - 1) for i in range(depth)]
        self.blocks = nn.ModuleList(PredictorBlock(width, num_heads, mlp_ratio, dropout, rate) for rate in rates)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, width)

    def forward(self, context, indices, positions=None):
        if positions is None:
            tokens = (self.mask_token + self.pos_embed_predictor).expand(*indices.shape, -1)
        else:
            tokens = self.mask_token + positions[0][indices]
        x = torch.cat([context, tokens], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, context.shape[1] :]))


class TokenBatchNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.bn = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.bn(x.reshape(-1, x.shape[-1])).reshape(x.shape)


NORMS = {"layernorm": lambda w: [nn.LayerNorm(w)], "batchnorm": lambda w: [TokenBatchNorm(w)], "none": lambda w: []}


def pool(x, level):
    return functional.avg_pool1d(x.transpose(1, 2), 1 << level, 1 << level).transpose(1, 2) if level else x


class HJEPA(nn.Module):
    """H-JEPA built from a run's config. Methods correspond to those of `jaxtrain.systems.hjepa.model.HJEPA`."""

    def __init__(self, config):
        super().__init__()
        model = config.model
        size = vit_size(model.encoder_type, **overrides(model.vit))
        width, levels = size.embed_dim, model.num_hierarchies
        options = {
            "drop_path": model.drop_path_rate,
            "rope_theta": model.rope.theta if model.rope.use_rope else None,
            "layerscale_init": model.layerscale.init_value if model.layerscale.use_layerscale else None,
        }
        self.context_encoder = self._new_encoder("context", config, size, options)
        if model.use_target_encoder:
            self.target_encoder = self._new_encoder("target", config, size, options)
            self.target_encoder.requires_grad_(False)
        self.predictor = self._new_predictor(width, model)
        fpn_width = (model.fpn.feature_dim or width) if model.fpn.use_fpn else width
        self.hierarchy_projections = nn.ModuleList(
            nn.Sequential(nn.Linear(fpn_width, width), *NORMS[model.projection_norm](width)) for _ in range(levels)
        )
        self.has_target, self.use_fpn, self.levels = model.use_target_encoder, model.fpn.use_fpn, levels
        self.concat, self.drop_masked = model.fpn.fusion_method == "concat", model.drop_masked
        if self.use_fpn:
            pair = lambda a, b: nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b))
            self.fpn_lateral_convs = nn.ModuleList(pair(width, fpn_width) for _ in range(levels))
            self.fpn_top_down_convs = nn.ModuleList(pair(fpn_width, fpn_width) for _ in range(levels - 1))
            if self.concat:
                self.fpn_fusion_convs = nn.ModuleList(pair(2 * fpn_width, fpn_width) for _ in range(levels - 1))

    def _new_encoder(self, role, config, size, options):
        """Return a new encoder; subclasses override this. role: "context" or "target"."""
        return Encoder(config.data.image_size, size, **options)

    def _new_predictor(self, width, model):
        predictor = model.predictor
        return Predictor(width, predictor.depth, predictor.num_heads, predictor.mlp_ratio, model.drop_path_rate)

    def forward(self, images, mask, places=None):
        """Return predictions and targets (per level), context tokens and target tokens.

        mask: bool [batch, patch], with the same count in every row. places: `places_of(mask)`, if that is known; the
        call is then pure torch, without a read of the count.
        """
        indices, keep = places_of(mask) if places is None else places
        context = self.context_encoder(images, keep=keep) if self.drop_masked else self.context_encoder(images, mask)
        targets = self.encode_target(images)
        positions = self.context_encoder.vit.pos_embed[:, 1:]
        predicted = self.predictor(context[:, 1:], indices, positions)
        masked_targets = targets[:, 1:].gather(1, indices[..., None].expand(-1, -1, targets.shape[-1]))
        return self.project(predicted), self.project(masked_targets), context, targets

    def encode_target(self, images):
        if not self.has_target:
            return self.context_encoder(images)
        with torch.no_grad():
            return self.target_encoder(images)

    def project(self, tokens):
        if self.use_fpn:
            return [p(x) for p, x in zip(self.hierarchy_projections, self.pyramid(tokens), strict=True)]
        return [pool(projection(tokens), level) for level, projection in enumerate(self.hierarchy_projections)]

    def pyramid(self, tokens):
        levels = [self.fpn_lateral_convs[level](pool(tokens, level)) for level in range(self.levels)]
        merged = [levels[-1]]
        for level in range(self.levels - 2, -1, -1):
            fine, coarse = levels[level], merged[0]
            if fine.shape[1] != coarse.shape[1]:
                coarse = functional.interpolate(coarse.transpose(1, 2), size=fine.shape[1], mode="linear").transpose(
                    1, 2
                )
            coarse = self.fpn_top_down_convs[level](coarse)
            if self.concat:
                merged.insert(0, functional.relu(self.fpn_fusion_convs[level](torch.cat([fine, coarse], dim=-1))))
            else:
                merged.insert(0, fine + coarse)
        return merged

    def extract_features(self, images, level=0):
        return self.level_features(self.encode_target(images)[:, 1:], level)

    def level_features(self, tokens, level):
        """Return a level's features [batch, patch // 2^level, width] from an encoder's tokens of all patches."""
        if self.use_fpn:
            return self.hierarchy_projections[level](self.pyramid(tokens)[level])
        return pool(self.hierarchy_projections[level](tokens), level)


class FrameEncoder(nn.Module):
    def __init__(self, img_size, size, norm, layerscale_init=None, drop_path=0.0):
        super().__init__()
        self.encoder = Encoder(img_size, size, drop_path=drop_path, layerscale_init=layerscale_init)
        self.projector = nn.Sequential(nn.Linear(size.embed_dim, size.embed_dim), *NORMS[norm](size.embed_dim))

    def forward(self, images):
        return self.projector(self.encoder(images)[:, 0])


class AdaLNZeroBlock(nn.Module):
    """Transformer block whose norms and branches an embedded action scales and shifts; at first it passes x through.

    attn_mask: as of nn.MultiheadAttention. Source: Peebles & Xie 2023 (DiT, adaLN-Zero).
    """

    def __init__(self, embed_dim, num_heads, action_embed_dim, mlp_ratio=4.0, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(embed_dim, elementwise_affine=False) for _ in range(2))
        self.attn = nn.MultiheadAttention(embed_dim, num_heads, dropout, batch_first=True)
        self.mlp = mlp(embed_dim, int(embed_dim * mlp_ratio), dropout)
        self.modulation = nn.Linear(action_embed_dim, 6 * embed_dim)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x, action_emb, attn_mask=None):
        scale1, shift1, gate1, scale2, shift2, gate2 = self.modulation(action_emb).chunk(6, dim=-1)
        h = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attn(h, h, h, attn_mask=attn_mask, need_weights=False)[0]
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class ActionPredictor(nn.Module):
    """Predict each step's next embedding from embeddings [batch, step, width] and actions [batch, step, action]."""

    def __init__(
        self,
        embed_dim,
        action_dim,
        depth=6,
        num_heads=16,
        mlp_ratio=4.0,
        dropout=0.1,
        action_embed_dim=None,
        max_seq_len=256,
    ):
        """action_embed_dim: width of an embedded action; embed_dim if left out."""
        super().__init__()
        width, action_width = embed_dim, action_embed_dim or embed_dim
        self.embed_dim, self.action_dim, self.depth, self.max_seq_len = embed_dim, action_dim, depth, max_seq_len
        self.pos_embed = nn.Parameter(torch.zeros(1, max_seq_len, width))
        nn.init.trunc_normal_(self.pos_embed, std=INIT_STD)
        self.action_embed = nn.Sequential(
            nn.Linear(action_dim, action_width), nn.SiLU(), nn.Linear(action_width, action_width)
        )
        self.blocks = nn.ModuleList(
            AdaLNZeroBlock(width, num_heads, action_width, mlp_ratio, dropout) for _ in range(depth)
        )
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, width)

    def forward(self, embeddings, actions):
        if embeddings.ndim != 3 or actions.ndim != 3 or embeddings.shape[:2] != actions.shape[:2]:
            shapes = f"embeddings {list(embeddings.shape)} and actions {list(actions.shape)}"
            raise UserError(f"{shapes}: wanted [batch, step, width] and [batch, step, action] of equal batch and step")
        if embeddings.shape[1] > self.pos_embed.shape[1]:
            raise UserError(f"{embeddings.shape[1]} steps are more than max_seq_len={self.pos_embed.shape[1]}")
        x = embeddings + self.pos_embed[:, : embeddings.shape[1]]
        action = self.action_embed(actions)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        for block in self.blocks:
            x = block(x, action, later)
        return self.head(self.final_norm(x))


class LeWorldModel(nn.Module):
    """World model: frames [batch, step, channel, S, S], actions [batch, step, action] -> embeddings and predictions."""

    def __init__(self, config):
        super().__init__()
        model = config.model
        size = vit_size(model.encoder_type, **overrides(model.vit))
        scale = model.layerscale.init_value if model.layerscale.use_layerscale else None
        self.frame_encoder = FrameEncoder(config.data.image_size, size, model.projection_norm, scale)
        self.action_predictor = ActionPredictor(
            size.embed_dim,
            model.action_dim,
            model.predictor_depth,
            model.predictor_num_heads,
            model.predictor_mlp_ratio,
            model.predictor_dropout,
            max_seq_len=model.predictor_max_seq_len,
        )

    def forward(self, frames, actions):
        batch, steps = frames.shape[:2]
        embeddings = self.frame_encoder(frames.flatten(0, 1)).reshape(batch, steps, -1)
        return embeddings, self.action_predictor(embeddings, actions)


def call(module, batch):
    """Return features [batch, width], as the task's `outputs` does."""
    size = module.context_encoder.vit.grid * module.context_encoder.vit.size.patch_size
    return {"features": module.extract_features(prepared(batch["image"], size)).mean(1)}


def inputs(batch, config):
    """Prepare the images of a batch's valid rows, and draw their masks, as the step does in evaluation."""
    valid = batch["valid"].bool()
    images, mask = prepared(batch["image"], config.data.image_size)[valid], masks(batch, config)[valid]
    return {"image": images, "mask": mask, "places": places_of(mask)}


def places_of(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of the masked and of the other patches, int64 [batch, patch], from bool [batch, patch]."""
    count = int(mask[0].sum())
    masked = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count]
    return masked, mask.to(torch.uint8).argsort(dim=1, stable=True)[:, : mask.shape[1] - count]


def prepared(images: torch.Tensor, size: int) -> torch.Tensor:
    """Return uint8 images as the evaluation transform leaves them, and float images unchanged."""
    if images.dtype != torch.uint8:
        return images
    return torch.from_numpy(np.array(_prepare(size)(images.cpu().numpy()))).to(images.device)


@functools.lru_cache(maxsize=4)
def _prepare(size: int):
    return jax.jit(lambda images: device_images.prepare(images, size))


def loss(module, batch, config) -> torch.Tensor:
    """Return a pure H-JEPA loss (mse, smoothl1, huber, hjepa) on the masks that JAX draws for evaluating this batch."""
    batch = batch if "places" in batch else inputs(batch, config)
    images = batch["image"]
    predictions, targets, _, _ = module(images, batch["mask"], batch["places"])
    options = jepa_options(config.loss)
    weights = level_weights(options["hierarchy_weights"], len(predictions))
    distance = {
        "mse": functional.mse_loss,
        "smoothl1": functional.smooth_l1_loss,
        "huber": functools.partial(functional.huber_loss, delta=options["huber_delta"]),
    }[options["loss_type"]]
    total = torch.zeros((), device=images.device)
    for weight, prediction, target in zip(weights, predictions, targets, strict=True):
        target = target.detach() if options["detach_targets"] else target
        if options["normalize_embeddings"]:
            prediction, target = (functional.normalize(x, dim=-1, eps=1e-8) for x in (prediction, target))
        total = total + weight * distance(prediction, target)
    return total


@torch.no_grad()
def after_update(module, updates: int, config) -> None:
    """Move the target encoder towards the context encoder."""
    rate = float(momentum(config, updates - 1))
    target, context = (list(encoder.parameters()) for encoder in (module.target_encoder, module.context_encoder))
    torch._foreach_lerp_(target, context, 1 - rate)


def masks(batch, config) -> torch.Tensor:
    """Return the loader's masks, or those that the step draws in evaluation mode: bool [batch, patch]."""
    if "mask" in batch:
        return batch["mask"]
    drawn = _draw(config)(jnp.asarray(batch["index"].cpu().numpy()))
    return torch.from_numpy(np.array(drawn)).to(batch["index"].device)


def _draw(config):
    masking = config.masking
    grid = config.data.image_size // vit_size(config.model.encoder_type, **overrides(config.model.vit)).patch_size
    blocks = device_masks.blocks_of(masking)
    count = device_masks.fixed_count(grid, blocks, masking.ratio)

    def draw(index):
        return device_masks.draw(sample_keys(index, None, config.seed)[1], grid, blocks, count)

    return draw


def call_world_model(module, batch):
    embeddings, predictions = module(batch["frames"], batch["actions"])
    return {"embeddings": embeddings, "predictions": predictions}
