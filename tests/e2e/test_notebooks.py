"""The notebooks run from top to bottom, each in a folder of its own."""

import pathlib

import pytest

pytestmark = pytest.mark.slow

# Beside a CPU build of torch, PyPI's torchvision, which Lightning imports, wants this first.
TORCHVISION = "from torch_bridge.torchvision_operators import declare_torchvision\ndeclare_torchvision()"
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
LAST = {  # what the named cell must show
    "quickstart.ipynb": (5, "Sequential in JAX equals torch in"),
    "fine_tune_lora.ipynb": (4, "8 tensors moved, all of them LoRA's: True"),
    "lightning_script.ipynb": (5, "0.9"),
}


@pytest.mark.parametrize("name", LAST)
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    book = nbformat.read(EXAMPLES / name, as_version=4)
    assert all(not cell.get("outputs") for cell in book.cells)
    book.cells.insert(0, nbformat.v4.new_code_cell(TORCHVISION))
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    place, wanted = LAST[name]
    said = "".join(output.get("text", "") for output in book.cells[place + 1].outputs)
    assert wanted in said
