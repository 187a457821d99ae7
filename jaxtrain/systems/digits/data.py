"""scikit-learn's 1,797 handwritten digits, 8 x 8 pixels, as a torch Dataset or as arrays."""

import importlib.util

import numpy as np

from jaxtrain.data.collate import stack
from jaxtrain.data.digits import load_digits
from jaxtrain.data.sources import ArraySource


def split_indices(size: int, validation_ratio: float, split: str) -> np.ndarray:
    """Return the sample indices of a split; they are the same for every seed, so that runs can be compared."""
    order = np.random.Generator(np.random.Philox(0)).permutation(size)
    validation = round(size * validation_ratio)
    return {"train": order[validation:], "validation": order[:validation]}.get(split, np.array([], int))


def build_data(config, split: str):
    """Return the training or validation digits as a dataset; None for other splits."""
    images, labels = load_digits()
    indices = split_indices(len(labels), config.data.validation_ratio, split)
    if not len(indices):
        return None
    images = ((images[indices, None] - 4.9) / 6.0).astype(np.float32)  # [sample, 1, 8, 8], about standard normal
    labels = labels[indices].astype(np.int32)
    use_torch = config.data.source == "torch" or (
        config.data.source == "auto" and importlib.util.find_spec("torch") is not None
    )
    if use_torch:
        from jaxtrain.systems.digits.torch_data import Digits

        return Digits(images, labels)
    return ArraySource({"image": images, "label": labels})


def collate(items) -> dict[str, np.ndarray]:
    """Collate items of either source into image [batch, 1, 8, 8] and label [batch]."""
    if isinstance(items[0], dict):
        return {name: stack([item[name] for item in items], name) for name in ("image", "label")}
    return {name: stack([item[i] for item in items], name) for i, name in enumerate(("image", "label"))}
