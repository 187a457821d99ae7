"""Read YAML and command-line overrides into a checked, frozen config, and write it back. The only reader of YAML.

All mistakes of a config are reported together, in one UserError.
"""

import difflib
import functools
import io
import json
import pathlib
import re
import types
from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import pydantic
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from jaxtrain import config_mistakes, hydra_configs, overriding, redaction, trust, yaml_limits
from jaxtrain.config import FLAT_NAMES, Section, TrainingConfig
from jaxtrain.config_mistakes import dotted_keys  # noqa: F401  # keys of a schema, for code that writes configs
from jaxtrain.errors import UserError, one_line, shortened
from jaxtrain.original_configs import Translation, is_setting, leaves, recognise, translate
from jaxtrain.task import Task, find_task
from torch_bridge.atomic_file import write_text

Schema = TypeVar("Schema", bound=pydantic.BaseModel)

BEST = "best_config"  # key of an override that names a file with the best values of a search
WARMUPS = tuple(f"optim.schedule.{name}" for name in ("warmup_steps", "warmup_epochs", "warmup_ratio"))  # one at a time
SEARCH = {"n_trials", "search_space", "sampler", "pruner", "study_name"}  # of an original's hpo.yaml
INTERPOLATION = re.compile(r"(\\*)\$\{")  # with the backslashes in front of it
SHIPPED = pathlib.Path(__file__).parent / "configs"  # the files of configs/, in a wheel too


def load(path: str | pathlib.Path, overrides: Sequence[str] = ()) -> tuple[Task, TrainingConfig]:
    """Return the task that a YAML file names and its checked config. `a.b=value` overrides are applied last.

    Raises UserError for a missing or unreadable file, an unknown task, and for all wrong keys and values together.
    """
    path = pathlib.Path(path)
    return check(merged(path, overrides), path)


def load_config(path: str | pathlib.Path, *overrides: str) -> TrainingConfig:
    """Return a YAML file's checked config.

    Args:
        path: the file; settings that it leaves out have their defaults (docs/reference.md).
        overrides: "section.key=value"; they count over the file.

    Raises:
        UserError: with every mistake of the file, and the nearest key for an unknown one.

    Examples:
        >>> import pathlib, jaxtrain
        >>> _ = pathlib.Path("small.yaml").write_text("{task: digits.classify, optim: {lr: 1e-2}}")
        >>> jaxtrain.load_config("small.yaml", "data.batch_size=32").data.batch_size
        32
    """
    wrong = next((one for one in overrides if not isinstance(one, str)), None)
    if wrong is not None:
        raise UserError(f'load_config: an override is {wrong!r}, wanted texts after the file, as "optim.lr=1e-3"')
    return load(path, overrides)[1]


