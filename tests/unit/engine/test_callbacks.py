"""Callbacks of the user's own: called in order, able to ask, checkpointed, and never in the device's way."""

import json
import os
import signal
import time

import numpy as np
import pytest

from jaxtrain import Trainer, TrainingConfig, UserError
from jaxtrain.runtime import watchdog
from jaxtrain.runtime.preemption import PREEMPTION, Preempted
from jaxtrain.train.loop.callbacks import Every
from tests.unit.engine import runs


class Recorder:
    def __init__(self):
        self.calls = []

    def on_train_start(self, trainer):
        self.calls.append(("start", trainer.total_steps))

    def on_step_end(self, trainer, step, metrics):
        self.calls.append(("step", step))

    def on_epoch_end(self, trainer, epoch):
        self.calls.append(("epoch", epoch))

    def on_evaluation_end(self, trainer, step, metrics):
        self.calls.append(("evaluation", step, round(metrics["loss"], 6)))

    def on_checkpoint(self, trainer, step, path):
        assert (path / "meta.json").is_file()
        self.calls.append(("checkpoint", step))

    def on_train_end(self, trainer):
        self.calls.append(("end",))


def trainer(folder, callbacks, **sections) -> Trainer:
    settings = {
        "run": {"dir": str(folder), "quiet": True},
        "data": {"batch_size": 8},
        "tracking": {"tensorboard": False},
        "train": {"steps": 12, "log_every_steps": 1},
        "evaluation": {"every_steps": 6},
        "shard": {"devices": 1},
    } | sections
    config = TrainingConfig(**settings)
    return Trainer(None, runs.data(), runs.data(16), config, task=runs.task(), callbacks=callbacks)


def test_hooks_are_called_in_the_order_of_the_run(tmp_path):
    recorder = Recorder()
    history = trainer(tmp_path, [recorder]).train()
    calls = recorder.calls
    assert calls[0] == ("start", 12)
    assert [call[1] for call in calls if call[0] == "step"] == list(range(1, 13))
    assert [call[1] for call in calls if call[0] == "epoch"] == [1, 2]
    seen = [call[2] for call in calls if call[0] == "evaluation"]
    assert seen == [round(metrics["loss"], 6) for metrics in history["val_history"]]
    assert ("checkpoint", 12) in calls
    assert calls[-1] == ("end",)


def test_a_hook_reads_the_metrics_of_its_step_and_logs(tmp_path):
    read = {}

    def note(trainer, step, metrics):
        read[step] = metrics["loss"]
        trainer.run.log({"twice": 2 * metrics["loss"]})

    trainer(tmp_path, [Every(4, note)]).train()
    points = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = {p["step"]: p["values"]["loss"] for p in points if p["split"] == "train" and "loss" in p["values"]}
    assert read == pytest.approx({step: losses[step] for step in (4, 8, 12)})
    assert [p["values"]["twice"] for p in points if "twice" in p["values"]] == pytest.approx(
        [2 * losses[step] for step in (4, 8, 12)]
    )


@pytest.mark.parametrize("per_call", [1, 3])
def test_several_steps_per_call_give_every_step_its_metrics(tmp_path, per_call):
    read = []
    settings = {"train": {"steps": 12, "steps_per_call": per_call}}
    trainer(tmp_path, [Every(1, lambda trainer, step, metrics: read.append(metrics["loss"]))], **settings).train()
    assert len(read) == 12
    assert len(set(read)) == 12


class Asks:
    def on_step_end(self, trainer, step, metrics):
        if step == 2:
            trainer.run.evaluate()
        if step == 3:
            trainer.run.save()
        if step == 5:
            trainer.run.stop()


def test_a_callback_may_ask_for_an_evaluation_a_checkpoint_and_the_end(tmp_path):
    recorder = Recorder()
    made = trainer(tmp_path, [Asks(), recorder], evaluation={"every_steps": None, "every_epochs": None})
    made.train()
    assert int(made.state.step) == 5
    assert [call[1] for call in recorder.calls if call[0] == "evaluation"] == [2]
    assert {2, 3, 5} <= {call[1] for call in recorder.calls if call[0] == "checkpoint"} | {2, 3}
    assert made.checkpoints().steps()[-1] == 5


class Counter:
    def __init__(self):
        self.seen = 0

    def on_step_end(self, trainer, step, metrics):
        self.seen += 1

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def test_a_callbacks_state_is_checkpointed_and_a_run_with_callbacks_resumes_bit_for_bit(tmp_path):
    whole = trainer(tmp_path / "whole", [Counter()])
    whole.train()
    trainer(tmp_path / "parts", [Counter(), Every(7, lambda trainer, step, metrics: trainer.run.stop())]).train()
    counter = Counter()
    resumed = trainer(tmp_path / "parts", [counter])
    resumed.train()
    assert counter.seen == 12
    for key, value in whole.state_dict().items():
        np.testing.assert_array_equal(resumed.state_dict()[key], value)


