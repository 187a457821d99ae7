"""What commands do where a call on a file fails: one sentence with the path, and nothing lost."""

import argparse
import errno
import fcntl
import functools
import io
import json
import mmap
import os
import pathlib
import subprocess
import sys
import tempfile
import types

import numpy as np
import pytest

from jaxtrain import commands
from jaxtrain.data import shared_memory
from jaxtrain.errors import DataError, at, file_sentence
from jaxtrain.tuning.sweep import SweepResult, SweepRun
from tests.failing_files import ROOT
from torch_bridge import files
from torch_bridge.atomic_file import replacing, write_text


def sweep(*families):
    """What is wrong at the end of commands of which each call on a file has failed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.failing_files", *families]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("["), done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


FAMILIES = [
    ("report", "checkpoints", "evaluate"), ("export_pt", "export_safetensors"), ("run", "lr_find"), ("tune",),
    ("sweep",), ("tracked", "--only", "tracking/"), ("mlflow", "--only", "mlflow.py"),
    ("tune_tracked", "--only", "tuning/mlflow.py"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("families", FAMILIES)
def test_every_call_that_fails_is_one_sentence(families):
    assert sweep(*families) == []


def said(capsys, work):
    """The exit code and the sentence of a command that does this."""
    code = commands.main(lambda _: work(), argparse.Namespace())
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    return code, text


def refuse(number):
    raise OSError(number, os.strerror(number))


def lock(path):
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def read(path):
    with path.open("rb") as file:
        mmap.mmap(file.fileno(), 0)


@pytest.mark.parametrize(
    ("number", "code", "advice"),
    [
        (errno.ENOSPC, 1, "make room"),
        (errno.EDQUOT, 1, "quota"),
        (errno.EFBIG, 1, "ulimit -f"),
        (errno.EROFS, 2, "another disk"),
        (errno.EACCES, 2, "give yourself the right"),
        (errno.ENOLCK, 2, "local disk"),
        (errno.EMFILE, 1, "ulimit -n"),
        (errno.ENOMEM, 1, "out of memory"),
        (errno.EIO, 1, "dmesg"),
        (errno.ESTALE, 1, "mount it again"),
        (errno.ENAMETOOLONG, 2, "shorter"),
    ],
)
def test_each_error_of_the_system_says_the_path_and_what_to_do(number, code, advice, capsys, monkeypatch):
    path = pathlib.Path("/somewhere/file")

    def work():
        with at(path):
            refuse(number)

    assert said(capsys, work) == (code, f"error: /somewhere/file: {os.strerror(number)}; {file_sentence_end(number)}\n")
    assert advice in file_sentence_end(number)


def file_sentence_end(number):
    return file_sentence(OSError(number, "x")).removeprefix("x; ")


@pytest.mark.parametrize(("work", "called", "number"), [
    (lock, (fcntl, "flock"), errno.ENOLCK), (read, (mmap, "mmap"), errno.ENOMEM),
    (lambda path: path.write_text("x"), (io, "open"), errno.ENOSPC),
])  # fmt: skip
def test_an_error_that_names_no_file_gets_the_one_in_hand(work, called, number, tmp_path, capsys, monkeypatch):
    path = tmp_path / "data"
    path.write_text("abc")
    if called[0] is io:
        monkeypatch.setattr(io, "open", lambda *_: refuse(number))
    else:
        monkeypatch.setattr(*called, lambda *_: refuse(number))
    code, text = said(capsys, lambda: work(path))
    assert str(path) in text
    assert code == (2 if number == errno.ENOLCK else 1)


def test_an_error_without_a_number_is_a_sentence_too(capsys):
    def work():
        raise OSError("cannot identify image file 'a.png'")

    assert said(capsys, work) == (1, "error: cannot identify image file 'a.png'\n")


def test_a_full_temporary_folder_is_told_with_its_remedy(capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    code, text = said(capsys, tempfile.mkdtemp)
    assert code == 2
    assert "/nowhere" in text
    assert "TMPDIR" in text


def test_a_dataset_that_does_not_fit_into_the_temporary_folder_is_told(monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: refuse(errno.ENOSPC))
    with pytest.raises(DataError, match=r"data.num_workers: .* No space left on device\. Make room, .* TMPDIR, or set"):
        shared_memory.Frozen(np.zeros(10))


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_weights_for_a_full_disk_are_a_sentence_and_leave_the_file_before(suffix, tmp_path, monkeypatch):
    path = tmp_path / f"w.{suffix}"
    files.save({"a": np.ones(3, np.float32)}, path)
    before = path.read_bytes()
    monkeypatch.setattr(pathlib.Path, "open", lambda *_, **__: refuse(errno.ENOSPC))
    with pytest.raises(ValueError, match=f"cannot write {path}: No space left on device; make room"):
        files.save({"a": np.zeros(9, np.float32)}, path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_text_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "found.json"
    path.write_text("precious")
    monkeypatch.setattr(os, "rename", lambda *_: refuse(errno.ENOSPC))
    with pytest.raises(OSError, match="No space") as error:
        write_text(path, "new")
    assert (path.read_text(), error.value.filename) == ("precious", str(path))
    with pytest.raises(OSError, match="found.json"), replacing(path):
        refuse(errno.EDQUOT)
    assert [each.name for each in tmp_path.iterdir()] == ["found.json"]


def test_a_text_goes_through_a_link_or_a_device(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    write_text("/dev/null", "nothing")
    assert (link.is_symlink(), target.read_text(), pathlib.Path("/dev/null").is_char_device()) == (True, "new", True)


def test_a_study_where_files_cannot_be_locked_is_refused_in_one_sentence(tmp_path, capsys, monkeypatch):
    pytest.importorskip("optuna")
    from jaxtrain import tune

    space = tmp_path / "space.yaml"
    space.write_text("study: {trials: 1}\noptim.lr: {type: loguniform, low: 1.0e-3, high: 1.0e-2}\n")
    monkeypatch.setattr(fcntl, "flock", lambda *_: refuse(errno.ENOLCK))
    config = str(ROOT / "configs/digits_tiny.yaml")
    assert tune.main(["--config", config, "--space", str(space), "--output", str(tmp_path / "study")]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"error: {tmp_path / 'study' / 'workers'}")
    assert "No locks available; files cannot be locked there" in text


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_store_of_mlflow_that_fails_is_one_sentence_without_its_log(wrapped, capsys, caplog):
    pytest.importorskip("mlflow")
    import logging
    import sqlite3

    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import OperationalError

    from jaxtrain.train.tracking import mlflow

    def work():
        with mlflow.store_faults("sqlite:////x/mlflow.db"):
            try:
                raise OperationalError("INSERT", {"a": 1}, sqlite3.OperationalError("database or disk is full"))
            except OperationalError as error:
                logging.getLogger("mlflow.store.db.utils").exception("what MLflow logs")
                if wrapped:
                    raise MlflowException(str(error)) from error
                raise

    assert said(capsys, work) == (
        1,
        "error: tracking.mlflow: the store sqlite:////x/mlflow.db failed: database or disk is full. Make room, look "
        "after its rights or its server; or go on without it, tracking.mlflow=false\n",
    )
    assert "what MLflow logs" not in caplog.text


@pytest.mark.parametrize("name", ["study.pkl", "runs.csv"])
def test_a_file_of_results_that_cannot_be_written_stays_as_it_was(name, tmp_path, monkeypatch):
    path = tmp_path / name
    path.write_text("precious")
    monkeypatch.setattr(pathlib.Path, "rename", lambda *_: refuse(errno.ENOSPC))
    if name == "runs.csv":
        run = SweepRun(0, {"lr": 0.1}, 1.0, {"val_history": [{"loss": 1.0}]}, "complete", "", 1, dict)
        write = functools.partial(SweepResult([run], "loss", "min", 1, []).save, tmp_path)
    else:
        optuna = pytest.importorskip("optuna")
        from jaxtrain.tuning import results

        study = types.SimpleNamespace(folder=tmp_path, optuna=optuna.create_study())
        write = functools.partial(results._study, study)
    with pytest.raises(OSError, match=name):
        write()
    assert path.read_text() == "precious"
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_study_whose_database_fails_is_one_sentence(tmp_path, capsys):
    pytest.importorskip("optuna")
    import sqlite3

    from sqlalchemy.exc import OperationalError

    from jaxtrain.tuning.study import database_faults

    def work():
        with database_faults(tmp_path, None):
            raise OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full"))

    code, text = said(capsys, work)
    assert code == 1
    assert text.startswith(f"error: {tmp_path / 'study.db'}: the database failed: database or disk is full. ")
    assert "start the same command again" in text
