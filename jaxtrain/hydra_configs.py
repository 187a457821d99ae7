"""Configs that Hydra composes: `defaults:`, config groups, ${now:}. Composing needs the extra `jaxtrain[hydra]`."""

import datetime
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jaxtrain.errors import UserError

NOW = re.compile(r"\$\{now:([^}]*)\}")


def is_composed(values: Mapping[str, Any]) -> bool:
    """Tell whether a file has a defaults list, without which Hydra reads it as it is."""
    return isinstance(values.get("defaults"), list)


def compose(path: pathlib.Path, overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Compose the file with Hydra, from the config groups beside it; return its values and the overrides left over.

    Hydra takes `group=option` where the group's folder holds that option, and what starts with + or ~. Raises UserError
    where Hydra is not installed, or cannot compose it.
    """
    try:
        import hydra
        from hydra.errors import HydraException
    except ImportError:
        raise UserError(
            f"{path}: has a `defaults` list, which Hydra composes; install the extra: pip install 'jaxtrain[hydra]'"
        ) from None
    folder = path.resolve().parent
    theirs = [override for override in overrides if _is_hydras(override, folder)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Hydra about newer versions of OmegaConf
            with hydra.initialize_config_dir(str(folder), version_base="1.3"):
                composed = hydra.compose(path.stem, theirs)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"{path}: Hydra cannot compose it: {' '.join(str(error).split())}") from None
    values = cast(dict[str, Any], OmegaConf.to_container(composed))
    return values, [override for override in overrides if override not in theirs]


def _is_hydras(override: str, folder: pathlib.Path) -> bool:
    group, _, option = override.partition("=")
    if override[:1] in ("+", "~"):
        return True
    return (folder / group).is_dir() and (folder / group / f"{option}.yaml").is_file()


def resolve(values: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve interpolations, Hydra's ${now:%Y-%m-%d} among them. Raises UserError for one that cannot be."""
    started = datetime.datetime.now()
    try:
        # Written out, because OmegaConf keeps resolvers for the whole process.
        dated = _mapped(values, lambda text: NOW.sub(lambda found: started.strftime(found[1]), text))
        return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(dated), resolve=True))
    except OmegaConfBaseException as error:
        raise UserError(" ".join(str(error).split())) from None


def _mapped(value: Any, function: Callable[[str], str]) -> Any:
    """The same nested values with every text replaced by function(text)."""
    if isinstance(value, Mapping):
        return {key: _mapped(inner, function) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mapped(inner, function) for inner in value]
    return function(value) if isinstance(value, str) else value