def test_what_a_callback_raises_leaves_train_as_it_is_with_a_note_of_hook_and_step(tmp_path):
    class Fails:
        def on_step_end(self, trainer, step, metrics):
            if step == 3:
                raise KeyError("rate")

        def on_exception(self, trainer, error):
            self.told = error

    failing = Fails()
    with pytest.raises(KeyError, match="rate") as raised:
        trainer(tmp_path, [failing]).train()
    assert raised.value.__notes__ == ["raised by callback Fails.on_step_end at step 3"]
    assert failing.told is raised.value


def test_a_run_that_fails_leaves_no_save_under_way(tmp_path):
    def fail(trainer, step, metrics):
        if step == 3:
            raise KeyError("rate")

    with pytest.raises(KeyError):
        trainer(tmp_path, [Every(1, fail)], checkpoint={"every_steps": 1, "keep_last": 9}).train()
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert not [name for name in names if name.endswith(".part")]
    assert "2" in names


def test_a_trial_that_a_callback_prunes_is_pruned_in_the_study(tmp_path):
    optuna = pytest.importorskip("optuna")

    def objective(trial):
        def prune(trainer, step, metrics):
            raise optuna.TrialPruned

        return trainer(tmp_path, [Every(2, prune)]).train()["best_val_loss"]

    study = optuna.create_study()
    study.optimize(objective, n_trials=1)
    assert [trial.state.name for trial in study.trials] == ["PRUNED"]


def preempted_within(inner, at):
    """A callback whose evaluation `at` a step trains a run in `inner`, which gets a SIGTERM."""

    def on_evaluation_end(self, outer, step, metrics):
        if step == at:
            told = lambda _, inner_step, values: os.kill(os.getpid(), signal.SIGTERM) if inner_step == 2 else None
            trainer(inner, [Every(1, told)]).train()

    return type("Probes", (), {"on_evaluation_end": on_evaluation_end})()


def test_a_signal_within_a_run_of_a_callback_saves_the_run_around_it_too(tmp_path):
    whole = trainer(tmp_path / "whole", []).train()
    with pytest.raises(Preempted):
        trainer(tmp_path / "outer", [preempted_within(tmp_path / "inner", at=6)]).train()
    PREEMPTION.close()
    counter = Counter()
    assert trainer(tmp_path / "outer", [counter]).train()["val_history"] == whole["val_history"]
    assert counter.seen == 6


@pytest.mark.parametrize("ending", [KeyError, KeyboardInterrupt])
def test_the_module_holds_the_steps_made_when_a_callback_ends_the_run(tmp_path, ending):
    def end(given, step, metrics):
        end.wanted = given.state_dict()["0.weight"].copy()
        raise ending

    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(4, 1))
    data = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.zeros(16, 1))
    config = TrainingConfig(run={"dir": str(tmp_path), "quiet": True}, data={"batch_size": 8}, train={"steps": 6})
    with pytest.raises(ending):
        Trainer(module, data, None, config, loss=torch.nn.MSELoss(), callbacks=[Every(3, end)]).train()
    np.testing.assert_array_equal(module.state_dict()["0.weight"], end.wanted)


def test_a_callback_may_take_longer_than_a_step_may(tmp_path, monkeypatch):
    for name, value in {"HEARTBEAT_S": 0.01, "LEAST_S": 0.1, "SLACK": 0}.items():
        monkeypatch.setattr(watchdog, name, value)
    ended = []
    monkeypatch.setattr(watchdog, "leave", ended.append)
    watching = watchdog.Watchdog(tmp_path)
    watching.start()
    watching.beat(1)
    with watching.at_ease():
        time.sleep(0.3)
    watching.stop()
    assert not ended


class Misspelt:
    def on_step_ended(self, trainer, step, metrics): ...


class Async:
    async def on_epoch_end(self, trainer, epoch): ...


class TooFew:
    def on_epoch_end(self, epoch): ...


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (Misspelt(), r"on_step_ended: no such hook, did you mean on_step_end\(trainer, step, metrics\)"),
        (object(), "object has no hook"),
        (Async(), r"Async.on_epoch_end is async or yields.*wanted def .*\(trainer, epoch\)"),
        (TooFew(), r"TooFew.on_epoch_end\(epoch\): too many positional arguments; wanted \(trainer, epoch\)"),
        (Recorder, r"Recorder is a class; give an object, Recorder\(\)"),
    ],
)
def test_an_object_that_would_never_be_called_is_refused_before_training(tmp_path, callback, words):
    with pytest.raises(UserError, match=words):
        trainer(tmp_path, [callback])


def test_a_callback_without_a_list_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"Recorder is one object; give a list"):
        trainer(tmp_path, Recorder())


def test_what_a_hook_writes_into_its_metrics_stays_its_own(tmp_path):
    class Writes:
        def on_evaluation_end(self, trainer, step, metrics):
            metrics["loss"] = -1.0

    history = trainer(tmp_path, [Writes()]).train()
    assert min(history["best_val_loss"], history["val_history"][-1]["loss"]) > 0


def test_a_logged_text_is_named(tmp_path):
    note = lambda trainer, step, metrics: trainer.run.log({"phase": "warm"})
    with pytest.raises(UserError, match="trainer.run.log: phase is warm, wanted a number"):
        trainer(tmp_path, [Every(1, note)]).train()
