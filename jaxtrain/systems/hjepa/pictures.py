"""Sheets of small pictures, uint8 [height, width, 3]: masks, attention of the class token, nearest neighbours."""

import pathlib

import numpy as np

from jaxtrain.systems.hjepa.pixels import MEAN, STD

LEAST = 64  # pixels per side that a picture is enlarged to, at least


def save(sheet: np.ndarray, path: pathlib.Path) -> pathlib.Path:
    from PIL import Image

    Image.fromarray(sheet).save(path)
    return path


def viewable(images: np.ndarray) -> np.ndarray:
    """uint8 or normalised float images [n, channel, h, w] -> uint8 [n, h, w, 3], enlarged to a visible size."""
    if images.dtype != np.uint8:
        if images.shape[1] == 3:
            images = images * STD[:, None, None] + MEAN[:, None, None]
        else:
            images = images * 0.5 + 0.5
        images = np.clip(images * 255, 0, 255).astype(np.uint8)
    pictures = images.transpose(0, 2, 3, 1)
    pictures = pictures[..., :3] if pictures.shape[-1] >= 3 else np.repeat(pictures[..., :1], 3, axis=-1)
    return _enlarge(pictures, -(-LEAST // pictures.shape[1]))


def _enlarge(pictures: np.ndarray, times: int) -> np.ndarray:
    return pictures.repeat(times, axis=1).repeat(times, axis=2)


def _over(pictures: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Values per patch [n, rows, columns] -> per pixel [n, h, w, 1] of the pictures."""
    rows = np.arange(pictures.shape[1]) * cells.shape[1] // pictures.shape[1]
    columns = np.arange(pictures.shape[2]) * cells.shape[2] // pictures.shape[2]
    return cells[:, rows][:, :, columns][..., None]


def _stack(*rows: np.ndarray) -> np.ndarray:
    return np.concatenate([np.concatenate(list(row), axis=1) for row in rows], axis=0)


def mask_sheet(images: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Images above the same with their masked patches dark. mask: bool [n, rows, columns]."""
    pictures = viewable(images)
    return _stack(pictures, np.where(_over(pictures, mask), pictures // 5, pictures))


def attention_sheet(images: np.ndarray, similarity: np.ndarray) -> np.ndarray:
    """Images above their patches' similarity to the class token, from dark (least) to bright [n, rows, columns]."""
    pictures = viewable(images)
    low, high = (f(similarity, axis=(1, 2), keepdims=True) for f in (np.min, np.max))
    heat = _over(pictures, (similarity - low) / np.maximum(high - low, 1e-9))
    return _stack(pictures, (pictures * (0.15 + 0.85 * heat)).astype(np.uint8))


def neighbour_sheet(images: np.ndarray, features: np.ndarray, queries: int = 8, neighbours: int = 6) -> np.ndarray:
    """One column per query image: the query, then its nearest others by cosine similarity of features [n, width]."""
    x = features - features.mean(0)
    x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    similar = x[:queries] @ x.T
    similar[np.arange(len(similar)), np.arange(len(similar))] = np.inf  # the query itself comes first
    nearest = np.argsort(-similar, axis=1)[:, : neighbours + 1]
    return _stack(*[viewable(images[place]) for place in nearest.T])
