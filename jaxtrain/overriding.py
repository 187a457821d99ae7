"""Apply overrides `section.key=value` and interpolations to the nested values of a config file."""

import itertools
import pathlib
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from yaml import YAMLError

from jaxtrain import redaction, yaml_limits
from jaxtrain.config import FLAT_NAMES, nest_flat_names
from jaxtrain.errors import UserError, one_line, shortened
from jaxtrain.original_configs import leaves

MISSING = "???"  # OmegaConf's mark of a value that is still to be given
NULLS = ("", "~", "null", "Null", "NULL")  # how YAML writes null
SURROGATES = re.compile("[\ud800-\udfff]")  # how Python represents bytes that are not UTF-8


def apply(values: dict[str, Any], overrides: Sequence[str], texts: Set[str], path: pathlib.Path) -> dict[str, Any]:
    """Return the values with overrides applied (the last one of a setting wins) and interpolations resolved.

    texts: keys of settings whose value is taken as typed, see `text`. path: the file; its name becomes run.name if none
    is set. Raises UserError for an override or interpolation that cannot be applied.
    """
    for override in overrides:
        _check_form(override, texts)
    try:
        merged = OmegaConf.create(_nested(values, path))
        for override in overrides:
            _set(merged, override, texts, path)
        unresolved = _plain(merged)
        _refuse_secrets(unresolved, path)
        resolved = _plain(OmegaConf.create(_full_references(unresolved)), resolve=True)
    except UserError:
        raise
    except Exception as error:  # OmegaConf and its grammar raise many types for text they reject
        applied = shortened(" ".join(overrides)) or "its interpolations"
        raise UserError(f"{path}: cannot apply {applied}: {one_line(error)}") from None
    if not isinstance(resolved, dict):
        raise UserError(f"{path}: wanted sections such as `task:` and `optim:`, got {shortened(resolved)}")
    listed = lambda value: value if isinstance(value, list) else [value]
    if missing := [key for key, value in leaves(resolved) if MISSING in listed(value)]:
        given = " ".join(f"{key}=..." for key in missing)
        raise UserError(f"{path}: {', '.join(missing)}: is still {MISSING}; give a value, as in {given}")
    resolved["run"] = resolved.get("run") or {}
    if isinstance(resolved["run"], dict) and resolved["run"].get("name") is None:
        resolved["run"]["name"] = path.stem
    return resolved


def text(value: str) -> str | None:
    """Return a text as typed, without the quotes around it; None for null."""
    if value in NULLS:
        return None
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        try:
            unquoted = _plain(OmegaConf.from_dotlist([f"text={value}"]))["text"]
        except YAMLError:
            return value
        return unquoted if isinstance(unquoted, str) else value
    return value


def _check_form(override: str, texts: Set[str]) -> None:
    key, equals, value = override.partition("=")
    shown = repr(shortened(override))
    if not key or not equals:
        raise UserError(f"override {shown}: wanted section.key=value, as in optim.lr=1e-4")
    if SURROGATES.search(override):
        raise UserError(f"override {shown}: holds bytes that are not UTF-8, which config.yaml cannot keep; rename it")
    try:
        opened = itertools.accumulate((one in "[{") - (one in "]}") for one in value)  # OmegaConf recurses into them
        if max(key.count(".") + key.count("["), max(opened, default=0)) > yaml_limits.DEEPEST:
            raise yaml_limits.TooLarge(f"nested more than {yaml_limits.DEEPEST} deep")
        if _target(key) not in texts:
            yaml_limits.check(value)
    except yaml_limits.TooLarge as error:
        raise UserError(f"override {shown}: {error}") from None
    except YAMLError:
        pass  # OmegaConf reads it as text, or reports what is wrong


def _set(merged: DictConfig, override: str, texts: Set[str], path: pathlib.Path) -> None:
    key, _, value = override.partition("=")
    try:
        _check_place(merged, _target(key))
        if _target(key) in texts:
            OmegaConf.update(merged, _target(key), text(value))
        elif key in FLAT_NAMES:
            merged.merge_with(nest_flat_names(_plain(OmegaConf.from_dotlist([override]))))
        else:
            merged.merge_with_dotlist([override])
    except Exception as error:  # OmegaConf and YAML raise many types for keys and values they reject
        why = f"{one_line(error)}{_advice(key, value)}"
        raise UserError(f"{path}: cannot apply {shortened(override)}: {why}") from None


def _check_place(merged: DictConfig, key: str) -> None:
    """Raise ValueError if the key goes into a value that is no section, or no list."""
    listed = re.fullmatch(r"(.+)\[\d+\]", key)
    if listed and not isinstance(OmegaConf.select(merged, listed[1]), ListConfig):
        raise ValueError(f"{listed[1]} is no list yet")
    sections = itertools.accumulate(re.split(r"[.\[]", key)[:-1], "{}.{}".format)
    for section in sections:
        value = OmegaConf.select(merged, section)
        if value is not None and not OmegaConf.is_config(value):
            raise ValueError(f"{section} is {value!r}, wanted a section of settings, such as {section}: {{name: ...}}")


def _target(key: str) -> str:
    return FLAT_NAMES.get(key, key)


def _nested(values: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    try:
        return nest_flat_names(values)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _full_references(values: Any) -> Any:
    """Replace references by flat name, such as ${learning_rate}, by ${optim.lr}."""
    if isinstance(values, dict):
        return {key: _full_references(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_full_references(value) for value in values]
    if not isinstance(values, str):
        return values
    return re.sub(r"\$\{(\w+)\}", lambda found: f"${{{_target(found[1])}}}", values)


def _advice(key: str, value: str) -> str:
    """Return advice on an override that YAML or OmegaConf rejects; "" if there is none."""
    if "[" in key:
        return f"; give the whole list: '{key.partition('[')[0]}=[a, b]'"
    if value[:1] in tuple("*&!%@`|>"):
        return f"; a text that begins so wants quotes within quotes: {key}='\"{shortened(value)}\"'"
    return ""


def _plain(config: Any, resolve: bool = False) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=resolve))


def _refuse_secrets(values: Mapping[str, Any], path: pathlib.Path) -> None:
    """Raise UserError for a password or token: settings are printed, saved in config.yaml and sent to trackers."""
    for key, value in leaves(values):
        if redaction.mask(str(value)) != str(value):
            raise UserError(
                f"{path}: {key}: holds a password or token, which config.yaml and the trackers would show; leave it "
                "out of the address and set it in the environment (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD)"
            )
        secret = re.search(r"oc\.env:\s*(\w*(?:TOKEN|KEY|SECRET|PASSW|CREDENTIAL)\w*)", str(value), re.IGNORECASE)
        if secret:
            raise UserError(
                f"{path}: {key}: {secret.group(1)} looks like a secret, which config.yaml and the trackers would show; "
                "libraries read it from the environment themselves"
            )
