"""Log parameters, metrics, config and pictures to MLflow, in a local store or on a tracking server."""

import contextlib
import functools
import itertools
import logging
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID
from sqlalchemy.exc import SQLAlchemyError

from jaxtrain.errors import UserError, reason
from jaxtrain.train.tracking import local_database
from torch_bridge.atomic_file import write_text

PARAM_LENGTH = 500  # longest value that every MLflow store accepts, in characters
NAME_LENGTH = 250
BATCH = 100  # parameters per request


class StoreError(UserError):
    """MLflow's store failed."""

    exit_code = 1


@contextlib.contextmanager
def store_faults(uri: str) -> Iterator[None]:
    """Inside the context, an error of MLflow's store is raised as a StoreError, in one sentence."""
    without_traceback = lambda record: record.exc_info is None  # MLflow logs a traceback of what it raises
    log = logging.getLogger("mlflow.store.db.utils")
    log.addFilter(without_traceback)
    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise StoreError(
            f"tracking.mlflow: the store {uri} failed: {reason(error)}. Make room, look after its rights or its "
            "server; or go on without it, tracking.mlflow=false"
        ) from None
    finally:
        log.removeFilter(without_traceback)


def _in_one_sentence(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> None:
        with store_faults(self.uri):
            method(self, *arguments, **options)

    return call


class MLflow:
    """MLflow backend. Each run folder has one MLflow run, which a resumed run continues.

    uri: sqlite:///..., http://...; None: see `store`. parent: id of the MLflow run that this one is nested in.
    """

    def __init__(self, folder: pathlib.Path, uri: str | None, experiment: str, name: str, parent: str | None = None):
        self.folder, self.experiment, self.name = folder.absolute(), experiment, name
        self.tags = {MLFLOW_PARENT_RUN_ID: parent} if parent else {}
        self.uri = store(uri, self.folder)
        self.artifacts = artifacts(self.uri, self.folder)
        self._names = Names()
        self._client: Any = None
        self._run = ""

    @_in_one_sentence
    def start(self, step: int, config: Mapping[str, Any], text: str) -> None:
        self._client = MlflowClient(tracking_uri=self.uri)
        known = self._client.get_experiment_by_name(self.experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(self.experiment, self.artifacts)
        remembered = self.folder / "mlflow_run.txt"
        if step and remembered.is_file():
            self._run = remembered.read_text().strip()
            self._client.set_terminated(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(experiment, run_name=self.name, tags=self.tags).info.run_id
        write_text(remembered, self._run)
        params = [Param(key, str(value)[:PARAM_LENGTH]) for key, value in _leaves(config)]
        for first in range(0, len(params), BATCH):
            self._client.log_batch(self._run, params=params[first : first + BATCH])
        self._client.log_text(self._run, text, "config.yaml")

        for name, value in hardware().items():
            self._client.set_tag(self._run, name, value)

    @_in_one_sentence
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._run, [Metric(self._names.taken(name), value, now, step) for name, value in values.items()]
        )

    @_in_one_sentence
    def histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        document = {"counts": counts.tolist(), "edges": edges.tolist(), "step": step}
        self._client.log_dict(self._run, document, f"histograms/{name}/{step}.json")

    @_in_one_sentence
    def image(self, step: int, name: str, image: np.ndarray) -> None:
        self._client.log_image(self._run, image, f"images/{name}/{step}.png")

    @_in_one_sentence
    def close(self, failed: bool) -> None:
        if self._run:
            self._client.set_terminated(self._run, status="FAILED" if failed else "FINISHED")


def hardware() -> dict[str, str]:
    """Return tags about the hardware and software of a run: device, number of devices, versions of JAX and CUDA."""
    import jax

    from jaxtrain.runtime.devices import cuda_version

    found = {"device": jax.devices()[0].device_kind, "device_count": str(jax.device_count())}
    found |= {"jax_version": jax.__version__}
    version = cuda_version()
    return found | ({"cuda_version": version} if version else {})


def finish(folder: pathlib.Path, tracking: Any, model: pathlib.Path, metrics: Mapping[str, float]) -> str | None:
    """Add the test metrics and the exported model to a run folder's MLflow run, after the run has ended.

    model: the export; with tracking.mlflow_model it is logged and registered under that name. Returns the registered
    version, or None if there is none. Raises StoreError if the store fails.
    """
    uri = store(tracking.mlflow_uri, folder)
    with store_faults(uri):
        return _finish(uri, folder, tracking.mlflow_model, model, metrics)


def _finish(
    uri: str, folder: pathlib.Path, name: str | None, model: pathlib.Path, metrics: Mapping[str, float]
) -> str | None:
    client = MlflowClient(tracking_uri=uri)
    run, names = (folder / "mlflow_run.txt").read_text().strip(), Names()
    for metric, value in metrics.items():
        client.log_metric(run, names.taken(f"test_{metric}"), value)
    if name is None:
        return None
    client.log_artifact(run, str(model), "model")
    client.log_artifact(run, str(folder / "config.yaml"), "model")
    with contextlib.suppress(MlflowException):  # it is already registered
        client.create_registered_model(name)
    source = f"{client.get_run(run).info.artifact_uri}/model"
    return str(client.create_model_version(name, source, run).version)


def store(uri: str | None, folder: pathlib.Path) -> str:
    """Return the address of the store: the setting's, MLFLOW_TRACKING_URI's, or that of `mlflow.db` in the folder."""
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or local_database.address(folder / "mlflow.db")


def artifacts(uri: str, folder: pathlib.Path) -> str | None:
    """Return the artifact location of a new experiment, in the folder; None lets a server decide."""
    return None if uri.startswith(("http", "databricks")) else (folder.absolute() / "mlflow_artifacts").as_uri()


class Names:
    """Map from metrics to unique names that MLflow accepts."""

    def __init__(self):
        self._metrics: dict[str, str] = {}  # MLflow's name -> metric

    def taken(self, metric: str) -> str:
        """Return a metric's name for MLflow, with letters, digits and _ - . / only: "acc@5" becomes "acc_at_5", or
        "acc_at_5_2" if another metric has that name."""
        clean = re.sub(r"[^\w\-./ ]", "_", metric.replace("@", "_at_"))[:NAME_LENGTH]
        clean = "/".join(part if part.strip(".") else "_" * max(len(part), 1) for part in clean.split("/"))
        for number in itertools.count(1):
            name = clean if number == 1 else f"{clean[: NAME_LENGTH - 10]}_{number}"
            if self._metrics.setdefault(name, metric) == metric:
                return name
        raise AssertionError


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
