"""Vision Transformer with timm's names: it loads timm's state dicts, and timm loads its own.

Source: Dosovitskiy et al. 2021; timm VisionTransformer (class token, learned positions, pre-norm, exact GELU, norm
epsilon 1e-6, qkv bias).
"""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.errors import UserError
from jaxtrain.nn import Conv2d, DropPath, LayerNorm, Linear, attention, gelu
from jaxtrain.nn.initializers import normal, truncated_normal
from jaxtrain.nn.rotary import grid_table, rotate_pairs
from jaxtrain.nn.scopes import named

NORM_EPS = 1e-6  # timm's, not torch's 1e-5
INIT_STD = 0.02  # of timm's truncated normal


@dataclasses.dataclass(frozen=True)
class ViTSize:
    """Sizes of a ViT. embed_dim: width of a token. depth: number of blocks. patch_size: pixels per side. mlp_ratio:
    hidden width / embed_dim."""

    patch_size: int = 16
    embed_dim: int = 192
    depth: int = 12
    num_heads: int = 3
    mlp_ratio: float = 4.0
    in_chans: int = 3


PRESETS = {
    "vit_tiny_patch16_224": ViTSize(),
    "vit_small_patch16_224": ViTSize(embed_dim=384, num_heads=6),
    "vit_small_patch32_224": ViTSize(patch_size=32, embed_dim=384, num_heads=6),
    "vit_base_patch8_224": ViTSize(patch_size=8, embed_dim=768, num_heads=12),
    "vit_base_patch16_224": ViTSize(embed_dim=768, num_heads=12),
    "vit_base_patch32_224": ViTSize(patch_size=32, embed_dim=768, num_heads=12),
    "vit_large_patch16_224": ViTSize(embed_dim=1024, depth=24, num_heads=16),
    "vit_large_patch32_224": ViTSize(patch_size=32, embed_dim=1024, depth=24, num_heads=16),
    "vit_huge_patch14_224": ViTSize(patch_size=14, embed_dim=1280, depth=32, num_heads=16),
    "deit_tiny_patch16_224": ViTSize(),
    "deit_small_patch16_224": ViTSize(embed_dim=384, num_heads=6),
    "deit_base_patch16_224": ViTSize(embed_dim=768, num_heads=12),
}


def vit_size(encoder_type: str, **overrides) -> ViTSize:
    """Return the preset of a timm name, with timm-style overrides (patch_size=8, depth=2, ...). Raises UserError for an
    unknown name."""
    if encoder_type not in PRESETS:
        raise UserError(
            f"model.encoder_type: {encoder_type!r} is unknown; known: {', '.join(PRESETS)}. Other sizes: name one and "
            "give model.vit (patch_size, embed_dim, depth, num_heads, mlp_ratio)"
        )
    return dataclasses.replace(PRESETS[encoder_type], **overrides)


def overrides(section) -> dict:
    """Return the fields of a ViTConfig that are set, as timm-style arguments."""
    return {key: value for key, value in section.model_dump().items() if value is not None}


class PatchEmbed(nnx.Module):
    """Embeds non-overlapping patches: [batch, channel, height, width] -> [batch, patch, width], row-major."""

    def __init__(self, patch_size: int, in_chans: int, embed_dim: int, *, rngs: nnx.Rngs):
        self.proj = Conv2d(in_chans, embed_dim, patch_size, stride=patch_size, rngs=rngs)

    def __call__(self, images):
        y = self.proj(images)
        return y.reshape(*y.shape[:2], -1).swapaxes(1, 2)


class Attention(nnx.Module):
    """Self-attention with one fused projection, rows (query, key, value) x head x head_dim. Source: timm Attention."""

    def __init__(self, width: int, num_heads: int, *, rngs: nnx.Rngs):
        if width % num_heads:
            raise UserError(f"model: embed_dim {width} is not a multiple of num_heads {num_heads}")
        self.qkv = Linear(width, 3 * width, rngs=rngs)
        self.proj = Linear(width, width, rngs=rngs)
        self.num_heads = num_heads

    @named
    def __call__(self, x, rotation=None, mask=None):
        """Apply self-attention to x [batch, token, width]. rotation: function on queries and keys [batch, token, head,
        head_dim]."""
        y = attention(*self._heads(x, rotation), mask=mask)
        return self.proj(y.reshape(*y.shape[:2], -1))

    def weights(self, x, rotation=None):
        """Return the attention weights, float32 [batch, head, query, key]; rows sum to 1."""
        q, k, _ = self._heads(x, rotation)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
        return jax.nn.softmax(scores, axis=-1)

    def _heads(self, x, rotation):
        """Return queries, keys and values [batch, token, head, head_dim]."""
        parts = jnp.split(self.qkv(x), 3, axis=-1)  # its gradients are concatenated; those of indexing would be padded
        q, k, v = (part.reshape(*x.shape[:2], self.num_heads, -1) for part in parts)
        return (q, k, v) if rotation is None else (rotation(q), rotation(k), v)


