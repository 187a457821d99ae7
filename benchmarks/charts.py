"""Bars of ratios as an SVG that has light and dark colours: for `python -m benchmarks.page`."""

import html
import math
from collections.abc import Sequence

ROW, LEFT, WIDTH, RIGHT, TOP = 26, 250, 430, 60, 34
STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#1c2430}.note{fill:#667085}"
    ".bar{fill:#2f6fd0}.slow{fill:#b54708}.line{stroke:#98a2b3;stroke-width:1}"
    "@media(prefers-color-scheme:dark){text{fill:#e4e7ec}.note{fill:#98a2b3}.bar{fill:#6aa0f0}.slow{fill:#f0a35e}}"
)


def ratios(rows: Sequence[tuple[str, float]], axis: str) -> str:
    """One bar a row from 1 to its ratio on a logarithmic axis; bars to the left of 1 are slower.

    rows: names and ratios above 0. axis: the axis's title.
    """
    least = math.floor(math.log2(min(1, *(ratio for _, ratio in rows))))
    most = math.ceil(math.log2(max(2, *(ratio for _, ratio in rows))))
    at = lambda ratio: round(LEFT + WIDTH * (math.log2(ratio) - least) / (most - least), 1)
    bottom = TOP + ROW * len(rows)
    parts = []
    for power in range(least, most + 1):
        x = at(2.0**power)
        parts.append(
            f'<line class="line" x1="{x}" y1="{TOP - 6}" x2="{x}" y2="{bottom}" opacity="{1 if power == 0 else 0.4}"/>'
        )
        parts.append(f'<text class="note" x="{x}" y="{TOP - 12}" text-anchor="middle">{2.0**power:g}</text>')
    for number, (name, ratio) in enumerate(rows):
        y, start, end = TOP + ROW * number, min(at(1), at(ratio)), max(at(1), at(ratio))
        kind = "bar" if ratio >= 1 else "slow"
        parts.append(f'<text x="{LEFT - 10}" y="{y + 17}" text-anchor="end">{html.escape(name)}</text>')
        parts.append(
            f'<rect class="{kind}" x="{start}" y="{y + 5}" width="{round(end - start, 1)}" height="16" rx="2"/>'
        )
        parts.append(f'<text x="{end + 6}" y="{y + 17}">{ratio:.2f}</text>')
    parts.append(
        f'<text class="note" x="{LEFT + WIDTH / 2}" y="{bottom + 20}" text-anchor="middle">{html.escape(axis)}</text>'
    )
    said = html.escape(f"{axis}: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in rows))
    size = f'viewBox="0 0 {LEFT + WIDTH + RIGHT} {bottom + 30}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{said}"><style>{STYLE}</style>'
    return f"{head}{''.join(parts)}</svg>\n"
