"""The digits model in plain torch; it loads an exported state dict with strict=True."""

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width, heads, mlp_ratio, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, int(width * mlp_ratio))
        self.fc2 = nn.Linear(int(width * mlp_ratio), width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.dropout(self.attn(y, y, y, need_weights=False)[0])
        return x + self.dropout(self.fc2(functional.gelu(self.fc1(self.norm2(x)))))


class DigitsViT(nn.Module):
    """Vision transformer: image float [batch, 1, 8, 8] -> logits [batch, 10]."""

    def __init__(self, config):
        super().__init__()
        width, patches = config.embed_dim, (8 // config.patch_size) ** 2
        self.stem = nn.Conv2d(1, width // 2, 3, padding=1)
        self.patch_embed = nn.Conv2d(width // 2, width, config.patch_size, stride=config.patch_size)
        self.pos_embed = nn.Parameter(torch.zeros(1, patches, width))
        self.blocks = nn.ModuleList(
            Block(width, config.num_heads, config.mlp_ratio, config.dropout) for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, image):
        x = self.patch_embed(functional.gelu(self.stem(image))).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def build(config) -> DigitsViT:
    return DigitsViT(config.model)


def call(module, batch):
    return module(batch["image"])


def loss(module, batch, config):
    valid = batch["valid"]
    return functional.cross_entropy(module(batch["image"])[valid], batch["label"][valid].long())
