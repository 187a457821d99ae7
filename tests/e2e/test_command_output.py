"""What commands print: one JSON object with --json, nothing with --quiet, and no progress bars outside a terminal."""

import ast
import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tomllib

import pytest

from jaxtrain import commands, evaluate, export, lr_find, report, run, tune
from jaxtrain.config import TrainingConfig
from jaxtrain.train.tracking.tracker import Tracker
from torch_bridge import files, verify

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
TINY = ["--config", "configs/digits_tiny.yaml", "shard.devices=1", "train.steps=2", "train.epochs=null"]
TINY += ["tracking.tensorboard=false", "evaluation.every_steps=2"]
OF_THE_CORE = {
    "absl",
    "etils",
    "joblib",
    "ml_dtypes",
    "orbax",
    "scipy",
    "sklearn",
    "yaml",
}  # other names, or brought by it
ASKED_FOR = {"boto3", "peft", "timm"}  # by a message of its own

READS = """
import argparse
from jaxtrain import commands

def read(arguments):
    import datasets
    datasets.load_dataset("json", data_files="a.jsonl", split="train", cache_dir="cache")

commands.main(read, argparse.Namespace())
"""


@pytest.fixture(scope="module")
def quiet_run(tmp_path_factory):
    """A run folder, and what making it printed."""
    path, said = tmp_path_factory.mktemp("output") / "run", io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        assert run.main([*TINY, f"run.dir={path}", "--quiet"]) == 0
    return path, said.getvalue()


@pytest.fixture
def folder(quiet_run):
    return quiet_run[0]


def one_object(capsys) -> dict:
    """What was printed, which is JSON from end to end; nothing drew a bar."""
    out, err = capsys.readouterr()
    assert "\r" not in out + err
    assert out.count("\n") == 1
    return json.loads(out)


def test_a_quiet_run_prints_nothing_at_all(quiet_run):
    assert quiet_run[1] == ""


def test_a_warning_of_a_quiet_run_goes_to_the_error_output(tmp_path, capsys):
    config = TrainingConfig(run={"quiet": True}, tracking={"tensorboard": False})
    tracker = Tracker(tmp_path, config, active=True)
    tracker.info("epoch 1")
    tracker.warn("the disk is full")
    tracker.close()
    assert capsys.readouterr() == ("", "the disk is full\n")


def test_a_run_outside_a_terminal_draws_no_bar(tmp_path, capfd):
    assert run.main([*TINY, f"run.dir={tmp_path}"]) == 0
    out, err = capfd.readouterr()
    assert "exported" in out
    assert "\r" not in out
    assert err == ""


def test_a_notebook_has_a_progress_bar(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code = (
        "import pathlib\nfrom jaxtrain import TrainingConfig\nfrom jaxtrain.train.tracking.tracker import Tracker\n"
        "config = TrainingConfig(tracking={'tensorboard': False})\n"
        f"tracker = Tracker(pathlib.Path({str(tmp_path)!r}), config, active=True)\n"
        "tracker.progress(0, 8)\ntracker.advance(3)\ntracker.close()"
    )
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(book, timeout=120).execute()
    assert "3/8" in str(book.cells[0].outputs)


def test_reading_a_dataset_of_hugging_faces_draws_no_bar_either(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", READS]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("given", [[], ["--json"]])
def test_evaluate_prints_its_metrics_as_json(folder, given, capsys):
    assert evaluate.main(["--run", str(folder), *given]) == 0
    printed = capsys.readouterr().out
    assert 0 < json.loads(printed)["metrics"]["accuracy"] <= 1
    assert (printed.count("\n") == 1) == bool(given)


def test_export_says_which_files_it_wrote(folder, tmp_path, capsys):
    assert export.main(["--run", str(folder), "--output", str(tmp_path / "a.pt"), "--json"]) == 0
    assert one_object(capsys)["exported"] == [str(tmp_path / "a.pt")]


def test_report_says_where_the_page_is(folder, capsys):
    assert report.main(["--run", str(folder), "--json"]) == 0
    assert one_object(capsys)["report"] == str(folder / "report.html")


def test_verify_gives_every_difference(folder, capsys):
    assert verify.main(["--run", str(folder), "--json"]) == 0
    found = one_object(capsys)
    assert found["agrees"]
    assert {d["kind"] for d in found["differences"]} == {"output", "loss", "gradient"}


def test_lr_find_gives_its_suggestions(tmp_path, capsys):
    given = ["--steps", "5", "--no-plot", "--output", str(tmp_path), f"run.dir={tmp_path}", "--json"]
    assert lr_find.main([*TINY, *given]) == 0
    assert one_object(capsys)["steepest"] > 0
    assert [path.name for path in tmp_path.glob("lr_find.*")] == ["lr_find.json"]


def test_tune_gives_the_best_trial(tmp_path, capsys):
    (tmp_path / "space.yaml").write_text(
        "study: {trials: 1}\noptim.lr: {type: loguniform, low: 1.0e-4, high: 1.0e-2}\n"
    )
    given = ["--space", str(tmp_path / "space.yaml"), "--output", str(tmp_path / "study"), "--no-plots", "--json"]
    assert tune.main([*TINY, *given]) == 0
    found = one_object(capsys)
    assert found["best"]["trial"] == 0
    assert found["trials"] == {"complete": 1, "pruned": 0, "fail": 0}


def test_quiet_and_json_exclude_nothing_that_went_wrong(tmp_path, capsys):
    assert export.main(["--run", str(tmp_path), "--output", "a.pt", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")


def test_a_missing_extra_is_one_message_that_names_it(monkeypatch, folder, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch_bridge.files.pickles", raising=False)
    monkeypatch.delattr(files, "pickles", raising=False)
    assert export.main(["--run", str(folder), "--output", str(tmp_path / "a.pt")]) == 2
    assert capsys.readouterr().err == f"error: this needs torch: pip install -e '{ROOT}[torch]'\n"


def test_every_import_that_an_extra_brings_is_told_as_that_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(commands.EXTRAS.values()) <= set(project["optional-dependencies"])
    core = {line.split(">")[0].replace("-", "_") for line in project["dependencies"]}
    missing = _imported() - core - set(commands.EXTRAS) - OF_THE_CORE - ASKED_FOR - set(sys.stdlib_module_names)
    assert missing - {"jaxtrain", "torch_bridge"} == set()


def _imported() -> set[str]:
    found = set()
    for path in (file for package in ("jaxtrain", "torch_bridge") for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
    return found