class RotaryAttention(nnx.Module):
    """Attention with the original's wrapper: each tensor is saved as `attn.qkv` and also as `qkv`, but is shared."""

    def __init__(self, attn: Attention):
        self.attn = attn
        self.qkv = attn.qkv
        self.proj = attn.proj

    def __call__(self, x, rotation=None, mask=None):
        return self.attn(x, rotation, mask)

    def weights(self, x, rotation=None):
        return self.attn.weights(x, rotation)


class Mlp(nnx.Module):
    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs):
        self.fc1 = Linear(width, hidden, rngs=rngs)
        self.fc2 = Linear(hidden, width, rngs=rngs)

    def __call__(self, x):
        return self.fc2(gelu(self.fc1(x)))


class LayerScale(nnx.Module):
    """A learned gain per channel. Source: Touvron et al. 2021 (CaiT)."""

    def __init__(self, width: int, init: float):
        self.gamma = nnx.Param(jnp.full(width, init))

    def __call__(self, x):
        return x * self.gamma[...].astype(x.dtype)


class Block(nnx.Module):
    """x + drop_path(scale(attn(norm(x)))), then the same with the MLP. Source: timm Block."""

    def __init__(self, size: ViTSize, drop_path: float, rope: bool, layerscale_init: float | None, *, rngs: nnx.Rngs):
        width = size.embed_dim
        self.norm1 = LayerNorm(width, NORM_EPS)
        attn = Attention(width, size.num_heads, rngs=rngs)
        self.attn = RotaryAttention(attn) if rope else attn
        self.norm2 = LayerNorm(width, NORM_EPS)
        self.mlp = Mlp(width, int(width * size.mlp_ratio), rngs=rngs)
        self.drop_path = DropPath(drop_path)
        self.ls_attn = LayerScale(width, layerscale_init) if layerscale_init is not None else None
        self.ls_mlp = LayerScale(width, layerscale_init) if layerscale_init is not None else None

    def __call__(self, x, rotation=None, mask=None, rngs=None):
        x = x + self._branch(self.attn(self.norm1(x), rotation, mask), self.ls_attn, rngs)
        return x + self._branch(self.mlp(self.norm2(x)), self.ls_mlp, rngs)

    def _branch(self, y, scale, rngs):
        return self.drop_path(y if scale is None else scale(y), rngs)


