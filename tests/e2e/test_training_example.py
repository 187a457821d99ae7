"""The example that H-JEPA's README names, part by part."""

import importlib.util
import pathlib

import pytest

pytestmark = pytest.mark.slow

PATH = pathlib.Path(__file__).parents[2] / "examples" / "training_example.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("training_example", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("part", "printed"),
    [
        ("basic", "after 33 steps"),
        ("resume", "went on at epoch 2, step 22"),
        ("hierarchical", "rates at the end"),
        ("monitoring", "images seen"),
        ("checkpoints", "best of epoch 3"),
    ],
)
def test_a_part_runs_and_says_so(part, printed, example, tmp_path, capsys):
    example.main([part, "--folder", str(tmp_path)])
    assert printed in capsys.readouterr().out
    assert (tmp_path / part).is_dir()
