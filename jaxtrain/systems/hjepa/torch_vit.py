"""The encoder in plain torch: timm's VisionTransformer by names and numbers, with the original's options."""

import torch
from torch import nn
from torch.nn import functional


class PatchEmbed(nn.Module):
    def __init__(self, patch_size, in_chans, width):
        super().__init__()
        self.proj = nn.Conv2d(in_chans, width, patch_size, stride=patch_size)

    def forward(self, images):
        return self.proj(images).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.num_heads = num_heads

    def forward(self, x, rotation=None):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        y = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, width))


class RotaryAttention(nn.Module):
    """The original's wrapper, which saves each tensor twice."""

    def __init__(self, attn):
        super().__init__()
        self.attn = attn
        self.qkv = attn.qkv
        self.proj = attn.proj

    def forward(self, x, rotation=None):
        return self.attn(x, rotation)


class Mlp(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x):
        return self.fc2(functional.gelu(self.fc1(x)))


class LayerScale(nn.Module):
    def __init__(self, width, init):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), init))

    def forward(self, x):
        return x * self.gamma


def drop_path(x, rate, training):
    """Zero the branch of whole samples, scale the others by 1 / (1 - rate)."""
    if rate == 0 or not training:
        return x
    keep = torch.rand(len(x), *[1] * (x.ndim - 1), device=x.device) >= rate
    return x * keep / (1 - rate)


class Block(nn.Module):
    def __init__(self, size, rate, rope, layerscale_init):
        super().__init__()
        width = size.embed_dim
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        attn = Attention(width, size.num_heads)
        self.attn = RotaryAttention(attn) if rope else attn
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, int(width * size.mlp_ratio))
        scaled = layerscale_init is not None
        self.ls_attn = LayerScale(width, layerscale_init) if scaled else nn.Identity()
        self.ls_mlp = LayerScale(width, layerscale_init) if scaled else nn.Identity()
        self.rate = rate

    def forward(self, x, rotation=None):
        x = x + drop_path(self.ls_attn(self.attn(self.norm1(x), rotation)), self.rate, self.training)
        return x + drop_path(self.ls_mlp(self.mlp(self.norm2(x))), self.rate, self.training)


class VisionTransformer(nn.Module):
    """Arguments, calls and shapes as in `jaxtrain.nn.vit.VisionTransformer`."""

    def __init__(self, img_size, size, drop_path=0.0, rope_theta=None, layerscale_init=None):
        super().__init__()
        grid = img_size // size.patch_size
        self.cls_token = nn.Parameter(torch.zeros(1, 1, size.embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, grid * grid + 1, size.embed_dim))
        self.patch_embed = PatchEmbed(size.patch_size, size.in_chans, size.embed_dim)
        rates = [drop_path * i / max(1, size.depth - 1) for i in range(size.depth)]
        self.blocks = nn.ModuleList(Block(size, rate, rope_theta is not None, layerscale_init) for rate in rates)
        self.norm = nn.LayerNorm(size.embed_dim, eps=1e-6)
        self.size, self.grid, self.rope_theta = size, grid, rope_theta

    def forward(self, images, mask=None, keep=None):
        x = self.patch_embed(images) + self.pos_embed[:, 1:]
        if mask is not None:
            x = x * (1 - mask.to(x.dtype))[..., None]
        if keep is not None:
            x = x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))
        first = (self.cls_token + self.pos_embed[:, :1]).expand(len(x), -1, -1)
        x = torch.cat([first, x], dim=1)
        rotation = self._rotation(x, keep)
        for block in self.blocks:
            x = block(x, rotation)
        return self.norm(x)

    def _rotation(self, x, keep):
        if self.rope_theta is None:
            return None
        half = self.size.embed_dim // self.size.num_heads // 2
        frequencies = 1.0 / self.rope_theta ** (torch.arange(0, half, 2, device=x.device) / half)
        place = torch.arange(self.grid, device=x.device, dtype=frequencies.dtype)
        rows = torch.outer(place.repeat_interleave(self.grid), frequencies)
        columns = torch.outer(place.repeat(self.grid), frequencies)
        angles = torch.cat([rows, columns], dim=1).to(x.dtype)[None]
        if keep is not None:
            angles = angles[0][keep]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def rotation(q):
            first, second = q[:, :, 1:].unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2)
            return torch.cat([q[:, :, :1], turned], dim=2)

        return rotation


class Encoder(nn.Module):
    def __init__(self, img_size, size, **options):
        super().__init__()
        self.vit = VisionTransformer(img_size, size, **options)

    def forward(self, images, mask=None, keep=None):
        return self.vit(images, mask, keep)
