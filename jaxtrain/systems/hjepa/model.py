"""H-JEPA: a context encoder, a target encoder (its moving average), a predictor, and 1 to 4 hierarchy levels.

Source: Assran et al. 2023 (I-JEPA), with pooled hierarchy levels. State-dict keys and numerics are those of the torch
original (docs/hjepa.md lists them).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.nn import Activation, Dropout, DropPath, LayerNorm, Linear, MultiheadAttention, Sequential, gelu
from jaxtrain.nn.initializers import normal
from jaxtrain.nn.rows import rows
from jaxtrain.nn.vit import INIT_STD, Encoder, call_block, reset_linear_and_norm, vit_size
from jaxtrain.systems.hjepa.pyramid import FeaturePyramid, Projection, keep_of
from jaxtrain.systems.hjepa.tokens import Masked, gather, pool, pooled_validity


def mlp(width: int, hidden: int, dropout: float, rngs: nnx.Rngs) -> Sequential:
    """Return Linear, exact GELU, dropout, Linear, dropout; the Linear layers have the keys 0 and 3."""
    return Sequential(
        Linear(width, hidden, rngs=rngs),
        Activation(gelu),
        Dropout(dropout),
        Linear(hidden, width, rngs=rngs),
        Dropout(dropout),
    )


class PredictorBlock(nnx.Module):
    """Pre-norm block around torch's MultiheadAttention."""

    def __init__(
        self, width: int, num_heads: int, mlp_ratio: float, dropout: float, drop_path: float, *, rngs: nnx.Rngs
    ):
        self.norm1 = LayerNorm(width)
        self.attn = MultiheadAttention(width, num_heads, dropout, rngs=rngs)
        self.norm2 = LayerNorm(width)
        self.mlp = mlp(width, int(width * mlp_ratio), dropout, rngs)
        self.drop_path = DropPath(drop_path)

    def __call__(self, x, lengths=None, rngs=None):
        """lengths: int [batch], the number of leading tokens that may be attended to; None: all."""
        x = x + self.drop_path(self.attn(self.norm1(x), lengths=lengths, rngs=rngs), rngs)
        return x + self.drop_path(self.mlp(self.norm2(x), rngs=rngs), rngs)


class Predictor(nnx.Module):
    """Predict features [batch, masked, width] of masked patches from context tokens [batch, context, width].

    The input token of a masked patch is `mask_token` plus the encoder's position embedding of that patch, or plus
    `pos_embed_predictor` if no positions are given.
    """

    def __init__(
        self,
        embed_dim: int,
        depth: int = 6,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path_rate: float = 0.0,
        checkpointing: bool = False,
        *,
        rngs: nnx.Rngs,
    ):
        self.mask_token = nnx.Param(normal(rngs.params(), (1, 1, embed_dim), INIT_STD))
        self.pos_embed_predictor = nnx.Param(normal(rngs.params(), (1, 1, embed_dim), INIT_STD))
        rates = [drop_path_rate * i / max(1, depth - 1) for i in range(depth)]
        self.blocks = nnx.List(
            [PredictorBlock(embed_dim, num_heads, mlp_ratio, dropout, rate, rngs=rngs) for rate in rates]
        )
        self.norm = LayerNorm(embed_dim)
        self.head = Linear(embed_dim, embed_dim, rngs=rngs)
        self.checkpointing = checkpointing

    def __call__(self, context, indices, positions=None, present=None, rngs=None):
        """indices: int [batch, masked], patches to predict. positions: [1 or batch, patch, width]; only row 0 is used.
        present: bool [masked] or [batch, masked], True for the leading entries that take part; the others are not
        attended to."""
        token = self.mask_token[...]
        if positions is None:
            tokens = jnp.broadcast_to(token + self.pos_embed_predictor[...], (*indices.shape, token.shape[-1]))
        else:
            tokens = token + rows(positions[0], indices)
        x = jnp.concatenate([context, tokens.astype(context.dtype)], axis=1)
        lengths = None
        if present is not None:
            lengths = jnp.broadcast_to(context.shape[1] + present.sum(-1, dtype=jnp.int32), len(x))
        for block in self.blocks:
            x = call_block(block, x, lengths, rngs, self.checkpointing)
        return self.head(self.norm(x[:, context.shape[1] :]))


