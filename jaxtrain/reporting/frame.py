"""Build a self-contained HTML page: document, sections, tables; no requests."""

import html
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from jaxtrain.reporting.charts import number


def document(title: str, body: Sequence[str], refresh_s: int | None = None) -> str:
    """Return the text of a page. body: sections; empty ones are left out. refresh_s: after so many seconds a browser
    loads it again."""
    again = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    style, script = (
        pathlib.Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "charts.js")
    )
    inside = "\n".join(part for part in body if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{again}"
        f"<title>{html.escape(title)}</title><style>{style}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1>\n{inside}\n<script>{script}</script></body></html>\n"
    )


def section(heading: str, content: str) -> str:
    """Return a section of a heading and its content, which is HTML already."""
    return f"<section><h2>{html.escape(heading)}</h2>{content}</section>"


def controls(runs: Sequence[tuple[str, int]] = ()) -> str:
    """Return what charts.js shows above the charts: a slider for smoothing, and which runs (name, colour) are drawn."""
    box = '<input type="checkbox" value="{0}" checked><i class="key c{0}"></i>'
    boxes = "".join(f"<label>{box.format(colour)}{html.escape(name)}</label>" for name, colour in runs)
    slider = '<input type="range" min="0" max="0.99" step="0.01" value="0">'
    return f'<div class="controls" hidden><label>smooth training {slider}<output></output></label>{boxes}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts, which it escapes. A cell that is a number does not break."""
    figure = lambda value: ' class="n"' if re.fullmatch(r"[-+]?[0-9][0-9.,]*(e[-+]?[0-9]+)?[kMGT%]?", value) else ""
    cell = lambda tag, value: f"<{tag}{figure(value)}>{html.escape(value)}</{tag}>"
    line = lambda tag, values: "<tr>" + "".join(cell(tag, value) for value in values) + "</tr>"
    return f'<div class="wide"><table>{line("th", head)}{"".join(line("td", row) for row in rows)}</table></div>'


def shown(value: Any) -> str:
    """Format a value: numbers briefly, None as an empty string."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else number(value)
