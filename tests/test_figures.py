"""Every figure of README and docs comes from a command and a file of the repository; none is older than need be."""

import datetime
import json
import pathlib
import re

import pytest

from benchmarks import page as benchmarks_page
from jaxtrain.runtime import gpu_cards
from tests import figures

ROOT = figures.ROOT
PAGES = [page for page in figures.pages() if str(page.relative_to(ROOT)) not in figures.GENERATED]
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DATE = re.compile(
    rf"\b(20[0-9]{{2}}-[0-9]{{2}}(?:-[0-9]{{2}})?)\b|\b([0-9]{{1,2}} (?:{MONTHS})|(?:{MONTHS}) 20[0-9]{{2}})\b"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_figure_with_a_unit_is_traced_or_stated_as_what_it_is(page):
    assert figures.untraced(page) == [], (
        "name its file in SOURCES of tests/figures.py, write it by `python -m benchmarks.page`, or drop it"
    )


def test_a_traced_figure_is_that_of_its_file():
    for name, sources in figures.SOURCES.items():
        for words, (path, text) in sources.items():
            assert text in (ROOT / path).read_text(), f"{name}: {words!r} is not in {path} any more: {text!r}"


def test_what_is_listed_stands_on_its_page():
    gone = [
        (name, words)
        for listed in (figures.SOURCES, figures.STATED)
        for name, parts in listed.items()
        for words in parts
        if words not in figures.text(ROOT / name)
    ]
    assert gone == []


def test_benchmarks_and_the_tables_of_other_pages_are_what_the_results_say():
    stale = [str(path.relative_to(ROOT)) for path in benchmarks_page.stale()]
    assert stale == [], "run `python -m benchmarks.page`"


def test_a_changed_result_makes_the_pages_stale(monkeypatch):
    """The table of README follows its files: nothing on it is typed."""
    found = benchmarks_page.on_gpus()
    monkeypatch.setattr(
        benchmarks_page, "on_gpus", lambda: [(path, r | {"ratio": r["ratio"] + 1}) for path, r in found]
    )
    assert {path.name for path in benchmarks_page.stale()} == {"README.md", "benchmarks.md", "benchmarks_gpu.svg"}


def test_every_result_file_is_one_that_the_results_page_describes():
    described = re.findall(r"`([^`]+?)`", (ROOT / "benchmarks/results/README.md").read_text())
    for path in (ROOT / "benchmarks/results").rglob("*.json"):
        name = str(path.relative_to(ROOT / "benchmarks/results"))
        assert any(
            pathlib.PurePath(name).match(pattern.rstrip("/") + "/*" * pattern.endswith("/")) for pattern in described
        ), name
        json.loads(path.read_text())


def test_the_memory_of_each_gpu_on_the_launching_page_is_that_of_its_card():
    text = (ROOT / "docs/launching.md").read_text().partition("### Kinds of GPU")[2]
    rows = re.findall(r"^\| ((?:`[\w-]+`(?:, )?)+) \| ([0-9, ]+) GiB \|", text, re.M)
    shown = {}
    for names, sizes in rows:
        shown |= dict(zip(re.findall("`([^`]+)`", names), map(int, sizes.split(", ")), strict=True))
    assert shown == {name: round(card.memory / 2**30) for name, card in gpu_cards.GPUS.items()}


def test_no_statement_is_dated_before_the_newest_result():
    """A date on a page written by hand is that of the newest result or later, or stands in DATED with its reason."""
    newest = max(
        re.findall(r"20[0-9]{2}-[0-9]{2}-[0-9]{2}", " ".join(p.name for p in (ROOT / "benchmarks/results").iterdir()))
    )
    old = []
    for page in PAGES:
        text = re.sub(r"`[^`]*`", "", figures.text(page))
        for match in DATE.finditer(text):
            if _day(match.group()) < datetime.date.fromisoformat(newest):
                old.append((str(page.relative_to(ROOT)), match.group()))
    assert sorted(set(old)) == sorted(figures.DATED)


def _day(text: str) -> datetime.date:
    """The last day that a date may mean; without a year, this project's."""
    if re.fullmatch("[0-9-]+", text):
        parts = [int(part) for part in text.split("-")]
        return datetime.date(*parts) if len(parts) == 3 else datetime.date(parts[0], parts[1], 28)
    first, _, last = text.partition(" ")
    if first.isdigit():
        return datetime.date(2026, MONTHS.split("|").index(last) + 1, int(first))
    return datetime.date(int(last), MONTHS.split("|").index(first) + 1, 28)


def test_the_page_of_certificates_is_what_its_results_say():
    from benchmarks import certificates

    known = json.loads(certificates.RESULTS.read_text())
    assert certificates.page(known) == certificates.PAGE.read_text()
