"""The page about a run says what the run folder holds, and asks nobody for anything."""

import json
import math
import re

import pytest

from jaxtrain import report
from jaxtrain.errors import UserError
from jaxtrain.reporting import charts, records
from tests.browser import needs_browser, open_page, requests_of


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "first", lr=1e-3)


def write_run(folder, lr):
    (folder / "reports").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"task: digits.classify\noptim:\n  lr: {lr}\n")
    (folder / "summary.json").write_text(json.dumps({"task": "digits.classify", "steps": 3, "best": {"accuracy": 0.5}}))
    points = [
        {"step": step, "epoch": step, "split": split, "values": {"loss": math.exp(-step), "lr": lr}}
        for step in range(1, 40)
        for split in ("train", "validation")
    ]
    cut = '{"step": 40, "epoch": 40, "spl'
    (folder / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points) + cut)
    (folder / "reports/scores.json").write_text(json.dumps({"f1": {"macro": 0.75}, "note": "<b>&"}))
    (folder / "reports/picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return folder


def test_the_page_holds_summary_curves_config_tables_and_pictures_without_a_request(folder, capsys):
    assert report.main(["--run", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    for wanted in ("digits.classify", 'aria-label="loss by step"', "optim.lr", "f1.macro", "0.75", "&lt;b&gt;&amp;"):
        assert wanted in page
    assert "data:image/png;base64," in page
    assert requests_of(page) == []
    assert page.count("<script") == page.count("<script>") == 1


def test_a_curve_tells_its_values_and_every_evaluation_is_a_row(folder):
    assert report.main(["--run", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    line = re.search(r'data-label="first, validation" data-values="([^"]*)"', page).group(1)
    assert line.startswith("1,0.367879 2,0.135335 ")
    for axis in ("step", "loss", "learning rate"):
        assert f'text-anchor="middle">{axis}</text>' in page
    rows = page.partition("Evaluations of first")[2].partition("</table>")[0]
    assert rows.count("<td>validation</td>") == 39
    assert '<td class="n">39</td><td>validation</td>' in rows


def test_runs_side_by_side_show_the_settings_that_differ(folder, tmp_path):
    other = write_run(tmp_path / "second", lr=3e-3)
    output = tmp_path / "both.html"
    assert report.main(["--run", str(folder), "--run", str(other), "--output", str(output)]) == 0
    differing = output.read_text().partition("What differs")[2].partition("</table>")[0]
    assert "0.001" in differing
    assert "0.003" in differing
    assert "task" not in differing


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert report.main(["--run", str(tmp_path)]) == 2
    assert "holds no config.yaml" in capsys.readouterr().err


def test_a_line_of_the_metrics_that_was_cut_off_is_left_out(folder):
    assert records.read(folder).series("loss", "train")[-1][0] == 39


def test_a_long_curve_keeps_its_spike():
    points = [(float(step), 1.0) for step in range(10_000)]
    points[5_000] = (5_000.0, 99.0)
    thinned = charts.thin(points)
    assert len(thinned) <= charts.MOST_POINTS + 1
    assert (5_000.0, 99.0) in thinned


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (12_000, "12k"), (2.5e6, "2.5M"), (1.2e-5, "1.2e-5"), (0.1234567, "0.1235"), (math.nan, "nan")],
)
def test_numbers_are_short(value, shown):
    assert charts.number(value) == shown


def test_a_curve_without_a_finite_value_draws_nothing():
    assert charts.line_chart("loss", [("run", 0, False, [(1.0, math.nan)])]) == ""


@needs_browser
@pytest.mark.parametrize("width", [400, 1100])
def test_a_browser_opens_the_page_without_complaint(folder, width):
    report.main(["--run", str(folder)])
    document, complaints = open_page(folder / "report.html", width)
    assert complaints == []
    assert document.count("<svg") == 2


PROBE = """<script>{
const line = () => document.querySelector('svg[aria-label="loss by step"] polyline + polyline');
const before = line().getAttribute("points");
const slider = document.querySelector(".controls input[type=range]");
slider.value = 0.9;
slider.dispatchEvent(new Event("input"));
document.body.dataset.smoothed = before !== line().getAttribute("points");
const chart = document.querySelector("svg[data-box]"), box = chart.getBoundingClientRect();
chart.dispatchEvent(new PointerEvent("pointermove", { clientX: box.x + box.width / 2, clientY: box.y + 20 }));
document.body.dataset.tip = document.querySelector(".tip").textContent;
const run = document.querySelector(".controls input[type=checkbox]");
run.click();
document.body.dataset.off = document.querySelectorAll(".run.c0.off").length;
document.body.dataset.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
}</script>"""


@needs_browser
def test_the_slider_smooths_the_pointer_tells_values_and_a_run_is_switched_off(folder, tmp_path):
    other = write_run(tmp_path / "second", lr=3e-3)
    output = tmp_path / "both.html"
    report.main(["--run", str(folder), "--run", str(other), "--output", str(output)])
    output.write_text(output.read_text().replace("</body>", PROBE + "</body>"))
    document, complaints = open_page(output, 500)
    assert complaints == []
    seen = dict(re.findall(r'data-(smoothed|tip|off|wide)="([^"]*)"', document))
    assert seen["smoothed"] == "true"
    assert re.match(r"step 17first, train: \S+ \(4\.140e-8\)first, validation: 4\.140e-8second", seen["tip"])
    assert int(seen["off"]) >= 2
    assert seen["wide"] == "0"


def test_reading_an_absent_folder_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="no run folder"):
        records.read(tmp_path / "absent")


@pytest.mark.parametrize("value", [1e308, math.inf, 5e-324])
def test_a_chart_draws_the_points_that_fit_beside_one_that_does_not(value):
    points = [(1, 1.0), (2, -value), (3, value), (4, 2.0), (math.inf, 1.0)]
    assert 'aria-label="loss by step"' in charts.line_chart("loss", [("train", 1, False, points)])
