"""Checkpoints that can be trusted, and folders that belong to one run."""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxtrain import UserError, debug, run
from jaxtrain import checkpoints as checkpoints_command
from jaxtrain.runtime import folder_lock
from jaxtrain.runtime.folder_lock import FolderLock
from jaxtrain.runtime.preemption import Preemption
from jaxtrain.train.checkpoint import manifest
from jaxtrain.train.checkpoint.checkpoints import Checkpoints, SaveError
from jaxtrain.train.loop.early_stop import EarlyStopping
from tests.chaos.damages import DAMAGES
from tests.unit.engine.runs import SAVING, arrays, assert_same_bits, data, points, trainer


def log(folder):
    return (folder / "train.log").read_text()


def untimed(folder):
    return [{k: v for k, v in p.items() if k in ("step", "loss", "error", "grad_norm", "lr")} for p in points(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run, its folder and its weights."""
    folder = tmp_path_factory.mktemp("whole")
    made = trainer(folder, **SAVING)
    made.train()
    return folder, arrays(made)


def copy(whole, folder):
    import shutil

    shutil.copytree(whole, folder, dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(damage, whole, tmp_path):
    folder, weights = whole
    copy(folder, tmp_path)
    damage(tmp_path / "checkpoints/8", random.Random(3))
    resumed = trainer(tmp_path, **SAVING)
    resumed.train()
    said = log(tmp_path).removeprefix(log(folder))
    assert said.count("CHECKPOINT 8 IS DAMAGED") == 1
    assert "going on from the one before it, step 6" in said
    assert_same_bits(weights, arrays(resumed))
    assert untimed(tmp_path) == untimed(folder)
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"6", "8", "8.damaged"}


def test_where_all_checkpoints_are_damaged_nothing_starts_over_them(whole, tmp_path):
    copy(whole[0], tmp_path)
    for step in ("6", "8"):
        (tmp_path / "checkpoints" / step / "meta.json").unlink()
    with pytest.raises(UserError, match="holds checkpoints, but none is whole"):
        trainer(tmp_path, **SAVING).train()
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"6", "8"}


def test_an_unfinished_save_does_not_count_and_is_cleared(whole, tmp_path):
    copy(whole[0], tmp_path)
    (tmp_path / "checkpoints/8").rename(tmp_path / "checkpoints/8.part")
    resumed = trainer(tmp_path, **SAVING)
    resumed.train()
    assert_same_bits(whole[1], arrays(resumed))
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"6", "8"}


def test_older_checkpoints_stay_until_the_new_one_is_verified(whole, tmp_path, monkeypatch):
    copy(whole[0], tmp_path)
    monkeypatch.setattr(Checkpoints, "problems", lambda self, step: ["state/x: its content has changed"] * (step > 8))
    with pytest.raises(SaveError, match="The last good one is step 8"):
        trainer(tmp_path, **SAVING | {"train__steps": 12, "checkpoint__retry_s": 0}).train()
    assert {"6", "8"} <= {p.name for p in (tmp_path / "checkpoints").iterdir()}


def test_list_verify_and_prune_on_the_command_line(whole, tmp_path, capsys):
    copy(whole[0], tmp_path)
    assert checkpoints_command.main(["verify", "--run", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("whole") == 2
    name = next(iter(manifest.read(tmp_path / "checkpoints/8")["files"]))
    (tmp_path / "checkpoints/8" / name).unlink()
    assert checkpoints_command.main(["verify", "--json", "--run", str(tmp_path)]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["problems"] for row in rows] == [[], [f"{name}: No such file or directory"]]
    assert checkpoints_command.main(["prune", "--keep-last", "1", "--run", str(tmp_path)]) == 0
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["6"]
    with pytest.raises(SystemExit, match="2"):  # argparse's own, by the same exit code
        checkpoints_command.main(["prune", "--keep-last", "0", "--run", str(tmp_path)])


def test_a_command_that_needs_the_model_of_a_script_says_what_does_it_there(whole, capsys):
    assert debug.main(["--run", str(whole[0]), "--step", "1"]) == 2
    assert "its model was made in Python" in capsys.readouterr().err


def test_a_run_that_is_complete_says_how_to_go_on(whole, tmp_path, capsys):
    copy(whole[0], tmp_path)
    trainer(tmp_path, **SAVING, run__quiet=False).train()
    assert "run complete: raise train.epochs to continue it" in capsys.readouterr().out


def test_a_second_run_in_the_same_folder_is_refused_with_pid_and_host(tmp_path):
    code = (
        "import pathlib, sys, time; from jaxtrain.runtime.folder_lock import FolderLock\n"
        "FolderLock(pathlib.Path(sys.argv[1])).acquire(); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"process {holder.pid} on {folder_lock.socket.gethostname()} trains in"):
        trainer(tmp_path).train()
    holder.kill()
    holder.wait()
    said = []
    with FolderLock(tmp_path, said.append):
        assert f"pid {holder.pid} on" in said[0]
        assert "taken over" in said[0]
    assert (tmp_path / "run.lock").read_text() == ""


def test_a_lock_of_another_host_is_stale_once_it_shows_no_life(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "SILENT_S", 2.0)
    word = {"pid": 1, "host": "elsewhere", "started": "1", "sign": 0}
    path = tmp_path / "run.lock"
    path.write_text(json.dumps(word))
    said = []
    FolderLock(tmp_path, said.append).acquire()
    assert "taken over" in said[-1]
    path.write_text(json.dumps(word))
    (tmp_path / "alive").mkdir()
    living = tmp_path / "alive/run.lock"
    living.write_text(json.dumps(word))
    threading.Timer(0.5, living.write_text, [json.dumps(word | {"sign": 1})]).start()
    with pytest.raises(UserError, match="process 1 on elsewhere trains in"):
        FolderLock(tmp_path / "alive").acquire()


def test_a_save_that_fails_is_tried_again_and_the_run_ends_well(tmp_path, monkeypatch):
    put, calls = manifest.write, []

    def full(folder: pathlib.Path, meta):
        calls.append(folder.name)
        if len(calls) <= 2:
            raise OSError(28, "No space left on device")
        put(folder, meta)

    monkeypatch.setattr(manifest, "write", full)
    monkeypatch.setattr("jaxtrain.train.checkpoint.save_failures.FIRST_RETRY_S", 0.01)
    made = trainer(tmp_path, **SAVING)
    made.train()
    assert len(calls) > 2
    assert log(tmp_path).count("COULD NOT BE WRITTEN") == 2
    assert "No space left on device. The last good one is none" in log(tmp_path)
    assert Checkpoints(tmp_path / "checkpoints", 2, 1, "loss", "min").newest_good() == 8


def test_metrics_lines_that_the_disk_refuses_are_written_later(tmp_path, monkeypatch):
    write, refused = os.write, []

    def sometimes(file, content):
        if content.startswith(b'{"step"') and len(refused) < 3:
            refused.append(content)
            write(file, content[:5])
            raise OSError(28, "No space left on device")
        return write(file, content)

    monkeypatch.setattr(os, "write", sometimes)
    trainer(tmp_path).train()
    assert len(refused) == 3
    assert [p["step"] for p in points(tmp_path)] == list(range(1, 9))


def test_an_early_stop_stays_one_after_a_restart(tmp_path, monkeypatch):
    update = EarlyStopping.update
    monkeypatch.setattr(EarlyStopping, "update", lambda self, value: update(self, 1.0))
    settings = {**SAVING, "evaluation__every_steps": 2, "evaluation__patience": 1}

    def run():
        made = trainer(tmp_path, **settings)
        made.program.data._sources["validation"] = made.source("train")
        made.train()
        return int(made.state.step)

    assert run() == 4
    (tmp_path / "summary.json").unlink()
    assert run() == 4
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 4


class Signalling:
    """The runs' data, item by item; reading the `at`-th sends SIGUSR1, and the next ones leave a second to obey it."""

    def __init__(self, at=None):
        self.columns, self.at, self.read = data(), at, 0

    def __len__(self):
        return len(self.columns["y"])

    def __getitem__(self, index):
        self.read += 1
        if self.read == self.at:
            os.kill(os.getpid(), signal.SIGUSR1)
        if self.at is not None and 0 < self.read - self.at <= 20:
            time.sleep(0.05)
        return {name: column[index] for name, column in self.columns.items()}


def test_a_signal_that_was_obeyed_ends_no_later_run(monkeypatch):
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    preemption = Preemption()
    with preemption._turn:  # the thread that sees the signal through comes late
        with preemption.attached(0.3, lambda: None, str):
            preemption._tell("SIGTERM")
        preemption.listen()  # the next run
    time.sleep(1)
    assert not preemption.due
    preemption.close()
    assert ends == []


def test_the_run_command_gives_the_signals_back(tmp_path):
    handler = signal.getsignal(signal.SIGUSR1)
    config = pathlib.Path(__file__).parents[3] / "configs/digits_tiny.yaml"
    settings = ["train.steps=2", "evaluation.every_epochs=null", "tracking.tensorboard=false", "run.quiet=true"]
    assert run.main(["--config", str(config), f"run.dir={tmp_path}", "shard.devices=1", *settings]) == 0
    assert signal.getsignal(signal.SIGUSR1) == handler


def test_a_signal_ends_train_with_75_and_the_next_call_goes_on(tmp_path):
    settings = {"train__steps": 24, "train__log_every_steps": 1}
    whole = trainer(tmp_path / "whole", samples=Signalling(), **settings)
    whole.train()
    handler = signal.getsignal(signal.SIGUSR1)
    samples = Signalling(at=90)
    with pytest.raises(SystemExit) as caught:
        trainer(tmp_path / "told", samples=samples, **settings).train()
    assert caught.value.code == 75
    assert signal.getsignal(signal.SIGUSR1) == handler
    saved = Checkpoints(tmp_path / "told/checkpoints", 2, 1, "loss", "min").newest_good()
    assert saved is not None
    assert saved < 24
    resumed = trainer(tmp_path / "told", samples=samples, **settings)
    resumed.train()
    assert_same_bits(arrays(whole), arrays(resumed))
    assert untimed(tmp_path / "told") == untimed(tmp_path / "whole")


def test_no_tracker_stops_a_run_and_metrics_stay_complete(tmp_path, monkeypatch):
    from tensorboardX.record_writer import RecordWriter

    def full(self, *_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordWriter, "flush", full)
    trainer(tmp_path, tracking__tensorboard=True, train__steps=40).train()
    assert log(tmp_path).count("TensorBoard failed and is off") == 1
    assert [p["step"] for p in points(tmp_path)] == list(range(1, 41))


def test_a_console_that_is_gone_does_not_stop_a_run(tmp_path, monkeypatch):
    class Gone:
        def write(self, text):
            raise BrokenPipeError

        flush = write

    with monkeypatch.context() as patched, contextlib.suppress(BrokenPipeError):
        patched.setattr(sys, "stdout", Gone())
        trainer(tmp_path, run__quiet=False).train()
    assert len(points(tmp_path)) == 8