class Outputs(NamedTuple):
    """Outputs of the model.

    predictions, targets: per level [batch, token, width]. masked: the masked patches. context_features,
    target_features: [batch, 1 + patch, width]; context_features has 1 + kept tokens if masked patches are dropped.
    """

    predictions: list
    targets: list
    masked: Masked
    context_features: Any
    target_features: Any


class HJEPA(nnx.Module):
    """The H-JEPA model. Arguments and defaults are the original's; those after the bare `*` are additions.

    vit: timm-style overrides of the preset's sizes. rope_theta: rotary positions in both encoders.
    copy_target_at_init: start the target encoder as a copy; the original redraws its Linear weights.
    drop_masked: remove masked patches from the context encoder's input instead of blanking them (needs equal counts).
    drop_path_with_layerscale: keep stochastic depth when layer scale is on; the original silently turns it off.
    """

    def __init__(
        self,
        encoder_type: str = "vit_base_patch16_224",
        img_size: int = 224,
        embed_dim: int = 768,
        predictor_depth: int = 6,
        predictor_num_heads: int = 12,
        predictor_mlp_ratio: float = 4.0,
        num_hierarchies: int = 3,
        drop_path_rate: float = 0.0,
        use_fpn: bool = False,
        fpn_feature_dim: int | None = None,
        fpn_fusion_method: str = "add",
        use_gradient_checkpointing: bool = False,
        use_layerscale: bool = False,
        layerscale_init: float = 1e-5,
        use_target_encoder: bool = True,
        projection_norm: str = "layernorm",
        *,
        vit: dict | None = None,
        rope_theta: float | None = None,
        copy_target_at_init: bool = True,
        drop_masked: bool = False,
        drop_path_with_layerscale: bool = True,
        rngs: nnx.Rngs,
    ):
        size = vit_size(encoder_type, **(vit or {}))
        _check(size, embed_dim, num_hierarchies, fpn_fusion_method)
        levels, fpn_width = num_hierarchies, fpn_feature_dim or embed_dim
        options = {
            "drop_path": 0.0 if use_layerscale and not drop_path_with_layerscale else drop_path_rate,
            "rope_theta": rope_theta,
            "layerscale_init": layerscale_init if use_layerscale else None,
            "checkpointing": use_gradient_checkpointing,
        }
        self.context_encoder = Encoder(img_size, size, rngs=rngs, **options)
        self.target_encoder = Encoder(img_size, size, rngs=rngs, **options) if use_target_encoder else None
        self.predictor = Predictor(
            embed_dim,
            predictor_depth,
            predictor_num_heads,
            predictor_mlp_ratio,
            drop_path_rate=drop_path_rate,
            checkpointing=use_gradient_checkpointing,
            rngs=rngs,
        )
        width_in = fpn_width if use_fpn else embed_dim
        self.hierarchy_projections = nnx.List(
            [Projection(width_in, embed_dim, projection_norm, rngs=rngs) for _ in range(levels)]
        )
        self.fpn_lateral_convs = _normed_linears(levels if use_fpn else 0, embed_dim, fpn_width, rngs)
        self.fpn_top_down_convs = _normed_linears(levels - 1 if use_fpn else 0, fpn_width, fpn_width, rngs)
        concat = use_fpn and fpn_fusion_method == "concat"
        self.fpn_fusion_convs = _normed_linears(levels - 1 if concat else 0, 2 * fpn_width, fpn_width, rngs)
        self.num_hierarchies = levels
        self.patch_size = size.patch_size
        self.use_fpn = use_fpn
        self.drop_masked = drop_masked
        if use_target_encoder:
            copy_weights(self.context_encoder, self.target_encoder)
        reset_linear_and_norm(self, rngs)  # redraws both encoders' Linear weights; the original stops here
        if use_target_encoder and copy_target_at_init:
            copy_weights(self.context_encoder, self.target_encoder)

    def __call__(self, images, mask, masked: Masked, valid=None, rngs=None) -> Outputs:
        """Predict the target features of the masked patches at every level.

        images: [batch, channel, S, S]. mask: bool [batch, patch], True = predict. masked: the same mask as index lists.
        valid: bool [batch], rows that enter batch statistics.
        """
        context = self.encode_context(images, mask, masked, rngs)
        targets = self.encode_target(images, rngs)
        positions = self.context_encoder.vit.positions(images.shape[-1] // self.patch_size)
        predicted = self.predictor(context[:, 1:], masked.indices, positions, masked.present(), rngs=rngs)
        masked_targets = gather(targets[:, 1:], masked.indices)
        predictions = self.project(predicted, masked, valid, rngs)  # first, as both update the batch statistics
        return Outputs(predictions, self.project(masked_targets, masked, valid, rngs), masked, context, targets)

    def encode_context(self, images, mask=None, masked: Masked | None = None, rngs=None):
        """Return the context tokens; masked patches are blanked, or left out if `drop_masked`."""
        if self.drop_masked and masked is not None:
            visible = mask.shape[1] - masked.indices.shape[1]
            keep = jnp.argsort(mask, axis=1, stable=True)[:, :visible]
            return self.context_encoder(images, keep=keep, rngs=rngs)
        return self.context_encoder(images, mask, rngs=rngs)

    def encode_target(self, images, rngs=None):
        """Return the tokens of whole images, without gradient; or the context encoder's, with it, if there is no
        target."""
        if self.target_encoder is None:
            return self.context_encoder(images, rngs=rngs)
        return jax.lax.stop_gradient(self.target_encoder(images))

    def project(self, tokens, masked: Masked, valid=None, rngs=None) -> list:
        """Return the features of every level, computed from tokens [batch, masked, width]."""
        if self.use_fpn:
            features = self._pyramid()(tokens, masked.count)
            return [
                projection(x, rngs, keep_of(masked, level, valid))
                for level, (projection, x) in enumerate(zip(self.hierarchy_projections, features, strict=True))
            ]
        keep = keep_of(masked, 0, valid)
        return [
            pool(projection(tokens, rngs, keep), level) for level, projection in enumerate(self.hierarchy_projections)
        ]

    def extract_features(self, images, level: int = 0, use_target_encoder: bool = True):
        """Return features [batch, patch // 2^level, width] of whole images at a level, in evaluation mode."""
        if not 0 <= level < self.num_hierarchies:
            raise ValueError(f"level={level} is outside [0, {self.num_hierarchies})")
        encoder = self.target_encoder if use_target_encoder and self.target_encoder else self.context_encoder
        tokens = encoder(images)[:, 1:]
        if self.use_fpn:
            return self.hierarchy_projections[level](self._pyramid()(tokens, tokens.shape[1])[level])
        return pool(self.hierarchy_projections[level](tokens), level)

    def original_validity(self, masked: Masked) -> list:
        """Return the original's `masks_valid`: the mask, downsampled by the pyramid's layers if there is one."""
        if not self.use_fpn:
            return [pooled_validity(masked.real, level) for level in range(self.num_hierarchies)]
        width = self.context_encoder.vit.size.embed_dim
        as_tokens = jnp.broadcast_to(masked.real.astype(jnp.float32)[..., None], (*masked.real.shape, width))
        return [x.mean(-1) > 0.5 for x in self._pyramid()(as_tokens, masked.count)]

    def _pyramid(self) -> FeaturePyramid:
        fusion = self.fpn_fusion_convs if len(self.fpn_fusion_convs) else None
        return FeaturePyramid(self.fpn_lateral_convs, self.fpn_top_down_convs, fusion, self.num_hierarchies)


def _normed_linears(count: int, width_in: int, width_out: int, rngs: nnx.Rngs) -> nnx.List:
    """Return `count` pairs of Linear (key 0) and LayerNorm (key 1)."""
    return nnx.List([Sequential(Linear(width_in, width_out, rngs=rngs), LayerNorm(width_out)) for _ in range(count)])


def _check(size, embed_dim: int, levels: int, fusion: str) -> None:
    if embed_dim != size.embed_dim:
        raise UserError(
            f"model.embed_dim: {embed_dim} is not the encoder's width {size.embed_dim}; leave it out or match"
        )
    if not 1 <= levels <= 4:
        raise UserError(f"model.num_hierarchies: {levels} is not 1, 2, 3 or 4")
    if fusion not in ("add", "concat"):
        raise UserError(f"model.fpn.fusion_method: {fusion!r} is unknown; known: add, concat")


def copy_weights(source: nnx.Module, target: nnx.Module) -> None:
    """Copy every parameter of `source` into `target`, a module of the same structure."""
    values = nnx.to_pure_dict(nnx.state(source, nnx.Param))
    state = nnx.state(target, nnx.Param)
    nnx.replace_by_pure_dict(state, values)
    nnx.update(target, state)
