"""Line charts as SVG text, made without a library; they need neither scripts nor a network."""

import html
import math
from collections.abc import Sequence

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 480, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 22, 42
MOST_POINTS = 600
MOST_MARKS = 60  # points of a line that show their value in a tooltip
DASHED = "4 3"
LARGEST = 1e300  # largest coordinate of a point; the difference of two larger ones may be infinite


def line_chart(title: str, series: Sequence[tuple[str, int, bool, Points]]) -> str:
    """Return a figure with its caption. series: (label, colour number, dashed, points of (step, value)).

    The value axis is logarithmic if all values are positive and span three decades. Points that are not finite, or
    beyond 1e300, break the line. Some points of a line, including its peaks, show their value in a tooltip.
    """
    finite = [(x, y) for *_, points in series for x, y in points if _is_drawn(x, y)]
    if not finite:
        return ""
    values = [y for _, y in finite]
    logarithmic = min(values) > 0 and max(values) / min(values) >= 1000
    scale = math.log10 if logarithmic else float
    low, high = _widen(min(map(scale, values)), max(map(scale, values)))
    first, last = _widen(min(x for x, _ in finite), max(x for x, _ in finite), 0)
    place_x = lambda x: LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT)
    place_y = lambda y: HEIGHT - BOTTOM - (scale(y) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for value in _log_ticks(low, high) if logarithmic else _ticks(low, high):
        y = place_y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for value in _ticks(first, last):
        x = place_x(value)
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{number(value)}</text>'
        )
    for label, colour, dashed, points in series:
        dash = f' stroke-dasharray="{DASHED}"' if dashed else ""
        for piece in _pieces(thin(points)):
            path = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in piece)
            mark = f'<circle class="c{colour}" r="2.5" cx="{path.partition(",")[0]}" cy="{path.partition(",")[2]}"/>'
            shape = mark if len(piece) == 1 else f'<polyline class="line c{colour}"{dash} points="{path}"/>'
            tip = f"{label}: last {number(piece[-1][1])} at step {number(piece[-1][0])}"
            parts.append(f"<g><title>{html.escape(tip)}</title>{shape}</g>")
            for x, y in thin(piece, MOST_MARKS):
                tip = html.escape(f"{label}: {number(y)} at step {number(x)}")
                place = f'cx="{place_x(x):.1f}" cy="{place_y(y):.1f}"'
                parts.append(f'<circle class="mark c{colour}" r="5" {place}><title>{tip}</title></circle>')
    name = html.escape(title)
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    parts.append(f'<text class="tick" x="4" y="13">{name}</text>')
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name} by step">{"".join(parts)}</svg>'
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
