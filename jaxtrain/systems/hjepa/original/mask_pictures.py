"""Pictures of masks on the patch grid, with matplotlib."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def grids(
    panels: Mapping[str, Any],
    sides: tuple[int, int] | Sequence[tuple[int, int]],
    figsize: tuple[float, float],
    save_path: Any = None,
) -> Any:
    """Draw masks [patch] by title, each on its grid of (rows, columns); return the figure.

    sides: of all panels, or one per panel. save_path: write the figure there too.
    """
    from matplotlib.figure import Figure

    each = [sides] * len(panels) if sides and isinstance(sides[0], int) else list(sides)
    figure = Figure(figsize=figsize)
    columns = min(4, max(1, len(panels)))
    for number, ((title, mask), (rows, width)) in enumerate(zip(panels.items(), each, strict=True), 1):
        axes = figure.add_subplot(math.ceil(len(panels) / columns), columns, number)
        values = np.asarray(mask.cpu() if hasattr(mask, "cpu") else mask, float)
        axes.imshow(values.reshape(rows, width), vmin=0, interpolation="nearest")
        axes.set_title(title)
        axes.set_axis_off()
    figure.tight_layout()
    if save_path is not None:
        figure.savefig(save_path)
    return figure
