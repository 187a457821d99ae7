"""A run folder that came from elsewhere: nothing is written out of it, nothing in it is taken for what it is not."""

import asyncio
import io
import json
import os
import shutil
import sys
import types

import pytest

from jaxtrain import report
from jaxtrain.errors import UserError
from jaxtrain.reporting import records
from jaxtrain.runtime import plain_files
from jaxtrain.runtime.folder_lock import FolderLock
from jaxtrain.train.checkpoint import manifest, orbax_patches
from jaxtrain.train.resume import fingerprint
from torch_bridge.atomic_file import replacing


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


@pytest.mark.parametrize("name", [*plain_files.LINES, *plain_files.FOLDERS])
def test_a_link_in_place_of_what_a_run_writes_is_refused_and_not_followed(name, victim, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to(victim)
    with pytest.raises(UserError, match=f"{name}: wanted a .*, found a link to {victim}"):
        FolderLock(folder).acquire()
    assert victim.read_text() == "precious"


def test_a_pipe_in_place_of_a_log_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "train.log")
    with pytest.raises(UserError, match="train.log: wanted a plain file"):
        FolderLock(tmp_path).acquire()
    with pytest.raises(OSError, match=r"no plain file|No such device"):
        plain_files.open_plain(tmp_path / "train.log", os.O_WRONLY)


def test_no_file_is_opened_through_a_link(victim, tmp_path):
    (tmp_path / "train.log").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        plain_files.open_plain(tmp_path / "train.log", os.O_WRONLY | os.O_APPEND)


@pytest.mark.parametrize("name", [".config.yaml.part", ".best.pt.part"])
def test_what_is_written_aside_is_not_written_through_a_link(name, victim, tmp_path):
    (tmp_path / name).symlink_to(victim)
    path = tmp_path / name.removeprefix(".").removesuffix(".part")
    with replacing(path) as aside:
        aside.write_text("new")
    assert (victim.read_text(), path.read_text()) == ("precious", "new")


@pytest.mark.parametrize("content", ["[]", "3", '"x"', "{}", '{"pid": "1", "host": 2}', '{"pid": 1}', "[" * 4000])
def test_a_lock_file_of_another_shape_holds_nobody(content, tmp_path):
    (tmp_path / "run.lock").write_text(content)
    with FolderLock(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def sealed(folder, **meta):
    folder.mkdir(parents=True)
    (folder / "weights").write_text("w")
    manifest.write(folder, meta)
    return folder


def test_a_checkpoint_under_another_steps_name_is_damaged(tmp_path):
    folder = sealed(tmp_path / "25", step=25)
    assert manifest.problems(folder, 25) == []
    assert manifest.problems(shutil.copytree(folder, tmp_path / "30"), 30) == [
        "it holds step 25: another checkpoint's folder, copied or renamed"
    ]


def test_a_checkpoint_of_another_run_is_damaged(tmp_path):
    folder = sealed(tmp_path / "25", step=25, run="a")
    assert (manifest.problems(folder, 25, "a"), manifest.problems(folder, 25, "b")) == (
        [],
        ["it is another run's checkpoint"],
    )


@pytest.mark.parametrize("name", ["meta.json", "weights"])
def test_a_checkpoint_that_cannot_be_read_is_neither_whole_nor_damaged(name, tmp_path, monkeypatch):
    folder = sealed(tmp_path / "25", step=25)
    real = io.open

    def refuse(path, *arguments, **more):
        if str(path).endswith(name):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **more)

    monkeypatch.setattr(io, "open", refuse)
    with pytest.raises(manifest.Unreadable, match=f"{name}: cannot be read: Permission denied. It is left as it is"):
        manifest.problems(folder, 25)


def test_late_writes_of_a_failed_save_are_no_news_and_other_errors_are(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: shown.append(told.exc_type))
    orbax_patches.hush_late_writes()
    loop = asyncio.new_event_loop()
    loop.close()
    for late in (lambda: loop.call_soon_threadsafe(print), lambda: int("x")):
        try:
            late()
        except (RuntimeError, ValueError) as error:
            trace = error.__traceback__.tb_next.tb_next  # as from C++: without this file's own frames
            sys.unraisablehook(types.SimpleNamespace(exc_type=type(error), exc_value=error, exc_traceback=trace))
    assert shown == [ValueError]


@pytest.mark.parametrize("name", ["summary.json", "environment.json", "reports/table.json"])
@pytest.mark.parametrize("content", [b"precious", b"[" * 100_000, b"\xff", b""])
def test_a_report_of_damaged_files_is_one_sentence(name, content, tmp_path, capsys):
    (tmp_path / "reports").mkdir()
    (tmp_path / "config.yaml").write_text("task: digits.classify")
    (tmp_path / name).write_bytes(content)
    assert report.main(["--run", str(tmp_path), "--output", str(tmp_path / "page.html")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / name}: cannot be read: ")


@pytest.mark.parametrize("content", ["[]", '{"best": []}', '{"final": 3}', '{"throughput": "fast"}'])
def test_a_summary_of_another_shape_is_named(content, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("task: digits.classify")
    (tmp_path / "summary.json").write_text(content)
    assert report.main(["--run", str(tmp_path), "--output", str(tmp_path / "page.html")]) == 2
    assert "summary.json: is not what a run writes" in capsys.readouterr().err


def test_lines_of_metrics_that_are_no_points_are_left_out(tmp_path):
    good = '{"step": 1, "split": "train", "values": {"loss": 2}}'
    wrong = [
        "[]",
        "3",
        "[" * 100_000,
        '{"step": "x", "split": "a", "values": {}}',
        '{"step": 1, "values": {"loss": []}}',
    ]
    (tmp_path / "config.yaml").write_text("task: digits.classify")
    (tmp_path / "metrics.jsonl").write_bytes("\n".join([*wrong, good, good[:20]]).encode() + b"\xff\n")
    assert records.read(tmp_path).points == [{"step": 1, "split": "train", "values": {"loss": 2.0}}]


def test_a_fingerprint_that_nests_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "fingerprint.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="fingerprint.json: cannot be read"):
        fingerprint.read(tmp_path)
    assert manifest.run_of(tmp_path) is None
