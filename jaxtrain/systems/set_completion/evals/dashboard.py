"""Write the features of an autoencoder as one self-contained HTML file: no external script, style sheet or picture."""

import html
import pathlib
from collections.abc import Sequence

from jaxtrain.systems.set_completion.evals.feature_report import Feature, FeatureReport
from torch_bridge.atomic_file import write_text

# The content security policy forbids all requests, so the browser enforces that the page is self-contained.
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<link rel="icon" href="data:,"/>
<title>{title}</title>
<style>
body {{ font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1b1f24; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.1rem; margin: 2rem 0 .5rem; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: .15rem .7rem .15rem 0; text-align: left; vertical-align: top; }}
td.n {{ font-variant-numeric: tabular-nums; text-align: right; }}
details {{ border-top: 1px solid #d5dae0; padding: .4rem 0; }}
summary {{ cursor: pointer; font-variant-numeric: tabular-nums; }}
.columns {{ display: flex; flex-wrap: wrap; gap: 2rem; margin: .6rem 0 .6rem 1rem; }}
.up {{ color: #0a6b3d; }} .down {{ color: #a32020; }}
.token {{ background: #eef1f4; border-radius: 3px; padding: 0 .3rem; margin-right: .2rem; white-space: nowrap; }}
svg rect {{ fill: #4a7ab5; }}
</style>
</head>
<body>
"""


def write_dashboard(report: FeatureReport, path: pathlib.Path, title: str) -> pathlib.Path:
    """Write the page and return its path; it takes about 4 kB per described feature."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [_HEAD.format(title=html.escape(title)), f"<h1>{html.escape(title)}</h1>", _summary(report)]
    parts += ["<h2>How often features are on</h2>", _density_histogram(report.features)]
    parts += [f"<h2>{len(report.features)} features, most frequent first</h2>"]
    parts += [_feature(feature) for feature in report.features]
    write_text(path, "\n".join([*parts, "</body>", "</html>", ""]))
    return path


def _summary(report: FeatureReport) -> str:
    facts = {"sets measured": report.sets, "features alive": report.alive, "features dead": report.dead}
    rows = [(name, f"{value:,}") for name, value in facts.items()]
    rows += [(name.replace("_", " "), f"{value:.4g}") for name, value in report.metrics.items()]
    return _table(rows)


def _feature(feature: Feature) -> str:
    best = ", ".join(token for token, _ in feature.raises[:3])
    return "".join(
        [
            f'<details id="feature-{feature.number}"><summary><b>{feature.number}</b> on in {feature.density:.2%}, '
            f"mean {feature.mean:.3g}, peak {feature.peak:.3g}; raises {html.escape(best)}</summary>",
            '<div class="columns">',
            f"<div>values when on<br/>{_bars(feature.histogram)}<br/>0 to {feature.peak:.3g}; "
            f"average usage {feature.usage:.2g}</div>",
            f'<div class="up">raises, logit per unit{_effects(feature.raises)}</div>',
            f'<div class="down">lowers, logit per unit{_effects(feature.lowers)}</div>',
            f"<div>sets that turn it on most{_examples(feature.examples)}</div>",
            "</div></details>",
        ]
    )


def _effects(effects: Sequence[tuple[str, float]]) -> str:
    return _table([(token, f"{value:+.3f}") for token, value in effects])


def _examples(examples) -> str:
    rows = []
    for value, weapon, tokens in examples:
        shown = "".join(f'<span class="token">{html.escape(token)}</span> ' for token in tokens) or "nothing"
        rows.append(f'<tr><td class="n">{value:.3f}</td><td>{html.escape(weapon)}</td><td>{shown}</td></tr>')
    return f"<table>{''.join(rows)}</table>"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = [f'<tr><td>{html.escape(name)}</td><td class="n">{html.escape(value)}</td></tr>' for name, value in rows]
    return f"<table>{''.join(cells)}</table>"


def _density_histogram(features: Sequence[Feature], bins: int = 20) -> str:
    counts = [0] * bins
    for feature in features:
        counts[min(bins - 1, int(feature.density * bins))] += 1
    return f"<div>{_bars(counts)}<br/>share of the sets, 0 to 1</div>"


def _bars(counts: Sequence[int], width: int = 240, height: int = 60) -> str:
    top, step = max([*counts, 1]), width / len(counts)
    bars = [
        f'<rect x="{i * step:.1f}" y="{height - height * n / top:.1f}" width="{step - 1:.1f}" '
        f'height="{height * n / top:.1f}"><title>{n}</title></rect>'
        for i, n in enumerate(counts)
    ]
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">{"".join(bars)}</svg>'
