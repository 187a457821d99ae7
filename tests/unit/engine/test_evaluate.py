"""Evaluating a run needs its checkpoint and nothing that the run once started from."""

import dataclasses

from jaxtrain import evaluate, run
from tests.unit.tuning import small


def test_a_checkpoint_is_evaluated_without_the_weights_that_the_run_started_from(tmp_path, monkeypatch):
    def gone(config):
        raise FileNotFoundError("the pretrained model has been moved")

    (tmp_path / "config.yaml").write_text(small.CONFIG)
    folder = tmp_path / "run"
    assert run.main(["--config", str(tmp_path / "config.yaml"), f"run.dir={folder}", "train.epochs=1"]) == 0
    monkeypatch.setitem(small.TASKS, "train", dataclasses.replace(small.TASKS["train"], initial_weights=gone))
    assert evaluate.main(["--run", str(folder), "--trust"]) == 0
