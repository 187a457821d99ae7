"""Pictures of masks on the patch grid, with matplotlib. True, or 1, is a masked patch, which is to be predicted."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.masks import MultiBlockMaskGenerator
from jaxtrain.systems.hjepa.original.pictures import GREY, array, done, draw, heat, on_grid, sheet, shown, spread

Size = tuple[float, float]


def grids(
    panels: Mapping[str, Any],
    sides: tuple[int, int] | Sequence[tuple[int, int]],
    figsize: Size,
    save_path: Any = None,
) -> Any:
    """Draw masks [patch] by title, each on its grid of (rows, columns); return the figure.

    sides: of all panels, or one per panel. save_path: write the figure there too.
    """
    each: list[Any] = [sides] * len(panels) if sides and isinstance(sides[0], int) else list(sides)
    figure, axes = sheet(len(panels), figsize)
    for axis, (title, mask), (rows, columns) in zip(axes, panels.items(), each, strict=True):
        draw(axis, array(mask).reshape(rows, columns), title, vmin=0)
    return done(figure, save_path)


def visualize_masking_strategy(
    mask: Any,
    image: Any = None,
    patch_size: int = 16,
    save_path: Any = None,
    figsize: Size = (12, 5),
    title: str | None = None,
) -> Any:
    """Draw a mask, and the image with and without its masked patches; return the figure.

    mask: [patch] of a square grid, or [rows, columns]. patch_size: pixels, checked with an image.
    """
    grid = on_grid(mask) > 0
    figure, axes = sheet(1 if image is None else 3, figsize)
    draw(axes[0], grid, title or f"{100 * grid.mean():.1f} % masked", vmin=0, vmax=1)
    if image is not None:
        draw(axes[1], shown(image), "image")
        draw(axes[2], _covered(image, grid, patch_size, GREY), "visible")
    return done(figure, save_path)


def visualize_masked_image(
    image: Any,
    mask: Any,
    patch_size: int = 16,
    mask_color: tuple[float, float, float] = GREY,
    save_path: Any = None,
    figsize: Size = (12, 4),
) -> Any:
    """Draw an image, its visible and its masked patches; return the figure."""
    grid = on_grid(mask) > 0
    figure, axes = sheet(3, figsize)
    draw(axes[0], shown(image), "image")
    draw(axes[1], _covered(image, grid, patch_size, mask_color), "visible")
    draw(axes[2], _covered(image, ~grid, patch_size, mask_color), "masked")
    return done(figure, save_path)


def visualize_context_target_regions(
    mask: Any,
    target_blocks: Sequence[Any] | None = None,
    image: Any = None,
    patch_size: int = 16,
    save_path: Any = None,
    figsize: Size = (14, 6),
) -> Any:
    """Draw the context (0) and the target blocks, numbered from 1; return the figure.

    target_blocks: masks, or (row, column, height, width) in patches; without them `mask` is the only target.
    """
    grid = (on_grid(mask) > 0).astype(float)
    if target_blocks is not None:
        grid = np.zeros_like(grid)
        for number, block in enumerate(target_blocks, 1):
            grid[_block(block, grid.shape)] = number
    figure, axes = sheet(1 if image is None else 2, figsize)
    draw(axes[0], grid, "targets", vmin=0)
    if image is not None:
        _check_patches(image, grid, patch_size)
        heat(axes[1], image, grid, "targets in the image")
    return done(figure, save_path)


def compare_masking_strategies(
    masks: Sequence[Any], labels: Sequence[str], image: Any = None, save_path: Any = None, figsize: Size = (16, 10)
) -> Any:
    """Draw masks with their labels, over an image if there is one; return the figure."""
    figure, axes = sheet(len(masks), figsize)
    for axis, mask, label in zip(axes, masks, labels, strict=True):
        grid = on_grid(mask) > 0
        heat(axis, image, grid.astype(float), f"{label}: {100 * grid.mean():.1f} %")
    return done(figure, save_path)


def plot_masking_statistics(masks: Any, save_path: Any = None, figsize: Size = (12, 4)) -> Any:
    """Draw the share that each of the masks [mask, patch] covers, and how often a patch is masked; return a figure."""
    each = np.stack([on_grid(mask) > 0 for mask in masks])
    figure, (shares, often) = sheet(2, figsize)
    shares.hist(each.mean((1, 2)), bins=20)
    shares.set_title(f"masked share, mean {each.mean():.3f}")
    figure.colorbar(draw(often, each.mean(0), "how often each patch is masked", vmin=0, vmax=1), ax=often)
    return done(figure, save_path)


def visualize_multi_block_masking(
    num_samples: int = 6,
    grid_size: int = 14,
    num_blocks: int = 4,
    block_aspect_ratio: tuple[float, float] = (0.75, 1.5),
    mask_scale: tuple[float, float] = (0.15, 0.2),
    save_path: Any = None,
    figsize: Size = (15, 10),
) -> Any:
    """Draw samples of MultiBlockMaskGenerator by NumPy's seed, context 1 and targets 2; return the figure."""
    side = (grid_size, grid_size)
    generator = MultiBlockMaskGenerator(
        side, 1, num_blocks, target_scale=mask_scale, aspect_ratio_range=block_aspect_ratio
    )
    context, targets = generator(num_samples)
    drawn = {f"sample {i}": context[i] + 2 * targets[i].any(0) for i in range(num_samples)}
    return grids(drawn, side, figsize, save_path)


def animate_masking_process(
    masks: Sequence[Any],
    image: Any = None,
    patch_size: int = 16,
    save_path: Any = None,
    interval: int = 500,
    figsize: Size = (10, 5),
) -> Any:
    """Show masks one after the other, `interval` ms each; return matplotlib's animation. save_path: a .gif of it."""
    frames = [on_grid(mask) > 0 for mask in masks]
    figure, axes = sheet(1 if image is None else 2, figsize)
    from matplotlib import animation

    def show(number: int) -> list[Any]:
        for axis in axes:
            axis.clear()
        artists = [draw(axes[0], frames[number], f"mask {number + 1} of {len(frames)}", vmin=0, vmax=1)]
        if image is not None:
            artists.append(draw(axes[1], _covered(image, frames[number], patch_size, GREY), "visible"))
        return artists

    moving = animation.FuncAnimation(figure, show, len(frames), interval=interval)
    if save_path is not None:
        moving.save(save_path, writer=animation.PillowWriter(fps=max(1, round(1000 / interval))))
    return moving


def _covered(image: Any, grid: np.ndarray, patch_size: int, color: Sequence[float]) -> np.ndarray:
    picture = _check_patches(image, grid, patch_size)
    return np.where(spread(grid, picture.shape[:2])[..., None], np.asarray(color, float), picture)


def _check_patches(image: Any, grid: np.ndarray, patch_size: int) -> np.ndarray:
    picture = shown(image)
    size = tuple(cells * patch_size for cells in grid.shape)
    if picture.shape[:2] != size:
        raise UserError(
            f"patch_size={patch_size}: a mask of {grid.shape} wants an image of {size}, got {picture.shape[:2]}"
        )
    return picture


def _block(block: Any, shape: tuple[int, ...]) -> Any:
    values = array(block)
    if values.shape == (4,):
        top, first, height, width = values.astype(int)
        return slice(top, top + height), slice(first, first + width)
    return values.reshape(shape) > 0
