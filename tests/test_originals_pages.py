"""The checklists of docs/originals name tests and names that exist."""

import importlib
import pathlib
import re

import pytest

pytest.importorskip("torch", reason="the originals' names are torch objects")
ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/originals").glob("*.md"))
SYSTEMS = {"sherlock": "fmri_autoencoder", "splatnlp": "set_completion"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_test_that_a_page_names_exists(page):
    missing = []
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        file = ROOT / path
        if not file.is_file() or (name and f"def {name}(" not in file.read_text()):
            missing.append(f"{path}::{name}")
    assert missing == []


@pytest.mark.parametrize("page", SYSTEMS)
def test_every_name_of_the_facade_is_in_its_pages_table(page):
    system = importlib.import_module(f"jaxtrain.systems.{SYSTEMS[page]}")
    table = (ROOT / f"docs/originals/{page}.md").read_text().partition("## Name by name")[2]
    offered = {name for names in system.ORIGINAL_NAMES.values() for name in names}
    own = {"Lesion", "simulate", "effects", "DataLoader", "DistributedDataParallel"}
    assert {name for name in offered - own if not re.search(rf"\b{name}\b", table)} - {
        name for name in offered if name.startswith("Normalized")
    } == set()
    for name in offered:
        assert getattr(system, name) is not None
