"""The original's image transforms, feature extraction and linear probe, in torch."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.original.torch_checkpoint import available
from jaxtrain.systems.hjepa.transforms import MEAN, STD, eval_transform, train_transform

POOLINGS = ("mean", "max", "attention", "cls")


BICUBIC = "bicubic"


def check_transform(interpolation: Any, mean: Sequence[float], std: Sequence[float]) -> None:
    """Raise UserError for another resampling or normalisation than the package's own."""
    name = str(getattr(interpolation, "value", interpolation)).lower()
    if name not in (BICUBIC, "3"):  # 3: Pillow's number
        raise UserError(f"interpolation={interpolation!r}: images are resized bicubic; resize them before, or leave it")
    if not (np.allclose(mean, MEAN) and np.allclose(std, STD)):
        raise UserError("mean, std: images are normalised with ImageNet's; pass those, or leave them out")


class JEPATransform:
    """Augment a PIL image as in training, with torch's generator: float32 [3, S, S], normalised.

    color_jitter: strength; None or 0 for none. Raises ValueError for another interpolation, mean or std.
    """

    def __init__(
        self,
        image_size: int = 224,
        crop_scale: tuple[float, float] = (0.8, 1.0),
        interpolation: Any = BICUBIC,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
        horizontal_flip: bool = True,
        color_jitter: float | None = None,
    ):
        check_transform(interpolation, mean, std)
        self.transform = train_transform(image_size, color_jitter or 0.0, tuple(crop_scale), 0.5 * horizontal_flip)

    def __call__(self, image: Any) -> torch.Tensor:
        return torch.from_numpy(self.transform(image, np.random.default_rng(int(torch.randint(1 << 31, ())))))


class JEPAEvalTransform:
    """Resize a PIL image to 1.14 S, crop its centre, normalise: float32 [3, S, S].

    Raises ValueError for another interpolation, mean or std.
    """

    def __init__(
        self,
        image_size: int = 224,
        interpolation: Any = BICUBIC,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
    ):
        check_transform(interpolation, mean, std)
        self.transform = eval_transform(image_size)

    def __call__(self, image: Any) -> torch.Tensor:
        return torch.from_numpy(self.transform(image))


@torch.no_grad()
def extract_features(
    model: nn.Module,
    dataloader: Any,
    hierarchy_level: int = 0,
    device: str = "cuda",
    pool: bool = False,
    pooling: str = "mean",
    normalize: bool = False,
    max_samples: int | None = None,
    desc: str = "Extracting features",
) -> tuple[np.ndarray, np.ndarray]:
    """Return features of the target encoder, [row, token, width] or with `pool` [row, width], and labels [row].

    dataloader: yields (images, labels). desc: text before the progress bar. pooling: "mean" or "max" over tokens.
    normalize: scale features to length 1.
    """
    if pooling not in ("mean", "max"):
        raise UserError(f"pooling={pooling!r} is unknown; known: mean, max")
    model, training = model.to(available(device)), model.training
    features, labels = [], []
    model.eval()
    for images, batch_labels in tqdm(dataloader, desc=desc, disable=None, leave=False):
        extracted = model.extract_features(images.to(available(device)), level=hierarchy_level)
        if pool:
            extracted = extracted.mean(1) if pooling == "mean" else extracted.amax(1)
        features.append((functional.normalize(extracted, dim=-1) if normalize else extracted).cpu().numpy())
        labels.append(np.asarray(batch_labels))
        if max_samples is not None and sum(map(len, labels)) >= max_samples:
            break
    model.train(training)
    return np.concatenate(features)[:max_samples], np.concatenate(labels)[:max_samples]


def pool_tokens(features: torch.Tensor, pooling: str) -> torch.Tensor:
    """Pool [batch, token, width] to [batch, width]: mean, max, or cls, which warns and takes the mean."""
    if features.ndim < 3:
        return features
    if pooling == "cls":
        warnings.warn("pooling='cls': features hold no class token, so their mean is taken", stacklevel=2)
    return features.amax(1) if pooling == "max" else features.mean(1)


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

        else:
            self.attention = None

    def pool_features(self, features):
        """Return [batch, width] from features [batch, token, width]; features without tokens pass through."""
        if features.ndim == 3 and self.pooling == "attention":
            return (features * self.attention(features).softmax(1)).sum(1)
        return pool_tokens(features, self.pooling)

    def forward(self, features):
        x = self.pool_features(features)
        return self.classifier(functional.normalize(x, dim=-1) if self.normalize else x)


class OptimizedHJEPA(nn.Module):
    """Features of one level of an HJEPA for inference, with its target encoder and that level's projection alone.

    Shares its parts with the given model: `encoder`, `hierarchy_projection`, `hierarchy_pooling`. Raises ValueError for
    an unknown level, a model without a target encoder, and one with a pyramid (FPN), whose levels need all of it.
    """

    encoder: Any
    hierarchy_projection: Any
    hierarchy_pooling: Any

    def __init__(self, hjepa_model: Any, hierarchy_level: int = 0):
        super().__init__()
        hjepa = hjepa_model
        self.embed_dim, self.num_hierarchies = hjepa.embed_dim, hjepa.num_hierarchies
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
