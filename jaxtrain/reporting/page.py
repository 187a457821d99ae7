"""Write one self-contained HTML page about one run, or several side by side."""

import base64
import html
import mimetypes
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxtrain.reporting.charts import line_chart
from jaxtrain.reporting.frame import controls, document, section, shown, table
from jaxtrain.reporting.records import Record
from torch_bridge.atomic_file import write_text

SECTIONS = {  # heading -> first parts of metric names
    "Learning": (),
    "Learning rate": ("lr", "momentum", "loss_scale"),
    "Speed": ("samples_per_s", "input_stall_ratio", "throughput"),
    "Machine": ("system", "time"),
}
UNITS = {  # end of a metric's name -> the value axis's title
    "samples_per_s": "samples per second",
    "tflops_per_device": "TFLOP/s per device",
    "_gb": "GB",
    "_mb": "MB",
    "_ms": "ms",
    "_s": "s",
    "_ratio": "share of the time",
    "_utilisation": "share",
    "goodput": "share of the time",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
}
COLOURS = 6
MOST_ROWS = 50  # rows of the table of evaluations
DEEPEST = 3  # levels of an evaluation's JSON that are shown in a table


def write(records: Sequence[Record], path: pathlib.Path) -> pathlib.Path:
    write_text(path, page(records))
    return path


def page(records: Sequence[Record], refresh_s: int | None = None) -> str:
    """Return the HTML document, with pictures and the charts' script embedded, and without requests.

    refresh_s: seconds after which a browser loads the page again; None: never.
    """
    title = " · ".join(record.name for record in records)
    runs = [(record.name, position % COLOURS) for position, record in enumerate(records)]
    body = [_summary(records), controls(runs if len(runs) > 1 else ())]
    body += [_curves(heading, records) for heading in SECTIONS]
    body += [_history(record) for record in records]
    body += [_evaluations(record) + _pictures(record) for record in records]
    body += [_settings(records), _environment(records)]
    return document(title, body, refresh_s)


def _summary(records: Sequence[Record]) -> str:
    rows: dict[str, list[str]] = {}
    for position, record in enumerate(records):
        newest = max((point["step"] for point in record.points), default=0)
        begun = {"task": record.settings.get("task"), "state": "not finished", "steps": newest}
        summary = record.summary or begun
        throughput = summary.get("throughput", {})
        told = {key: summary[key] for key in ("task", "state", "steps", "epochs", "parameters") if key in summary}
        told |= {f"best {name}": value for name, value in summary.get("best", {}).items()}
        told |= {f"final {name}": value for name, value in summary.get("final", {}).items()}
        told |= {"seconds": summary["seconds"]} if "seconds" in summary else {}
        told |= {name.replace("_per_s", " per second"): value for name, value in throughput.items()}
        told |= {key: summary[key] for key in ("device", "processes", "compile") if key in summary}
        for key, value in told.items():
            rows.setdefault(key, [""] * len(records))[position] = shown(value)
    return section("Summary", table(["", *_names(records)], [[key, *values] for key, values in rows.items()]))


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
        charts.append(line_chart(name, [one for one in series if one[3]], _axis(name)))
    drawn = "".join(charts)
    return section(heading, f'{_legend(records)}<div class="charts">{drawn}</div>') if drawn else ""


def _axis(metric: str) -> str:
    """Return the title of a metric's axis: its unit if its name tells one, else the name without its group."""
    return next((unit for end, unit in UNITS.items() if metric.endswith(end)), metric.rpartition("/")[2])


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


def _history(record: Record) -> str:
    """Return a table with a row per evaluation; of many, only the last ones."""
    rows = [point for point in record.points if point["split"] != "train" and point["values"]]
    names = list(dict.fromkeys(name for point in rows for name in point["values"] if _heading(name) == "Learning"))
    if not rows or not names:
        return ""
    cells = [
        [f"{point['step']:,}", point["split"], *(shown(point["values"].get(name)) for name in names)]
        for point in rows[-MOST_ROWS:]
    ]
    left_out = f"<p>The last {MOST_ROWS} of {len(rows)}.</p>" if len(rows) > MOST_ROWS else ""
    return section(f"Evaluations of {record.name}", left_out + table(["step", "split", *names], cells))


def _evaluations(record: Record) -> str:
    parts = []
    for name, content in record.tables.items():
        rows = [[key, shown(value)] for key, value in _leaves(content)]
        if rows:
            inner = table(["", "value"], rows)
            parts.append(f"<details open><summary>{html.escape(name)}</summary>{inner}</details>")
    return section(f"Reports of {record.name}", "".join(parts)) if parts else ""


def _leaves(content: Any, prefix: str = "", depth: int = 0) -> list[tuple[str, Any]]:
    """Return the numbers and short strings of nested JSON, by dotted path; lists and long strings are left out."""
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
    return section(f"Pictures of {record.name}", f'<div class="charts">{"".join(figures)}</div>') if figures else ""


def _settings(records: Sequence[Record]) -> str:
    keys = list(dict.fromkeys(key for record in records for key in record.settings))
    rows = [[key, *(shown(record.settings.get(key, "")) for record in records)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    parts = []
    if len(records) > 1:
        parts.append("<h3>What differs</h3>" + table(["key", *_names(records)], differing))
    whole = table(["key", *_names(records)], rows)
    parts.append(f"<details><summary>All {len(rows)} settings</summary>{whole}</details>")
    return section("Config", "".join(parts))


def _environment(records: Sequence[Record]) -> str:
    rows: dict[str, list[str]] = {}
    for position, record in enumerate(records):
        for key, value in _leaves(record.environment):
            rows.setdefault(key, [""] * len(records))[position] = shown(value)
    whole = table(["", *_names(records)], [[key, *values] for key, values in rows.items()])
    return section("Environment", whole) if rows else ""


def _names(records: Sequence[Record]) -> list[str]:
    return [record.name for record in records]
