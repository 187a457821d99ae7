"""What a save writes: histories, large arrays, the index; what it leaves in memory; refusals."""

import gc
import logging
import shutil
import sys
import time
import tracemalloc

import jax
import numpy as np
import pytest

from jaxtrain.train.checkpoint import checkpoints, manifest, orbax_logs, state_tree
from jaxtrain.train.checkpoint.checkpoints import Checkpoints, SaveError
from jaxtrain.train.loop.callbacks import Callbacks
from tests.unit.engine.runs import SAVING, arrays, assert_same_bits, trainer


def test_a_save_leaves_fewer_than_one_object_per_array_behind(tmp_path):
    made = trainer(tmp_path)
    state = made.state.replace(frozen={f"w{i}": np.ones(3, np.float32) for i in range(100)})
    saver = Checkpoints(tmp_path / "checkpoints", 2, 1, "loss", "min")

    def blocks_after(saves: range) -> int:
        for step in saves:
            saver.save(state, step, {"metrics": {}})
            assert saver.wait()
        gc.collect()
        return sys.getallocatedblocks()

    before = blocks_after(range(1, 6))
    assert (blocks_after(range(6, 16)) - before) / 10 < 100


LONG = {
    "train_history": [{"loss": 1 / (i + 1), "lr": float("nan")} for i in range(5000)],
    "val_history": [{"loss": i / 7} for i in range(3000)],
}


@pytest.fixture
def saver(tmp_path):
    """Saves one small state: saver(step, meta) gives the checkpoints of the folder."""
    state = trainer(tmp_path / "run").state
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, 1, "loss", "min")

    def save(step, meta):
        checkpoints.save(state, step, meta)
        assert checkpoints.wait()
        return checkpoints

    return save


def test_a_save_needs_no_more_memory_for_a_long_history(saver):
    """A hundredth of what its entries take: lists of them, and one line of text at a time."""

    def most_bytes(step: int, meta: dict) -> int:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        saver(step, meta)
        return tracemalloc.get_traced_memory()[1] - before

    long = {"metrics": {}, "train_history": LONG["train_history"] * 5, "val_history": []}
    saver(1, long)
    tracemalloc.start()
    try:
        short = most_bytes(2, {"metrics": {}, "train_history": [], "val_history": []})
        assert most_bytes(3, long) < short + 1e6  # 25,000 entries; copied, they are 10 MB
    finally:
        tracemalloc.stop()


def test_a_checkpoint_gives_the_history_back(saver):
    meta = saver(4, {"metrics": {}, **LONG}).meta(4)
    np.testing.assert_equal({name: meta[name] for name in LONG}, LONG)


def test_an_evaluation_after_a_save_joins_its_history(saver, tmp_path):
    saver(4, {"metrics": {}, **LONG})
    later = {"metrics": {"loss": 0.5}, **LONG, "val_history": [*LONG["val_history"], {"loss": 0.5}]}
    np.testing.assert_equal(
        saver(4, later).meta(4), {**later, "files": manifest.read(tmp_path / "checkpoints/4")["files"]}
    )


def test_a_changed_history_is_damage(saver, tmp_path):
    checkpoints = saver(4, {"metrics": {}, **LONG})
    path = tmp_path / "checkpoints/4/history.jsonl"
    path.write_text(path.read_text().replace("0.5", "0.6", 1))
    assert checkpoints.problems(4) == ["history.jsonl: its content has changed"]


def test_a_history_within_meta_json_is_read(saver, tmp_path):
    """As checkpoints were before they had a file for it."""
    checkpoints = saver(4, {"metrics": {}})
    folder = tmp_path / "checkpoints/4"
    manifest.write(folder, {"metrics": {}, **LONG})
    assert checkpoints.meta(4)["val_history"] == LONG["val_history"]


@pytest.mark.parametrize("split_bytes", [checkpoints.SPLIT_BYTES, 16])
def test_replicas_share_the_writing_of_large_arrays_only(split_bytes, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoints, "SPLIT_BYTES", split_bytes)
    made, again = (trainer(tmp_path, shard__devices=8, **SAVING) for _ in range(2))
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        made.train()
    slices = [record for record in caplog.records if record.getMessage().startswith("Compiling jit(slice)")]
    assert bool(slices) == (split_bytes == 16)
    again.train()
    assert_same_bits(arrays(made), arrays(again))


def test_a_folder_whose_name_is_a_pattern_keeps_its_arrays(tmp_path):
    run = trainer(tmp_path / "exp[1]#*\\b", **SAVING)
    run.train()
    again = trainer(tmp_path / "exp[1]#*\\b", **SAVING)
    again.train()
    assert_same_bits(arrays(run), arrays(again))


def test_a_checkpoint_without_its_index_of_arrays_is_damaged(tmp_path):
    trainer(tmp_path, **SAVING).train()
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, 1, "loss", "min")
    step = checkpoints.latest()
    folder = tmp_path / "checkpoints" / str(step)
    (folder / "state" / "manifest.ocdbt").unlink()
    sealed = manifest.read(folder)
    del sealed["files"]["state/manifest.ocdbt"]
    manifest._put(folder, sealed)
    assert checkpoints.problems(step) == ["state/manifest.ocdbt: missing, so no array can be read"]


def test_a_refusal_that_waiting_cannot_mend_ends_the_run_at_once(tmp_path, monkeypatch):
    def refuse(*_):
        raise ValueError("Cannot save arrays of this kind")

    monkeypatch.setattr(state_tree, "as_tree", refuse)
    began = time.monotonic()
    with pytest.raises(SaveError, match="cannot be saved: ValueError: Cannot save arrays of this kind"):
        trainer(tmp_path, checkpoint__retry_s=300, **SAVING).train()
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(("level", "shown"), [(logging.NOTSET, False), (logging.INFO, True)])
def test_orbax_fills_the_log_of_a_script_only_if_it_asks_absl_for_it(level, shown, monkeypatch):
    monkeypatch.setattr(logging.getLogger("absl"), "level", level)
    record = lambda path, level: logging.LogRecord("absl", level, path, 1, "saved", (), None)
    assert orbax_logs.is_news(record("/site/orbax/checkpoint/x.py", logging.INFO)) is shown
    assert orbax_logs.is_news(record("/site/orbax/checkpoint/x.py", logging.WARNING))
    assert orbax_logs.is_news(record("/home/me/script.py", logging.INFO))


class TakesAway:
    """Deletes the run folder, or moves it, once its first checkpoint is whole."""

    def __init__(self, folder, moved):
        self.folder, self.moved, self.done = folder, moved, False

    def on_checkpoint(self, trainer, step, path):
        if not self.done:
            self.done = True
            if self.moved:
                shutil.move(self.folder, self.folder.with_name("moved"))
            while self.folder.exists():  # the tracker may be writing
                shutil.rmtree(self.folder, ignore_errors=True)


@pytest.mark.parametrize("moved", [False, True])
def test_a_run_whose_folder_is_taken_away_ends_in_a_whole_one(moved, tmp_path):
    folder = tmp_path / "run"
    run = trainer(folder, **SAVING)
    run.callbacks = Callbacks([TakesAway(folder, moved)], run)
    run.train()
    assert max(Checkpoints(folder / "checkpoints", 2, 1, "loss", "min").steps()) == 8
    assert {"config.yaml", "fingerprint.json", "summary.json"} <= {path.name for path in folder.iterdir()}
