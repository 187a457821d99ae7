"""Draw the parts that the original's pictures share: images, masks and heat on the patch grid. Uses matplotlib."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from jaxtrain.errors import UserError, install

GREY = (0.5, 0.5, 0.5)


def sheet(count: int, figsize: tuple[float, float], columns: int = 4) -> tuple[Any, list[Any]]:
    """Make a figure without a window, and `count` axes in rows of at most `columns`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"pictures need matplotlib: {install('tune')}") from None
    if count < 1:
        raise UserError("a picture wants at least one row to draw, got none")
    figure = Figure(figsize=figsize)
    columns = min(columns, count)
    return figure, [figure.add_subplot(math.ceil(count / columns), columns, i + 1) for i in range(count)]


def done(figure: Any, save_path: Any = None) -> Any:
    """Return a figure, after writing it to save_path if there is one."""
    figure.tight_layout()
    if save_path is not None:
        figure.savefig(save_path)
    return figure


def array(values: Any) -> np.ndarray:
    return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values, np.float64)


def shown(image: Any) -> np.ndarray:
    """Convert an image [(batch,) channel, H, W], [H, W, 3] or of PIL to [H, W, 3], stretched to 0..1 if beyond it.

    Of a batch the first.
    """
    values = array(image)
    values = values[0] if values.ndim == 4 else values
    if values.shape[-1] not in (1, 3):
        values = np.moveaxis(values, 0, -1)
    if values.min() < 0 or values.max() > 1:
        values = (values - values.min()) / max(values.max() - values.min(), 1e-12)
    return np.broadcast_to(values, (*values.shape[:2], 3)).copy()


def on_grid(values: Any) -> np.ndarray:
    """Return values per patch, [patch] of a square grid or [rows, columns], as [rows, columns]."""
    values = array(values)
    while values.ndim > 1 and len(values) == 1:
        values = values[0]
    side = math.isqrt(values.size)
    if values.ndim == 1 and side * side == len(values):
        return values.reshape(side, side)
    if values.ndim != 2:
        raise UserError(f"values of {values.shape}: expected [patch] of a square grid, or [rows, columns]")
    return values


def spread(grid: np.ndarray, size: Iterable[int]) -> np.ndarray:
    """Enlarge values per patch [rows, columns] to pixels [H, W]."""
    rows, columns = (np.arange(pixels) * cells // pixels for pixels, cells in zip(size, grid.shape, strict=True))
    return grid[rows][:, columns]


def draw(axes: Any, values: np.ndarray, title: str = "", **options: Any) -> Any:
    """Draw an image or a map without ticks; return what a colour bar needs."""
    axes.set_title(title)
    axes.set_axis_off()
    return axes.imshow(values, interpolation="nearest", **options)


def heat(axes: Any, image: Any, grid: np.ndarray, title: str = "") -> Any:
    """Draw values per patch, over an image if there is one."""
    if image is None:
        return draw(axes, grid, title, cmap="viridis")
    picture = shown(image)
    draw(axes, picture, title)
    return axes.imshow(spread(grid, picture.shape[:2]), cmap="jet", alpha=0.5, interpolation="nearest")
