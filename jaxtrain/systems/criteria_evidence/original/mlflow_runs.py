"""The original's MLflow functions, for scripts that use the original-compatible Trainer; jaxtrain.run needs none."""

import contextlib
import hashlib
import json
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxtrain.errors import UserError, install
from jaxtrain.original_configs import leaves
from jaxtrain.runtime import git

PARAM_LENGTH = 500  # longest parameter that every MLflow store accepts, in characters


def _mlflow() -> Any:
    try:
        import mlflow
    except ImportError:
        raise UserError(f"MLflow is not installed: {install('tracking')}") from None
    return mlflow


def configure_mlflow(
    tracking_uri: str | None = None,
    experiment: str | None = None,
    tags: Mapping[str, str] | None = None,
    artifact_location: str | None = None,
    *,
    experiment_name: str | None = None,
    run_name: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Set the tracking store and the experiment, which is created if new; return the experiment's id.

    tracking_uri: sqlite:///mlflow.db by default. experiment (experiment_name): Criteria by default. tags: of the
    experiment. run_name: also start a run of this name, with `config` as in log_config, and return its id instead.
    """
    mlflow = _mlflow()
    name = experiment or experiment_name or "Criteria"
    mlflow.set_tracking_uri(tracking_uri or "sqlite:///mlflow.db")
    known = mlflow.get_experiment_by_name(name)
    identity = known.experiment_id if known else mlflow.create_experiment(name, artifact_location)
    mlflow.set_experiment(name)
    if tags:
        mlflow.set_experiment_tags(dict(tags))
    if run_name is None:
        return str(identity)
    run = mlflow.start_run(run_name=run_name, tags=_tags(config))
    if config:
        log_config(config)
    return str(run.info.run_id)


def _tags(config: Mapping[str, Any] | None) -> dict[str, str]:
    return {"git_sha": git_sha(), **({} if config is None else {"config_hash": config_hash(config)})}


@contextlib.contextmanager
def mlflow_run(
    name: str | None = None,
    nested: bool = False,
    tags: Mapping[str, str] | None = None,
    params: Mapping[str, Any] | None = None,
    *,
    config: Mapping[str, Any] | None = None,
) -> Iterator[Any]:
    """Start a run tagged with git_sha and, with a config, config_hash; log params, and the config as in log_config."""
    mlflow = _mlflow()
    with mlflow.start_run(run_name=name, nested=nested, tags={**_tags(config), **(tags or {})}) as run:
        if params:
            mlflow.log_params({key: str(value)[:PARAM_LENGTH] for key, value in params.items()})
        if config is not None:
            log_config(config)
        yield run


def log_config(config: Mapping[str, Any], prefix: str = "") -> None:
    """Log every leaf of the config as a parameter (lists as JSON, cut to 500 characters), and config.yaml as a file.

    prefix: before every parameter's name.
    """
    mlflow = _mlflow()
    for key, value in leaves(_plain(config)):
        text = json.dumps(value) if isinstance(value, (list, tuple)) else str(value)
        mlflow.log_param(prefix + key, text[:PARAM_LENGTH])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "config.yaml"
        path.write_text(_text(config), encoding="utf-8")
        mlflow.log_artifact(str(path))


def resolve_tracking_uri(tracking_uri: str, base_dir: str | pathlib.Path) -> str:
    """Return a tracking URI whose file lies under base_dir if its path is relative: sqlite:///x.db, file:x or x.

    Absolute paths and URIs of servers come back unchanged.
    """
    base = pathlib.Path(base_dir).absolute()
    scheme, mark, path = tracking_uri.partition(":///")
    if mark and scheme == "sqlite":
        return tracking_uri if path.startswith("/") else f"sqlite:///{base / path}"
    if "://" in tracking_uri and not tracking_uri.startswith("file:"):
        return tracking_uri
    return _under(tracking_uri, base)


def resolve_artifact_location(artifact_location: str | None, base_dir: str | pathlib.Path) -> str | None:
    """Return a folder for artifacts as a file: URI, under base_dir if relative; None and other URIs are unchanged."""
    if artifact_location is None or ("://" in artifact_location and not artifact_location.startswith("file:")):
        return artifact_location
    return _under(artifact_location, pathlib.Path(base_dir).absolute())


def _under(location: str, base: pathlib.Path) -> str:
    path = pathlib.Path(location.removeprefix("file://").removeprefix("file:"))
    return (path if path.is_absolute() else base / path).as_uri()


def cleanup_mlflow_runs(run_ids: Iterable[str], *, tracking_uri: str, preserve: Iterable[str] | None = None) -> None:
    """Delete runs of a tracking store, except those in `preserve`; they can be restored there."""
    client, spared = _mlflow().MlflowClient(tracking_uri=tracking_uri), set(preserve or ())
    for run_id in run_ids:
        if run_id not in spared:
            client.delete_run(run_id)


def download_mlflow_artifacts(client: Any, run_id: str, destination: str | pathlib.Path) -> pathlib.Path:
    """Copy all artifacts of a run to a folder, which is made; return it. client: an MlflowClient."""
    folder = pathlib.Path(destination)
    folder.mkdir(parents=True, exist_ok=True)
    for entry in client.list_artifacts(run_id):
        client.download_artifacts(run_id, entry.path, str(folder))
    return folder


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the first eight hex digits of the MD5 of the config's YAML."""
    return hashlib.md5(_text(config).encode(), usedforsecurity=False).hexdigest()[:8]


def git_sha() -> str:
    """Return the git revision of the current folder, or "unknown" outside a repository."""
    return git.revision() or "unknown"


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    from omegaconf import DictConfig, OmegaConf

    return OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else dict(config)  # type: ignore[return-value]


def _text(config: Mapping[str, Any]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(_plain(config)))
