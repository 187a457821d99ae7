"""The tutorials of the site: their outputs belong to their code, and come out again."""

import importlib.util
import pathlib
import re

import pytest

pytest.importorskip("nbclient")
ROOT = pathlib.Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("run_tutorials", ROOT / "docs/run_tutorials.py")
run_tutorials = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run_tutorials)
NAMES = run_tutorials.names()
QUICK = {"own_loop"}  # 20 CPU seconds; the others take up to 70 each


def test_the_site_and_the_gallery_have_every_tutorial():
    site, gallery = (ROOT / "mkdocs.yml").read_text(), (ROOT / "docs/gallery.md").read_text()
    for page in (site, gallery):
        assert sorted(set(re.findall(r"tutorials/(\w+)\.ipynb", page))) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_the_code_that_stands_there(name):
    book = run_tutorials.read(name)
    assert book.metadata["executed"] == run_tutorials.code_hash(book), f"run `python docs/run_tutorials.py {name}`"
    assert any(cell.get("outputs") for cell in book.cells)


@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_fits_a_narrow_page(name):
    lines = [
        line for cell in run_tutorials.read(name).cells if cell.cell_type == "code" for line in cell.source.split("\n")
    ]
    assert max(map(len, lines)) <= 90


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_a_tutorial_prints_what_it_shows(name):
    if name == "plan":
        pytest.importorskip("jax_plugins.xla_cuda13", reason="the extra plan compiles for GPUs")
    shown = run_tutorials.read(name)
    assert run_tutorials.differences(shown, run_tutorials.execute(shown)) == []


def test_another_figure_is_a_difference_and_another_rounding_is_none():
    shown = run_tutorials.read("verify")
    changed = run_tutorials.read("verify")
    cell = next(cell for cell in changed.cells if cell.get("outputs"))
    text = cell.outputs[0]["text"]
    cell.outputs[0]["text"] = text.replace("e-07", "e-06")
    assert run_tutorials.differences(shown, changed) == []
    cell.outputs[0]["text"] = text.replace("30 comparisons", "20 comparisons")
    assert len(run_tutorials.differences(shown, changed)) == 1
