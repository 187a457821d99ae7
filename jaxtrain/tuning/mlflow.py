"""Log a study as an MLflow run, with its trials' runs nested in it."""

import sys
from typing import Any

from mlflow.tracking import MlflowClient
from optuna.trial import TrialState

from jaxtrain import redaction
from jaxtrain.config import TrainingConfig
from jaxtrain.train.tracking import mlflow
from jaxtrain.tuning.study import Study

RUN = "mlflow_run"


def begin(study: Study, config: TrainingConfig) -> dict[str, Any]:
    """Create the study's MLflow run if there is none; return the store and run for the trials' `tracking` section."""
    uri = mlflow.store(config.tracking.mlflow_uri, study.folder)
    with mlflow.store_faults(uri), study.lock():
        if RUN not in study.optuna.user_attrs:
            client = MlflowClient(tracking_uri=uri)
            experiment = _experiment(client, study, config, uri)
            run = client.create_run(experiment, run_name=study.folder.name).info.run_id
            study.optuna.set_user_attr(RUN, run)
    return {"mlflow_uri": uri, "mlflow_parent": study.optuna.user_attrs[RUN]}


def end(study: Study, tracked: dict[str, Any]) -> None:
    """Log the best trial's value and settings and the number of trials by state; end the study's run. If the store
    fails, warn: the study itself is complete."""
    try:
        with mlflow.store_faults(tracked["mlflow_uri"]):
            _end(study, tracked)
    except mlflow.StoreError as error:
        print(f"warning: {redaction.mask(str(error))}", file=sys.stderr)


def _end(study: Study, tracked: dict[str, Any]) -> None:
    client, run = MlflowClient(tracking_uri=tracked["mlflow_uri"]), tracked["mlflow_parent"]
    ended, best = study.ended(), study.best()
    for state in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL):
        client.log_metric(run, f"trials_{state.name.lower()}", sum(trial.state == state for trial in ended))
    if best is not None and best.value is not None:
        client.log_metric(run, "best_value", best.value)
        client.set_tag(run, "best_trial", str(best.number))
        for name, value in best.params.items():
            client.set_tag(run, f"best.{name}", str(value))
    client.set_terminated(run)


def _experiment(client: MlflowClient, study: Study, config: TrainingConfig, uri: str) -> str:
    name = config.task or "jaxtrain"
    known = client.get_experiment_by_name(name)
    if known:
        return known.experiment_id
    return client.create_experiment(name, mlflow.artifacts(uri, study.folder))
