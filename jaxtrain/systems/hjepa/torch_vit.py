"""The encoder in plain torch: state-dict keys and outputs of timm's VisionTransformer, plus the original's options."""

import torch
from torch import nn
from torch.nn import functional


class PatchEmbed(nn.Module):
    def __init__(self, img_size, patch_size, in_chans, width):
        super().__init__()
        self.proj = nn.Conv2d(in_chans, width, patch_size, stride=patch_size)
        self.img_size, self.patch_size = (img_size,) * 2, (patch_size,) * 2
        self.grid_size = (img_size // patch_size,) * 2
        self.num_patches = self.grid_size[0] ** 2

    def forward(self, images):
        return self.proj(images).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.proj_drop = nn.Dropout(0.0)
        self.num_heads, self.head_dim = num_heads, width // num_heads
        self.scale = self.head_dim**-0.5

    def forward(self, x, rotation=None):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        y = functional.scaled_dot_product_attention(q, k, v)
        return self.proj_drop(self.proj(y.transpose(1, 2).reshape(batch, tokens, width)))


class RotaryAttention(nn.Module):
    """Attention wrapped as in the original; its state dict holds qkv and proj twice, the second time under `attn`."""

    def __init__(self, attn):
        super().__init__()
        self.attn = attn
        self.qkv = attn.qkv
        self.proj = attn.proj
        self.num_heads, self.head_dim, self.scale = attn.num_heads, attn.head_dim, attn.scale

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
    """Zero the branch for random whole samples and scale it for the others by 1 / (1 - rate)."""
    if rate == 0 or not training:
        return x
    keep = torch.rand(len(x), *[1] * (x.ndim - 1), device=x.device) >= rate
    return x * keep / (1 - rate)


class DropPath(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.drop_prob = rate

    def forward(self, x):
        return drop_path(x, self.drop_prob, self.training)


class Block(nn.Module):
    """Pre-norm block. timm's layer-scale slots `ls1` and `ls2` stay empty; the original adds `ls_attn` and `ls_mlp`."""

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
        self.ls1, self.ls2 = nn.Identity(), nn.Identity()
        self.drop_path1, self.drop_path2 = (DropPath(rate) if rate else nn.Identity() for _ in range(2))

    def forward(self, x, rotation=None):
        x = x + self.drop_path1(self.ls1(self.ls_attn(self.attn(self.norm1(x), rotation))))
        return x + self.drop_path2(self.ls2(self.ls_mlp(self.mlp(self.norm2(x)))))


class VisionTransformer(nn.Module):
    """Arguments, calls and shapes of `jaxtrain.nn.vit.VisionTransformer`, attribute names of timm's; without a head."""

    def __init__(self, img_size, size, drop_path=0.0, rope_theta=None, layerscale_init=None):
        super().__init__()
        grid = img_size // size.patch_size
        self.cls_token = nn.Parameter(torch.zeros(1, 1, size.embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, grid * grid + 1, size.embed_dim))
        self.patch_embed = PatchEmbed(img_size, size.patch_size, size.in_chans, size.embed_dim)
        self.pos_drop = nn.Dropout(0.0)
        rates = [drop_path * i / max(1, size.depth - 1) for i in range(size.depth)]
        self.blocks = nn.ModuleList(Block(size, rate, rope_theta is not None, layerscale_init) for rate in rates)
        self.norm = nn.LayerNorm(size.embed_dim, eps=1e-6)
        self.head = nn.Identity()
        self.size, self.grid, self.rope_theta = size, grid, rope_theta
        self.embed_dim = self.num_features = size.embed_dim
        self.num_prefix_tokens = 1

    def forward_features(self, images):
        """Return the tokens [batch, 1 + patch, width] after the last norm; named as in timm."""
        return self(images)

    def forward(self, images, mask=None, keep=None):
        x = self.patch_embed(images) + self.pos_embed[:, 1:]
        if mask is not None:
            x = x * (1 - mask.to(x.dtype))[..., None]
        if keep is not None:
            x = x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))
        first = (self.cls_token + self.pos_embed[:, :1]).expand(x.shape[0], -1, -1)
        x = self.pos_drop(torch.cat([first, x], dim=1))
        rotation = self._rotation(x, keep)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))

    def _rotation(self, x, keep):
        if self.rope_theta is None:
            return None
        half = self.size.embed_dim // self.size.num_heads // 2
        frequencies = 1.0 / self.rope_theta ** (torch.arange(0, half, 2, device=x.device) / half)
        position = torch.arange(self.grid, device=x.device, dtype=frequencies.dtype)
        rows = torch.outer(position.repeat_interleave(self.grid), frequencies)
        columns = torch.outer(position.repeat(self.grid), frequencies)
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