def merged(path: pathlib.Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return a YAML file's nested values, unchecked: an original project's names translated, overrides and
    interpolations applied."""
    best = [one.partition("=")[2] for one in overrides if _is_best(one)]
    values, translation, own = _opened(path, overrides)
    settings = values if translation is None else translation.settings
    asked = [override.partition("=")[2] for override in own if override.startswith("task=")]
    name = overriding.text(asked[-1]) if asked else settings.get("task")
    found = [one for file in best for one in _best(pathlib.Path(file), str(name))]
    plain_name = isinstance(name, str) and "$" not in name  # an interpolation is resolved only after the overrides
    kind = schema(find_task(str(name))) if plain_name and [*found, *own] else TrainingConfig
    return overriding.apply(settings, [*found, *own], texts(kind), path)


def _is_best(override: str) -> bool:
    return "=" in override and hydra_configs.key_of(override) == BEST


def _best(file: pathlib.Path, name: str) -> list[str]:
    """Return the best values of a search, a file of `key: value` lines, as overrides; an original's names translated.

    Raises UserError for a whole config and for keys that are no settings of the task.
    """
    values = {key: value for key, value in leaves(read(file)) if value is not None}
    if "task" in values:
        raise UserError(f"best_config={file}: is a whole config; start it with --config {file}")
    task = find_task(name)
    kind = schema(task)
    own = {key: value for key, value in values.items() if is_setting(kind, key)}
    others = {key: value for key, value in values.items() if key not in own}
    best = None if task.original is None else task.original.best
    if others and best is None:
        raise UserError(f"best_config={file}: {', '.join(others)}: no settings of {name}")
    try:
        found = {**(best(others) if others and best is not None else {}), **own}
    except UserError as error:
        raise UserError(f"best_config={file}: {error}") from None
    if not found.keys().isdisjoint(WARMUPS):  # replaces the one in the config file
        found = dict.fromkeys(WARMUPS) | found
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in found.items() if is_setting(kind, key)]


def translated(path: str | pathlib.Path, overrides: Sequence[str] = ()) -> Translation | None:
    """Translate the config of a torch project that a system replaces; return None for a config of this project.

    Raises UserError if several systems could replace it and no override `task=...` chooses one.
    """
    return _opened(pathlib.Path(path), overrides)[1]


def task_of(path: str | pathlib.Path, overrides: Sequence[str] = ()) -> tuple[Task, frozenset[str]]:
    """Return a config file's task and, if the file is an original project's, the keys of that original."""
    path = pathlib.Path(path)
    values, translation, own = _opened(path, overrides)
    settings = values if translation is None else translation.settings
    named = [override.partition("=")[2] for override in own if override.startswith("task=")]
    name = named[-1] if named else settings.get("task")
    if not isinstance(name, str):
        raise UserError(f"{path}: `task` is missing; name a system's task, as in configs/digits.yaml")
    task = find_task(name)
    return task, frozenset() if translation is None or task.original is None else task.original.keys


def _opened(path: pathlib.Path, overrides: Sequence[str]) -> tuple[dict[str, Any], Translation | None, list[str]]:
    """Return a file's values, their translation if it is an original project's, and this project's own overrides.

    Overrides in the original's names (training.epochs=20, model=roberta_base, ~mlflow) are applied before the
    translation; a name that both have counts as this project's. best_config=FILE is left out.
    """
    values, own = read(path), [one for one in overrides if not _is_best(one)]
    if {"method", "parameters"} <= values.keys() and {"program", "command", "metric"} & values.keys():
        raise UserError(
            f"{path}: is a W&B sweep, not a run: write its `parameters` as a search space and start python -m "
            "jaxtrain.tune --config F --space F (docs/tuning.md)"
        )
    if len(SEARCH & values.keys()) > 1 or "n_trials" in values:
        raise UserError(
            f"{path}: is a search, not a run: write its parameters as a search space and start jaxtrain tune --config "
            "F --space F (docs/tuning.md)"
        )
    if "task" in values and not isinstance(values["task"], Mapping):
        return values, None, own
    chosen = None
    start = None if hydra_configs.is_composed(values) else hydra_configs.start_of(locate(path))
    if start is not None:
        group = locate(path).resolve().parent.name
        raise UserError(
            f"{path}: is an option of the group {group} of a Hydra config, not a run: start from --config {start} "
            f"{group}={pathlib.Path(path).stem}"
        )
    if hydra_configs.is_composed(values):
        values, own, chosen = hydra_configs.compose(locate(path), own)
    asked = [override.partition("=")[2] for override in own if override.startswith("task=")]
    task = asked[-1] if asked else None
    try:
        found = recognise(values, task)
        if found is None:
            return values, None, own
        original, name = found
        kind, keys = schema(find_task(name)), original.keys | {key for key, _ in leaves(values)}
        theirs = [one for one in own if _is_originals(one, keys, kind)]
        values = hydra_configs.resolve(hydra_configs.override(values, theirs))
        own = [one.lstrip("+") for one in own if one not in theirs]
        return values, translate(original, values, task or chosen), own
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _is_originals(override: str, keys: Set[str], kind: type[TrainingConfig]) -> bool:
    """Return True if an override names a key or a whole section of the original, and no setting of this project."""
    key = hydra_configs.key_of(override)
    known = "=" in override and (key in keys or any(one.startswith(f"{key}.") for one in keys))
    return override.startswith("~") or (known and not is_setting(kind, key))


def locate(path: str | pathlib.Path) -> pathlib.Path:
    """Return the path, or that of the packaged file if `configs/...` does not exist in the working directory."""
    path = pathlib.Path(path)
    shipped = SHIPPED.parent / path
    return shipped if path.parts[:1] == ("configs",) and not path.exists() and shipped.is_file() else path


def read(path: pathlib.Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, unchecked. Raises UserError if it cannot be read."""
    try:
        text = locate(path).read_text(encoding="utf-8-sig")
        yaml_limits.check(text)
        values = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.stem, [file.stem for file in SHIPPED.glob("*.yaml")], 3, 0.5)
        names = ", ".join(f"configs/{name}.yaml" for name in near or ["digits"])
        raise UserError(f"{path}: no such config file. Among those that come with jaxtrain: {names}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, wanted a YAML file") from None
    except OSError as error:
        raise UserError(f"{shortened(path)}: cannot be read: {error.strerror or error}") from None
    except yaml_limits.TooLarge as error:
        raise UserError(f"{path}: {error}") from None
    except (YAMLError, OmegaConfBaseException, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{shortened(path)}: cannot be read as YAML: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds {type(values).__name__}, wanted sections such as `task:` and `optim:`")
    return {str(key): value for key, value in values.items()}


def check(values: Mapping[str, Any], source: str | pathlib.Path = "config") -> tuple[Task, TrainingConfig]:
    """Validate plain nested values against the schema of the task they name."""
    name = values.get("task")
    if not isinstance(name, str):
        raise UserError(f"{source}: `task` is missing; name a system's task, as in configs/digits.yaml")
    task = find_task(name)
    config = validate(schema(task), values, source)
    trust.check(config, source)
    return task, config


def validate(kind: type[Schema], values: Mapping[str, Any], source: str | pathlib.Path = "config") -> Schema:
    """Return an instance of the schema. Raises one UserError that lists every mistake."""
    try:
        return kind.model_validate(dict(values))
    except pydantic.ValidationError as error:
        raise config_mistakes.told(kind, error, source, FLAT_NAMES) from None


def schema(task: Task) -> type[TrainingConfig]:
    """Return the class of the task's configs: TrainingConfig with its sections; cached per set of sections."""
    return _schema(tuple(task.sections.items()))


@functools.cache
def _schema(sections: tuple[tuple[str, type[Section]], ...]) -> type[TrainingConfig]:
    for name, section in sections:
        field = TrainingConfig.model_fields.get(name)
        core = field.annotation if field is not None else None
        if isinstance(core, type) and not issubclass(section, core):
            raise TypeError(f"section {name}: {section.__name__} must subclass {core.__name__}")
    fields: dict[str, Any] = {name: (section, pydantic.Field(default_factory=section)) for name, section in sections}
    return pydantic.create_model("TaskConfig", __base__=TrainingConfig, **fields)


def dump(config: TrainingConfig) -> str:
    """Return the resolved config as YAML that `load` can read; a password that a script put into it is masked."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(plain(config))))


def _escaped(value: Any) -> Any:
    """Escape every `${` in nested values, which OmegaConf would read as an interpolation."""
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    return INTERPOLATION.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def plain(config: TrainingConfig) -> dict[str, Any]:
    """Return the config as nested plain values to write or show, with passwords masked."""
    return redaction.masked(config.model_dump(mode="json"))


def save(config: TrainingConfig, path: pathlib.Path) -> None:
    write_text(path, dump(config))


def differences(old: Section, new: Section) -> list[str]:
    """Return a line like `optim.lr: 0.001 -> 0.0001` for every setting that differs."""
    before, after = flatten(old.model_dump(mode="json")), flatten(new.model_dump(mode="json"))
    return [
        f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
        for key in sorted({*before, *after})
        if before.get(key, "absent") != after.get(key, "absent")
    ]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one with dotted keys."""
    return dict(leaves(values, prefix))


def texts(kind: type[pydantic.BaseModel]) -> frozenset[str]:
    """Return the keys whose value can only be a string (or null), such as a name or a path."""
    return frozenset(key for key, annotation in config_mistakes.settings(kind) if _is_text(annotation))


def _is_text(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        return _is_text(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return all(_is_text(kind) for kind in get_args(annotation) if kind is not types.NoneType)
    return annotation is str
