"""Sheets of small pictures, float [height, width, 3] in 0..1: masks, attention, nearest neighbours. Uses jax.numpy."""

import pathlib

import jax.numpy as jnp
import numpy as np

from jaxtrain.systems.hjepa.transforms import MEAN, STD
from jaxtrain.systems.hjepa.views import views_of

LEAST = 64  # pictures are enlarged to at least this many pixels per side
GAP = 2  # grey pixels below and right of every picture
MASKED, WARM = np.float32([0.3, 0.3, 0.6]), np.float32([1.0, 0.4, 0.0])  # colours of masked patches and of attention
SHOWN = 8  # images in a sheet of masks or attention, and queries in a sheet of neighbours


def sheets(model, batch, config) -> dict:
    """Return sheets by name: masks as evaluation draws them, the target encoder's attention, and nearest neighbours.

    batch: columns of one evaluation batch, which is searched for neighbours; only `valid` rows are neighbours.
    """
    (view,) = views_of(model, batch, config, None)
    grid = view.images.shape[-1] // model.patch_size
    shown = view.images[:SHOWN]
    attended = (model.target_encoder or model.context_encoder).vit.attended(shown)
    features = model.extract_features(view.images, 0).mean(1)
    return {
        "masks": mask_sheet(shown, view.mask[:SHOWN].reshape(-1, grid, grid)),
        "attention": attention_sheet(shown, attended.reshape(-1, grid, grid)),
        "neighbours": neighbour_sheet(view.images, features, view.valid),
    }


def embeddings(model, batch, config) -> dict:
    """Return the batch's features from each encoder by name, float [batch, width]; NaN in rows that are not `valid`."""
    (view,) = views_of(model, batch, config, None)
    results = {
        f"embeddings/{name}": model.extract_features(view.images, 0, use_target_encoder=name == "target").mean(1)
        for name in ("target", "context")
    }
    return {name: jnp.where(view.valid[:, None], rows, jnp.nan) for name, rows in results.items()}


def save(sheet, path: pathlib.Path) -> pathlib.Path:
    from PIL import Image

    Image.fromarray(np.round(255 * np.asarray(sheet, np.float32)).astype(np.uint8)).save(path)
    return path


def viewable(images):
    """Convert normalised float images [n, channel, h, w] to [n, h, w, 3] in 0..1, enlarged to a visible size."""
    images = jnp.asarray(images, jnp.float32)
    if images.shape[1] == 3:
        images = images * STD[:, None, None] + MEAN[:, None, None]
    else:
        images = jnp.repeat(images[:, :1] * 0.5 + 0.5, 3, axis=1)
    times = -(-LEAST // images.shape[2])
    return jnp.clip(jnp.moveaxis(images, 1, -1), 0, 1).repeat(times, 1).repeat(times, 2)


def mask_sheet(images, mask):
    """Return a sheet of images above the same images with masked patches tinted. mask: bool [n, rows, columns]."""
    pictures = viewable(images)
    return _stack([pictures, jnp.where(_over(pictures, mask), 0.2 * pictures + 0.8 * MASKED, pictures)])


def attention_sheet(images, attended):
    """Return a sheet of images above the same images, warmer where attention is high. attended: [n, rows, columns]."""
    pictures = viewable(images)
    low, high = (f(attended, axis=(1, 2), keepdims=True) for f in (jnp.min, jnp.max))
    heat = _over(pictures, (attended - low) / jnp.maximum(high - low, 1e-9))
    return _stack([pictures, 0.4 * pictures + 0.6 * heat * WARM])


def neighbour_sheet(images, features, valid, neighbours: int = 6):
    """Return a sheet with one column per query (the first images): the query, then its nearest other images.

    Nearness is the cosine similarity of centred features [n, width]. valid: bool [n], images that are not padding.
    """
    weight = valid.astype(features.dtype)[:, None]
    x = features - (weight * features).sum(0) / jnp.maximum(weight.sum(), 1)
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    similar = jnp.where(valid, x[:SHOWN] @ x.T, -jnp.inf)
    queries = jnp.arange(len(similar))
    similar = similar.at[queries, queries].set(jnp.inf)  # the query itself comes first
    nearest = jnp.argsort(-similar, axis=1)[:, : neighbours + 1]
    return _stack([viewable(images[indices]) for indices in nearest.T])


def _over(pictures, cells):
    """Expand values per patch [n, rows, columns] to values per pixel [n, h, w, 1] of the pictures."""
    rows = np.arange(pictures.shape[1]) * cells.shape[1] // pictures.shape[1]
    columns = np.arange(pictures.shape[2]) * cells.shape[2] // pictures.shape[2]
    return cells[:, rows][:, :, columns][..., None]


def _stack(rows):
    """Join rows of pictures [n, h, w, 3] into one sheet."""
    framed = [jnp.pad(row, ((0, 0), (0, GAP), (0, GAP), (0, 0)), constant_values=0.5) for row in rows]
    return jnp.concatenate([jnp.concatenate(list(row), axis=1) for row in framed], axis=0)
