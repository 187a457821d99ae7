"""What a run logs, read back by each tracker's own reader."""

import contextlib
import json
import pathlib
import struct
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.train.loop.run_record import NotFiniteError
from jaxtrain.train.tracking import backends
from jaxtrain.train.tracking.tracker import Tracker
from tests.unit.engine import runs
from tests.unit.engine.runs import points, trained


def events(folder, name):
    """(step, value) of every point of that name in the event files: records of length, checksum, data, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted((folder / "tensorboard").glob("events.out.tfevents.*")):
        content, place = path.read_bytes(), 0
        while place < len(content):
            (length,) = struct.unpack_from("<Q", content, place)
            event = Event.FromString(content[place + 12 : place + 12 + length])
            found += [(event.step, value) for value in event.summary.value if value.tag == name]
            place += 12 + length + 4
    return found


def wandb_history(path):
    """The logged rows of an offline run: a LevelDB log (7-byte header; blocks of 32 KiB; records cut at their ends)."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, data, rows = path.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        data += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            items = Record.FromString(data).history.item
            rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
            data = b""
    return rows


def test_metrics_jsonl_holds_loss_rate_throughput_and_system(tmp_path):
    trained(tmp_path)
    last = points(tmp_path)[-1]
    wanted = {"loss", "error", "grad_norm", "lr", "samples_per_s", "input_stall_ratio"}
    wanted |= {"time/input_stall_s", "time/checkpoint_s", "time/compile_s", "time/evaluation_s", "time/goodput"}
    wanted |= {"throughput/tflops_per_device", "system/host_memory_gb", "system/cpu_utilisation"}
    assert wanted <= set(last)
    assert 0 < last["time/goodput"] < 1
    assert last["system/host_memory_gb"] > 0.05


def test_tensorboard_reads_back_scalars_histograms_and_the_config(tmp_path):
    trained(tmp_path, tracking__tensorboard=True, tracking__histograms_every_steps=4)
    scalars = events(tmp_path, "train/loss")
    assert [step for step, _ in scalars] == list(range(1, 9))
    assert [value.simple_value for _, value in scalars] == pytest.approx(
        [p["loss"] for p in points(tmp_path)], rel=1e-6
    )
    for name in ("parameters/fc1.weight", "gradients/fc1.weight"):
        histograms = events(tmp_path, name)
        assert [step for step, _ in histograms] == [0, 4]
        assert [sum(value.histo.bucket) for _, value in histograms] == [32, 32]
    ((_, text),) = events(tmp_path, "config/text_summary")
    assert b"batch_size: 8" in text.tensor.string_val[0]


def test_tensorboard_reads_back_an_image(tmp_path):
    tracker = Tracker(tmp_path, runs.trainer(tmp_path, tracking__tensorboard=True).config, active=True)
    tracker.rewind(0)
    tracker.image(3, "masks", np.linspace(0, 1, 12, dtype=np.float32).reshape(2, 2, 3))
    tracker.close()
    ((step, value),) = events(tmp_path, "masks")
    assert (step, value.image.width, value.image.height) == (3, 2, 2)


def test_a_task_draws_its_pictures_and_histograms_after_every_evaluation(tmp_path):
    def pictures(model, batch, config):
        return {"targets": jnp.broadcast_to(batch["y"][:, None, None] > 0, (8, 5, 3)).astype(jnp.float32)}

    def histograms(model, batch, config):
        return {"positive": jnp.where(batch["y"] > 0, batch["y"], jnp.nan)}

    made = runs.trainer(
        tmp_path,
        runs.task(pictures=pictures, histograms=histograms),
        tracking__tensorboard=True,
        evaluation__every_steps=4,
    )
    made.program.data._sources["validation"] = made.source("train")
    made.train()
    found = events(tmp_path, "validation/targets")
    assert [(step, value.image.height, value.image.width) for step, value in found] == [(4, 8, 5), (8, 8, 5)]
    drawn = made.source("train").columns["y"][:8]
    assert [(step, sum(value.histo.bucket)) for step, value in events(tmp_path, "validation/positive")] == [
        (step, (drawn > 0).sum()) for step in (4, 8)
    ]


def test_a_task_logs_scalars_of_its_own_with_every_step(tmp_path):
    trained(tmp_path, runs.task(extra_metrics=lambda config, step: {"ema_momentum": 0.9 + 0.01 * step}))
    assert [p["ema_momentum"] for p in points(tmp_path)] == pytest.approx([0.9 + 0.01 * k for k in range(8)])


def test_wandb_offline_holds_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trained(tmp_path, tracking__wandb=True, train__steps=3)
    import wandb

    wandb.teardown()  # its service writes the file to the end when it leaves
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    losses = [row["train/loss"] for row in wandb_history(path) if "train/loss" in row]
    assert losses == pytest.approx([p["loss"] for p in points(tmp_path)], rel=1e-6)


