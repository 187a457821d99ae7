"""One self-contained page of HTML about one run, or several side by side."""

import base64
import html
import mimetypes
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxtrain.reporting.charts import line_chart, number
from jaxtrain.reporting.records import Record

SECTIONS = {  # heading -> first parts of metric names
    "Learning": (),
    "Learning rate": ("lr", "momentum", "loss_scale"),
    "Speed": ("samples_per_s", "input_stall_ratio", "throughput"),
    "Machine": ("system", "time"),
}
COLOURS = 6
DEEPEST = 3  # levels of an evaluation's JSON that become a table


def write(records: Sequence[Record], path: pathlib.Path) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(records), encoding="utf-8")
    return path


def page(records: Sequence[Record]) -> str:
    """The whole document. No script, no request: pictures are inside."""
    title = " · ".join(record.name for record in records)
    body = [_summary(records)]
    body += [_curves(heading, records) for heading in SECTIONS]
    body += [_evaluations(record) + _pictures(record) for record in records]
    body += [_settings(records), _environment(records)]
    style = pathlib.Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1>\n" + "\n".join(part for part in body if part) + "\n</body></html>\n"
    )


def _summary(records: Sequence[Record]) -> str:
    rows: dict[str, list[str]] = {}
    for position, record in enumerate(records):
        summary = record.summary or {"state": "not finished"}
        throughput = summary.get("throughput", {})
        told = {key: summary[key] for key in ("task", "state", "steps", "epochs", "parameters") if key in summary}
        told |= {f"best {name}": value for name, value in summary.get("best", {}).items()}
        told |= {f"final {name}": value for name, value in summary.get("final", {}).items()}
        told |= {"seconds": summary["seconds"]} if "seconds" in summary else {}
        told |= {name.replace("_per_s", " per second"): value for name, value in throughput.items()}
        told |= {key: summary[key] for key in ("device", "processes", "compile") if key in summary}
        for key, value in told.items():
            rows.setdefault(key, [""] * len(records))[position] = _shown(value)
    return _section("Summary", _table(["", *_names(records)], [[key, *values] for key, values in rows.items()]))


def _curves(heading: str, records: Sequence[Record]) -> str:
    names = list(dict.fromkeys(name for record in records for name in record.metrics()))
    charts = []
    for name in names:
        if _heading(name) != heading:
            continue
        series = [
            (f"{record.name}, {split}", position % COLOURS, split != "train", record.series(name, split))
            for position, record in enumerate(records)
            for split in dict.fromkeys(point["split"] for point in record.points)
        ]
        charts.append(line_chart(name, [one for one in series if one[3]]))
    drawn = "".join(charts)
    return _section(heading, f'{_legend(records)}<div class="charts">{drawn}</div>') if drawn else ""


def _heading(metric: str) -> str:
    first = metric.partition("/")[0]
    return next((heading for heading, firsts in SECTIONS.items() if first in firsts), "Learning")


def _legend(records: Sequence[Record]) -> str:
    runs = "".join(
        f'<span><i class="key c{i % COLOURS}"></i>{html.escape(record.name)}</span>'
        for i, record in enumerate(records)
        if len(records) > 1
    )
    return f'<p class="legend">{runs}<span>solid: training</span><span>dashed: evaluation</span></p>'


def _evaluations(record: Record) -> str:
    parts = []
    for name, content in record.tables.items():
        rows = [[key, _shown(value)] for key, value in _leaves(content)]
        if rows:
            table = _table(["", "value"], rows)
            parts.append(f"<details open><summary>{html.escape(name)}</summary>{table}</details>")
    return _section(f"Evaluation of {record.name}", "".join(parts)) if parts else ""


def _leaves(content: Any, prefix: str = "", depth: int = 0) -> list[tuple[str, Any]]:
    """Numbers and words of nested JSON by dotted path; long lists are left to the file."""
    if isinstance(content, dict) and depth < DEEPEST:
        return [leaf for key, value in content.items() for leaf in _leaves(value, f"{prefix}{key}.", depth + 1)]
    plain = isinstance(content, int | float | str | bool) and len(str(content)) <= 200
    return [(prefix.rstrip("."), content)] if plain else []


def _pictures(record: Record) -> str:
    figures = []
    for path in record.pictures:
        kind = mimetypes.guess_type(path.name)[0] or "image/png"
        data = base64.b64encode(path.read_bytes()).decode()
        name = html.escape(str(path.relative_to(record.folder)))
        figures.append(
            f'<figure><figcaption>{name}</figcaption><img alt="{name}" src="data:{kind};base64,{data}"></figure>'
        )
    return _section(f"Pictures of {record.name}", f'<div class="charts">{"".join(figures)}</div>') if figures else ""


def _settings(records: Sequence[Record]) -> str:
    keys = list(dict.fromkeys(key for record in records for key in record.settings))
    rows = [[key, *(_shown(record.settings.get(key, "")) for record in records)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    parts = []
    if len(records) > 1:
        parts.append("<h3>What differs</h3>" + _table(["key", *_names(records)], differing))
    whole = _table(["key", *_names(records)], rows)
    parts.append(f"<details><summary>All {len(rows)} settings</summary>{whole}</details>")
    return _section("Config", "".join(parts))


def _environment(records: Sequence[Record]) -> str:
    rows: dict[str, list[str]] = {}
    for position, record in enumerate(records):
        for key, value in _leaves(record.environment):
            rows.setdefault(key, [""] * len(records))[position] = _shown(value)
    table = _table(["", *_names(records)], [[key, *values] for key, values in rows.items()])
    return _section("Environment", table) if rows else ""


def _names(records: Sequence[Record]) -> list[str]:
    return [record.name for record in records]


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{html.escape(heading)}</h2>{content}</section>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cell = lambda tag, value: f"<{tag}>{html.escape(value)}</{tag}>"
    line = lambda tag, values: "<tr>" + "".join(cell(tag, value) for value in values) + "</tr>"
    return f'<div class="wide"><table>{line("th", head)}{"".join(line("td", row) for row in rows)}</table></div>'


def _shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else number(value)