class VisionTransformer(nnx.Module):
    """Maps images [batch, channel, S, S] to normalised tokens [batch, 1 + patch, embed_dim], the class token first.

    drop_path: rate of the last block; the rates rise linearly from 0. rope_theta: rotate queries and keys of patches by
    their position in the grid; None: only learned positions. checkpointing: the backward pass recomputes each block.
    """

    def __init__(
        self,
        img_size: int,
        size: ViTSize,
        *,
        drop_path: float = 0.0,
        rope_theta: float | None = None,
        layerscale_init: float | None = None,
        checkpointing: bool = False,
        rngs: nnx.Rngs,
    ):
        if img_size < size.patch_size:
            raise UserError(f"data.image_size: {img_size} holds no patch of {size.patch_size} pixels")
        width, grid = size.embed_dim, img_size // size.patch_size
        self.cls_token = nnx.Param(normal(rngs.params(), (1, 1, width), 1e-6))
        self.pos_embed = nnx.Param(truncated_normal(rngs.params(), (1, grid * grid + 1, width), INIT_STD))
        self.patch_embed = PatchEmbed(size.patch_size, size.in_chans, width, rngs=rngs)
        rates = [drop_path * i / max(1, size.depth - 1) for i in range(size.depth)]
        rope = rope_theta is not None
        self.blocks = nnx.List([Block(size, rate, rope, layerscale_init, rngs=rngs) for rate in rates])
        self.norm = LayerNorm(width, NORM_EPS)
        self.size = size
        self.grid = grid
        self.rope_theta = rope_theta
        self.checkpointing = checkpointing
        reset_linear_and_norm(self, rngs)

    def __call__(self, images, mask=None, keep=None, rngs=None):
        """Return the normalised tokens of images.

        mask: bool or number [batch, patch]; 1 zeroes a patch's token (position included), which stays in the sequence.
        keep: int [batch, kept]; only these patches enter the blocks, and the result is [batch, 1 + kept, embed_dim].
        Images of another size than img_size get interpolated positions.
        """
        x, rotation = self._embed(images, mask, keep)
        for block in self.blocks:
            x = call_block(block, x, rotation, rngs, self.checkpointing)
        return self.norm(x)

    def attended(self, images):
        """Return the share of the last block's attention that each patch gets, averaged over heads and queries, float32
        [batch, patch]. The class token gets the rest, to a sum of 1."""
        x, rotation = self._embed(images)
        *before, last = self.blocks
        for block in before:
            x = block(x, rotation)
        return last.attn.weights(last.norm1(x), rotation).mean((1, 2))[:, 1:]

    def positions(self, grid: int):
        """Return the learned positions for `grid` patches per side, [1, grid * grid, embed_dim]. For another grid than
        the model's own, they are interpolated (bicubic, antialiased), as timm's resample_abs_pos_embed."""
        own = self.pos_embed[...][:, 1:]
        if grid == self.grid:
            return own
        square = own.reshape(1, self.grid, self.grid, -1)
        return jax.image.resize(square, (1, grid, grid, own.shape[-1]), "cubic").reshape(1, grid * grid, -1)

    def _embed(self, images, mask=None, keep=None):
        """Return the tokens that enter the blocks, the class token first, and their rotation."""
        grid = images.shape[-1] // self.size.patch_size
        x = self.patch_embed(images) + self.positions(grid).astype(self.patch_embed.proj.weight.dtype)
        if mask is not None:
            x = x * (1 - mask.astype(x.dtype))[..., None]
        if keep is not None:
            x = cast(jax.Array, nn.tokens(x, keep))
        first = (self.cls_token[...] + self.pos_embed[...][:, :1]).astype(x.dtype)
        x = jnp.concatenate([jnp.broadcast_to(first, (x.shape[0], 1, x.shape[-1])), x], axis=1)
        return x, self._rotation(grid, keep)

    def _rotation(self, grid: int, keep):
        if self.rope_theta is None:
            return None
        cos, sin = grid_table(grid, grid, self.size.embed_dim // self.size.num_heads, self.rope_theta)
        if keep is not None:
            cos, sin = cos[keep], sin[keep]

        def rotation(x):
            return jnp.concatenate([x[:, :1], rotate_pairs(x[:, 1:], cos, sin)], axis=1)

        return rotation


def call_block(block, x, rotation, rngs, checkpointing: bool):
    """Call block(x). The backward pass recomputes it from x if `checkpointing`, else as `train.remat` says."""
    if not checkpointing:
        return nn.block(block, x, rotation, rngs=rngs)
    definition, state = nnx.split(block)
    return jax.checkpoint(lambda state, x: nnx.merge(definition, state)(x, rotation, rngs=rngs))(state, x)


class Encoder(nnx.Module):
    """A ViT under the key `vit`; used as context encoder, target encoder and frame encoder of the world model."""

    def __init__(self, img_size: int, size: ViTSize, *, rngs: nnx.Rngs, **options):
        self.vit = VisionTransformer(img_size, size, rngs=rngs, **options)

    def __call__(self, images, mask=None, keep=None, rngs=None):
        return self.vit(images, mask, keep, rngs=rngs)


def reset_linear_and_norm(module: nnx.Module, rngs: nnx.Rngs) -> None:
    """Initialise every Linear below `module` (weight from a normal of standard deviation 0.02 truncated at +-2, bias 0)
    and every affine LayerNorm (1 and 0). Attention's fused `in_proj_weight` is not changed, as in the original."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, Linear):
            node.weight.set_value(truncated_normal(rngs.params(), node.weight.shape, INIT_STD))
            if node.bias is not None:
                node.bias.set_value(jnp.zeros(node.bias.shape))
        elif isinstance(node, LayerNorm) and node.weight is not None:
            node.weight.set_value(jnp.ones(node.weight.shape))
            if node.bias is not None:
                node.bias.set_value(jnp.zeros(node.bias.shape))
