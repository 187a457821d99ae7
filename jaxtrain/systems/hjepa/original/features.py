"""The original's image transforms, feature extraction and linear probe, in torch."""

import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.original.torch_checkpoint import available
from jaxtrain.systems.hjepa.transforms import eval_transform, train_transform

POOLINGS = ("mean", "max", "attention", "cls")


class JEPATransform:
    """Augment a PIL image as in training, with torch's generator: float32 [3, S, S], normalised."""

    def __init__(self, image_size: int = 224, color_jitter: float = 0.4):
        self.transform = train_transform(image_size, color_jitter)

    def __call__(self, image: Any) -> torch.Tensor:
        return torch.from_numpy(self.transform(image, np.random.default_rng(int(torch.randint(1 << 31, ())))))


class JEPAEvalTransform:
    """Resize a PIL image to 1.14 S, crop its centre, normalise: float32 [3, S, S]."""

    def __init__(self, image_size: int = 224):
        self.transform = eval_transform(image_size)

    def __call__(self, image: Any) -> torch.Tensor:
        return torch.from_numpy(self.transform(image))


@torch.no_grad()
def extract_features(
    model: nn.Module,
    loader: Any,
    hierarchy_level: int = 0,
    device: str = "cuda",
    pool: bool = False,
    pooling: str = "mean",
    normalize: bool = False,
    max_samples: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return features of the target encoder, [row, token, width] or with `pool` [row, width], and labels [row].

    loader: yields (images, labels). pooling: "mean" or "max" over tokens. normalize: scale features to length 1.
    """
    if pooling not in ("mean", "max"):
        raise UserError(f"pooling={pooling!r} is unknown; known: mean, max")
    model, training = model.to(available(device)), model.training
    features, labels = [], []
    model.eval()
    for images, given in loader:
        found = model.extract_features(images.to(available(device)), level=hierarchy_level)
        if pool:
            found = found.mean(1) if pooling == "mean" else found.amax(1)
        features.append((functional.normalize(found, dim=-1) if normalize else found).cpu().numpy())
        labels.append(np.asarray(given))
        if max_samples is not None and sum(map(len, labels)) >= max_samples:
            break
    model.train(training)
    return np.concatenate(features)[:max_samples], np.concatenate(labels)[:max_samples]


class LinearProbe(nn.Module):
    """Linear probe: features [batch, token, width] or [batch, width] -> logits [batch, class].

    pooling: "mean", "max", "attention" (a softmax over tokens) or "cls", which warns and takes the mean.
    normalize: scale pooled features to length 1.
    """

    def __init__(self, input_dim: int, num_classes: int, pooling: str = "mean", normalize: bool = False):
        super().__init__()
        if pooling not in POOLINGS:
            raise UserError(f"pooling={pooling!r} is unknown; known: {', '.join(POOLINGS)}")
        self.pooling, self.normalize = pooling, normalize
        self.classifier = nn.Linear(input_dim, num_classes)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)
        if pooling == "attention":
            hidden = input_dim // 4
            self.attention = nn.Sequential(nn.Linear(input_dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, features):
        x = features
        if x.ndim == 3 and self.pooling == "attention":
            x = (x * self.attention(x).softmax(1)).sum(1)
        elif x.ndim == 3:
            if self.pooling == "cls":
                warnings.warn("pooling='cls': features hold no class token, so their mean is taken", stacklevel=2)
            x = x.amax(1) if self.pooling == "max" else x.mean(1)
        return self.classifier(functional.normalize(x, dim=-1) if self.normalize else x)


class OptimizedHJEPA(nn.Module):
    """Features of one level of an HJEPA for inference, with its target encoder and that level's projection alone.

    Shares its parts with the given model: `encoder`, `hierarchy_projection`, `hierarchy_pooling`. Raises ValueError for
    an unknown level, a model without a target encoder, and one with a pyramid (FPN), whose levels need all of it.
    """

    encoder: Any
    hierarchy_projection: Any
    hierarchy_pooling: Any

    def __init__(self, hjepa: Any, hierarchy_level: int = 0):
        super().__init__()
        if not 0 <= hierarchy_level < hjepa.num_hierarchies:
            raise UserError(f"hierarchy_level={hierarchy_level} is outside [0, {hjepa.num_hierarchies})")
        if hjepa.target_encoder is None or hjepa.use_fpn:
            lack = "has a pyramid (use_fpn)" if hjepa.use_fpn else "has no target encoder"
            raise UserError(f"OptimizedHJEPA: the model {lack}; take its extract_features(images, level)")
        self.hierarchy_level, self.encoder = hierarchy_level, hjepa.target_encoder
        self.hierarchy_projection = hjepa.hierarchy_projections[hierarchy_level]
        self.hierarchy_pooling = hjepa.hierarchy_pooling[hierarchy_level]

    @torch.no_grad()
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return features [batch, patch // 2^level, width]."""
        tokens = self.hierarchy_projection(self.encoder(images)[:, 1:])
        return self.hierarchy_pooling(tokens.transpose(1, 2)).transpose(1, 2)
