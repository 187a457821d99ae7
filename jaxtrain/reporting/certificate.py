"""Write a certificate as JSON and as a self-contained HTML page that you can pass on."""

import html
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxtrain import strict_json
from jaxtrain.reporting.charts import line_chart
from jaxtrain.reporting.frame import document, section, shown, table
from torch_bridge.atomic_file import write_text

MEANING = (
    "Every figure is a relative difference: the L2 norm of jaxtrain's numbers less torch's, divided by the norm of "
    "torch's. Both sides started from the same weights and saw the same batches. A difference beyond its limit "
    "departs; layers are listed in the order in which they finish, so the first that departs is where to look."
)


def write(found: Mapping[str, Any], folder: str | pathlib.Path) -> list[pathlib.Path]:
    """Write certificate.html and certificate.json into a folder; `found` is `Certificate.as_dict()`."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"certificate.html": page(found), "certificate.json": strict_json.dumps(found, indent=1) + "\n"}
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def page(found: Mapping[str, Any]) -> str:
    """Return the HTML document."""
    subject = found["subject"]
    verdict = (
        f'<p class="{"agrees" if found["agrees"] else "departs"}"><strong>{html.escape(found["verdict"])}.</strong></p>'
    )
    rows = [[check["verdict"], check["claim"], *_worst(check), _remarks(check)] for check in found["checks"]]
    head = ["verdict", "what was compared", "comparisons", "nearest to its limit", "difference", "limit", "remarks"]
    body = [f"{verdict}<p>{html.escape(MEANING)}</p>", section("Checks", table(head, rows))]
    body.append(_curves(found["curves"]))
    body += [_details(check) for check in found["checks"] if check["differences"]]
    plain = {key: value for key, value in subject.items() if not isinstance(value, Mapping)}
    facts = [[key, shown(value)] for key, value in (plain | subject["versions"]).items()]
    body.append(section("Circumstances", table(["", ""], facts)))
    return document(f"{subject['module']}: torch and jaxtrain", body)


def _worst(check: Mapping[str, Any]) -> list[str]:
    """Return table cells: the number of comparisons, and the one that is nearest to its limit."""
    differences = check["differences"]
    if not differences:
        return ["0", "", "", ""]
    share = lambda one: one["size"] / one["limit"] if one["size"] is not None else float("inf")
    worst = max(differences, key=share)
    return [str(len(differences)), f"{worst['kind']} of {worst['name']}", _size(worst["size"]), _size(worst["limit"])]


def _remarks(check: Mapping[str, Any]) -> str:
    return check["reason"] or "; ".join(check["notes"])


def _size(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


def _curves(curves: Mapping[str, Any]) -> str:
    series = [
        (name, colour, "bf16" in name, list(enumerate(values, 1)))
        for colour, (name, values) in enumerate(curves.items())
    ]
    if not series:
        return ""
    keys = "".join(f'<span><i class="key c{i}"></i>{html.escape(name)}</span>' for i, name in enumerate(curves))
    return section("Loss of every update", f'<p class="legend">{keys}</p>{line_chart("loss", series, across="update")}')


def _details(check: Mapping[str, Any]) -> str:
    rows = [
        [one["kind"], one["name"], _size(one["size"]), _size(one["limit"]), "departs" if one["departs"] else ""]
        for one in check["differences"]
    ]
    inner = table(["kind", "of", "difference", "limit", ""], rows)
    opened = " open" if any(one["departs"] for one in check["differences"]) else ""
    return f"<details{opened}><summary>{html.escape(check['claim'])}: {len(rows)}</summary>{inner}</details>"
