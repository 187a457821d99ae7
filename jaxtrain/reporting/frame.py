"""The frame of a self-contained page of HTML: document, sections, tables. No script, no request."""

import html
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxtrain.reporting.charts import number


def document(title: str, body: Sequence[str]) -> str:
    """The whole text of a page. body: sections; empty ones are left out."""
    style = pathlib.Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1>\n" + "\n".join(part for part in body if part) + "\n</body></html>\n"
    )


def section(heading: str, content: str) -> str:
    """A heading and what stands below it, HTML already."""
    return f"<section><h2>{html.escape(heading)}</h2>{content}</section>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts, which are escaped."""
    cell = lambda tag, value: f"<{tag}>{html.escape(value)}</{tag}>"
    line = lambda tag, values: "<tr>" + "".join(cell(tag, value) for value in values) + "</tr>"
    return f'<div class="wide"><table>{line("th", head)}{"".join(line("td", row) for row in rows)}</table></div>'


def shown(value: Any) -> str:
    """A value for people: numbers short, None empty."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else number(value)
