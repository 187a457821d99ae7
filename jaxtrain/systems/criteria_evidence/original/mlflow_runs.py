"""The original's MLflow functions, for scripts that use the original-compatible Trainer; jaxtrain.run needs none."""

import contextlib
import hashlib
import json
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.original_configs import leaves
from jaxtrain.runtime import git

PARAM_LENGTH = 500  # longest parameter that every MLflow store accepts, in characters


def _mlflow() -> Any:
    try:
        import mlflow
    except ImportError:
        raise UserError("MLflow is not installed: pip install 'jaxtrain[tracking]'") from None
    return mlflow


def configure_mlflow(
    tracking_uri: str = "sqlite:///mlflow.db", experiment: str = "Criteria", artifact_location: str | None = None
) -> str:
    """Set the tracking store and the experiment, which is created if new; return the experiment's id."""
    mlflow = _mlflow()
    mlflow.set_tracking_uri(tracking_uri)
    known = mlflow.get_experiment_by_name(experiment)
    identity = known.experiment_id if known else mlflow.create_experiment(experiment, artifact_location)
    mlflow.set_experiment(experiment)
    return str(identity)


@contextlib.contextmanager
def mlflow_run(
    name: str, config: Mapping[str, Any] | None = None, tags: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """Start a run tagged with git_sha and config_hash; log the config as parameters and as the file config.yaml."""
    mlflow = _mlflow()
    known = {"git_sha": git_sha(), **({} if config is None else {"config_hash": config_hash(config)}), **(tags or {})}
    with mlflow.start_run(run_name=name, tags=known) as run:
        if config is not None:
            log_config(config)
        yield run


def log_config(config: Mapping[str, Any]) -> None:
    """Log every leaf of the config as a parameter (lists as JSON, cut to 500 characters), and config.yaml as a file."""
    mlflow = _mlflow()
    for key, value in leaves(_plain(config)):
        text = json.dumps(value) if isinstance(value, (list, tuple)) else str(value)
        mlflow.log_param(key, text[:PARAM_LENGTH])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "config.yaml"
        path.write_text(_text(config), encoding="utf-8")
        mlflow.log_artifact(str(path))


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
