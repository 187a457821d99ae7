"""Line charts as SVG text, made without a library; charts.js smooths them and shows values under the pointer."""

import html
import math
from collections.abc import Sequence

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 40
MOST_POINTS = 600
DASHED = "4 3"
LARGEST = 1e300  # largest coordinate of a point; the difference of two larger ones may be infinite


def line_chart(
    title: str, series: Sequence[tuple[str, int, bool, Points]], axis: str | None = None, across: str = "step"
) -> str:
    """Return a figure with its caption. series: (label, colour number, dashed, points of (step, value)). axis: the
    value axis's title, with its unit; the chart's if left out. across: the other axis's.

    The value axis is logarithmic if all values are positive and span three decades. Points that are not finite, or
    beyond 1e300, break the line.
    """
    finite = [(x, y) for *_, points in series for x, y in points if _is_drawn(x, y)]
    if not finite:
        return ""
    values = [y for _, y in finite]
    logarithmic = min(values) > 0 and max(values) / min(values) >= 1000
    scale = math.log10 if logarithmic else float
    low, high = _widen(min(map(scale, values)), max(map(scale, values)))
    first, last = _widen(min(x for x, _ in finite), max(x for x, _ in finite), 0)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    place_x = lambda x: LEFT + (x - first) / (last - first) * (right - LEFT)
    place_y = lambda y: bottom - (scale(y) - low) / (high - low) * (bottom - TOP)

    parts = []
    for value in _log_ticks(low, high) if logarithmic else _ticks(low, high):
        y = bottom - ((math.log10(value) if logarithmic else value) - low) / (high - low) * (bottom - TOP)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for value in _ticks(first, last):
        x = place_x(value)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{number(value)}</text>')
    for label, colour, dashed, points in series:
        dash = f' stroke-dasharray="{DASHED}"' if dashed else ""
        name = html.escape(label)
        for piece in _pieces(thin(points)):
            path = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in piece)
            tip = f"{name}: last {number(piece[-1][1])} at {across} {number(piece[-1][0])}"
            if len(piece) == 1:
                at_x, _, at_y = path.partition(",")
                parts.append(
                    f'<circle class="run c{colour}" r="2.5" cx="{at_x}" cy="{at_y}"><title>{tip}</title></circle>'
                )
                continue
            exact = " ".join(f"{x:g},{y:.6g}" for x, y in piece)
            parts.append(
                f'<polyline class="run line c{colour}"{dash} data-label="{name}" data-values="{exact}" points="{path}">'
                f"<title>{tip}</title></polyline>"
            )
    name, upright = html.escape(title), html.escape(axis or title)
    middle = (LEFT + right) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(across)}</text>')
    parts.append(
        f'<text class="tick" transform="translate(11 {(TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">'
        f"{upright}</text>"
    )
    ranges = f'data-box="{LEFT} {TOP} {right} {bottom}" data-range="{first:.9g} {last:.9g} {low:.9g} {high:.9g}"'
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name} by {html.escape(across)}" {ranges} '
        f'data-across="{html.escape(across)}"{" data-log" if logarithmic else ""}>{"".join(parts)}</svg>'
    )
    note = " (log scale)" if logarithmic else ""
    return f"<figure><figcaption>{name}{note}</figcaption>{drawing}</figure>"


def thin(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Return at most about `most` points: the lowest and the highest of every stretch, so that no spike disappears."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    kept = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = [min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])]
        kept += sorted(set(ends))
    return [*kept, points[-1]] if kept[-1] != points[-1] else kept


def number(value: float) -> str:
    """Format a number briefly: 12,000 -> 12k, 0.00012 -> 1.2e-4."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size < 1e-3:
        digits, _, power = f"{value:.2g}".partition("e") if size < 1e-4 else (f"{value:.3g}", "", "")
        return f"{digits}e{int(power)}" if power else digits
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.4g}{suffix}"
    return f"{value:.4g}"


def _pieces(points: Points) -> list[list[tuple[float, float]]]:
    """Split points into runs of values that can be drawn."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if _is_drawn(x, y):
            pieces[-1].append((x, y))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _is_drawn(x: float, y: float) -> bool:
    return abs(x) < LARGEST and abs(y) < LARGEST


def _widen(low: float, high: float, share: float = 0.04) -> tuple[float, float]:
    if high - low < 1 / LARGEST:
        room = abs(low) * 0.1 or 1.0
        return low - room, high + room
    return low - share * (high - low), high + share * (high - low)


def _ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Return multiples, between low and high, of a round step (1, 2 or 5 times a power of ten)."""
    raw = (high - low) / wanted
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    start = math.ceil(low / step)
    return [round(i * step, 12) for i in range(start, math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten between low and high, which are logarithms."""
    return [10.0**power for power in range(math.ceil(low), math.floor(high) + 1)]
