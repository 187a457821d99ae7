"""Read configs written for Hydra: `defaults:`, config groups, ${now:}. Composing needs the extra `jaxtrain[hydra]`."""

import datetime
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from jaxtrain.errors import UserError, install

NOW = re.compile(r"\$\{now:([^}]*)\}")
FOLDER = re.compile(r"\$\{hydra:runtime\.cwd\}")
OPTION = re.compile(r"[\w./-]+")  # the name of a file in a config group


def is_composed(values: Mapping[str, Any]) -> bool:
    """Return True if a file has a defaults list; without one there is nothing to compose."""
    return isinstance(values.get("defaults"), list)


def compose(path: pathlib.Path, overrides: Sequence[str]) -> tuple[dict[str, Any], list[str], str | None]:
    """Compose the file with Hydra, from the config groups beside it.

    Return its values, the overrides left over, and the chosen option of the group `task`, if there is one. Hydra is
    given `group=option`, +group=option and ~group if the group has a folder. Raises UserError if Hydra is not
    installed, cannot compose the file, or the group has no such option.
    """
    try:
        import hydra
        from hydra.errors import HydraException
    except ImportError:
        raise UserError(
            f"{path}: has a `defaults` list, which Hydra composes; install the extra: {install('hydra')}"
        ) from None
    folder = path.resolve().parent
    theirs = [override for override in overrides if _is_hydras(override, folder)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hydra warns about newer versions of OmegaConf
            with hydra.initialize_config_dir(str(folder), version_base="1.3"):
                composed = hydra.compose(path.stem, theirs, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"{path}: Hydra cannot compose it: {' '.join(str(error).split())}") from None
    values = cast(dict[str, Any], OmegaConf.to_container(composed))
    task = values.pop("hydra")["runtime"]["choices"].get("task")
    left = [override for override in overrides if override not in theirs]
    return values, left, task if isinstance(task, str) else None


def _is_hydras(override: str, folder: pathlib.Path) -> bool:
    group, option = key_of(override).partition("@")[0], override.partition("=")[2]
    if not group or not (folder / group).is_dir():
        return False
    if override.startswith("~") or (OPTION.fullmatch(option) and (folder / group / f"{option}.yaml").is_file()):
        return True
    if group == "task" or option == "null" or not OPTION.fullmatch(option):  # a task of this project, or a section
        return False
    known = sorted(file.stem for file in (folder / group).glob("*.yaml"))
    raise UserError(f"{override}: {folder / group} has no {option}.yaml, wanted one of {', '.join(known)}")


def start_of(path: pathlib.Path) -> pathlib.Path | None:
    """Return the file whose defaults list names the config group in which `path` lies; None if there is none."""
    group = path.resolve().parent
    for file in sorted(group.parent.glob("*.yaml")):
        try:
            values = OmegaConf.to_container(OmegaConf.load(file))
        except (OmegaConfBaseException, YAMLError, OSError):
            continue
        chosen = values.get("defaults") if isinstance(values, Mapping) else None
        groups = [key for one in chosen or () if isinstance(one, Mapping) for key in one]
        if any(str(key).removeprefix("override ").strip("/").partition("@")[0] == group.name for key in groups):
            return file
    return None


def key_of(override: str) -> str:
    """Return the dotted key of an override, without Hydra's +, ++ or ~ prefix."""
    return override.partition("=")[0].lstrip("+~")


def override(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply overrides as Hydra does: `key=value`, +key=value, ++key=value, and ~key, which removes a key.

    A key is set whether or not it exists. Raises UserError if a key to remove does not exist.
    """
    for one in overrides:
        if one.startswith("~"):
            values = _without(values, key_of(one).split("."), one)
    given = [one.lstrip("+") for one in overrides if not one.startswith("~")]
    try:
        merged = OmegaConf.merge(OmegaConf.create(dict(values)), OmegaConf.from_dotlist(given))
        return cast(dict[str, Any], OmegaConf.to_container(merged))
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"{' '.join(given)}: {' '.join(str(error).split())}") from None


def _without(values: Any, key: Sequence[str], asked: str) -> dict[str, Any]:
    if not isinstance(values, Mapping) or key[0] not in values:
        raise UserError(f"override {asked}: there is no {key[0]} to remove")
    if len(key) > 1:
        return {**values, key[0]: _without(values[key[0]], key[1:], asked)}
    return {name: value for name, value in values.items() if name != key[0]}


def resolve(values: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve interpolations, also ${now:%Y-%m-%d} and ${hydra:runtime.cwd}. Raises UserError if one cannot be."""
    started = datetime.datetime.now()
    try:
        # Replaced as text, because a resolver would be registered with OmegaConf for the whole process.
        dated = _mapped(values, lambda text: NOW.sub(lambda found: started.strftime(found[1]), text))
        placed = _mapped(dated, lambda text: FOLDER.sub(lambda _: os.getcwd(), text))
        return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(placed), resolve=True))
    except OmegaConfBaseException as error:
        raise UserError(" ".join(str(error).split())) from None


def _mapped(value: Any, function: Callable[[str], str]) -> Any:
    """Return the nested values with every text replaced by function(text)."""
    if isinstance(value, Mapping):
        return {key: _mapped(inner, function) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mapped(inner, function) for inner in value]
    return function(value) if isinstance(value, str) else value