def test_mlflow_client_finds_the_run_in_a_local_sqlite_store(tmp_path):
    trained(tmp_path, tracking__mlflow=True)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [
        (p["step"], pytest.approx(p["loss"], rel=1e-6)) for p in points(tmp_path)
    ]
    assert run.data.params["optim.lr"] == "0.01"
    assert run.info.status == "FINISHED"
    assert [item.path for item in client.list_artifacts(run.info.run_id)] == ["config.yaml"]


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(tmp_path):
    for steps in (4, 8):
        trained(tmp_path, tracking__mlflow=True, train__steps=steps)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert [m.step for m in client.get_metric_history(run.info.run_id, "train/loss")] == list(range(1, 9))


def test_a_failing_tracker_never_stops_training(tmp_path, monkeypatch):
    class Broken:
        def __init__(self):
            self.calls = 0

        def start(self, *arguments):
            pass

        def scalars(self, *arguments):
            self.calls += 1
            raise ConnectionError("the server is gone")

    broken = Broken()
    monkeypatch.setattr(
        "jaxtrain.train.tracking.tracker.make_backends", lambda config, folder: {"Broken": lambda: broken}
    )
    made = trained(tmp_path)
    assert int(made.state.step) == 8
    assert broken.calls == 1
    log = (tmp_path / "train.log").read_text()
    assert log.count("Broken failed and is off for the rest of the run: ConnectionError: the server is gone") == 1


@pytest.mark.parametrize("poisoned", [False, True])
def test_trackers_hear_whether_the_run_failed(tmp_path, monkeypatch, poisoned):
    heard = []

    class Listening:
        start = scalars = lambda self, *arguments: None

        def close(self, failed):
            heard.append(failed)

    monkeypatch.setattr(
        "jaxtrain.train.tracking.tracker.make_backends", lambda config, folder: {"Listening": Listening}
    )
    data = runs.data()
    data["x"][:] = np.nan if poisoned else data["x"]
    made = runs.trainer(tmp_path, None, data)
    with pytest.raises(NotFiniteError) if poisoned else contextlib.nullcontext():
        made.train()
    assert heard == [poisoned]


def test_a_tracker_whose_package_is_missing_is_refused_at_the_start(tmp_path, monkeypatch):
    found = backends.importlib.util.find_spec
    missing = lambda name, *rest: None if name == "wandb" else found(name, *rest)
    monkeypatch.setattr(backends.importlib.util, "find_spec", missing)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)  # another test may have imported it
    with pytest.raises(UserError, match=r"tracking.wandb: true, but the package wandb is not installed"):
        trained(tmp_path, tracking__wandb=True)


def test_only_process_0_writes(tmp_path):
    config = runs.trainer(tmp_path, tracking__tensorboard=True).config
    tracker = Tracker(tmp_path / "other", config, active=False)
    tracker.rewind(0)
    tracker.point(1, 0.1, "train", {"loss": 1.0})
    tracker.close()
    assert not pathlib.Path(tmp_path / "other").exists()


def test_a_tracker_that_fails_is_closed_as_failed(tmp_path, monkeypatch):
    heard = []

    class Broken:
        def start(self, *arguments):
            pass

        def scalars(self, *arguments):
            raise ConnectionError("the server is gone")

        def close(self, failed):
            heard.append(failed)

    monkeypatch.setattr("jaxtrain.train.tracking.tracker.make_backends", lambda config, folder: {"Broken": Broken})
    trained(tmp_path)
    assert heard == [True]


def test_mlflow_takes_the_name_of_every_metric(tmp_path):
    from mlflow.tracking import MlflowClient

    from jaxtrain.train.tracking import mlflow

    metrics = {"acc@5": "acc_at_5", "": "_", "a//b": "a/_/b", "/a": "_/a", "a/../b": "a/__/b", "b" * 300: "b" * 250}
    client, names = MlflowClient(mlflow.store(None, tmp_path)), mlflow.Names()
    run = client.create_run(client.create_experiment("names")).info.run_id
    for metric in metrics:
        client.log_metric(run, names.taken(metric), 1.0)
    assert client.get_run(run).data.metrics.keys() == set(metrics.values())


def test_two_metrics_share_no_name_in_mlflow():
    from jaxtrain.train.tracking.mlflow import Names

    names = Names()
    assert [names.taken(name) for name in ("acc@5", "acc_at_5", "acc@5")] == ["acc_at_5", "acc_at_5_2", "acc_at_5"]


def test_mlflow_writes_where_its_users_say_unless_the_config_does(tmp_path, monkeypatch):
    from jaxtrain.train.tracking import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://here")
    assert mlflow.store(None, tmp_path) == "http://here"
    assert mlflow.store("http://there", tmp_path) == "http://there"


@pytest.mark.parametrize("name", ["lr?x", "x%20y", "a#b", "a b", "{x}", "u@h:1"])
def test_a_database_lies_in_its_folder_whatever_that_is_called(tmp_path, name):
    import sqlalchemy

    from jaxtrain.train.tracking import local_database

    (tmp_path / name).mkdir()
    with sqlalchemy.create_engine(local_database.address(tmp_path / name / "x.db")).connect() as connection:
        connection.execute(sqlalchemy.text("create table t (a int)"))
    assert (tmp_path / name / "x.db").is_file()
