"""Decide which code a config may name. `jaxtrain run` allows all. A command on a run folder, which may come from a
stranger, allows jaxtrain's own code, and torch modules and datasets of packages that the user allows.

JAXTRAIN_TRUST=torchvision,timm allows installed packages; --trust allows everything that the folder names.
"""

import contextlib
import contextvars
import dataclasses
import importlib
import importlib.util
import os
import pathlib
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

from jaxtrain.errors import UserError

if TYPE_CHECKING:  # pydantic is slow to import, and commands import this module before they handle signals
    from pydantic import BaseModel

VARIABLE = "JAXTRAIN_TRUST"
EXAMPLES = "jaxtrain.systems.torch_module.torch_examples"
OWN = {f"{EXAMPLES}.{name}" for name in ("DigitsNet", "digits", "digits_tuples", "keywords", "hugging_face", "timm")}
BASES = {("torch.nn.modules.module", "Module"), ("torch.utils.data.dataset", "Dataset")}

_ADVICE = "Where you know who made the folder, add --trust"


@dataclasses.dataclass(frozen=True)
class _Restriction:
    known: Collection[str]
    advice: str


_restricted: contextvars.ContextVar[_Restriction | None] = contextvars.ContextVar("restricted", default=None)


@contextlib.contextmanager
def restricted(known: Collection[str] = (), advice: str = _ADVICE) -> Iterator[None]:
    """Return a context in which code that a config names runs only if it is allowed or one of the `known` names.
    advice: a sentence for the message of a refusal."""
    before = _restricted.set(_Restriction(known, advice))
    try:
        yield
    finally:
        _restricted.reset(before)


def allows_task(name: str) -> bool:
    """Return True if a task from outside jaxtrain may be imported."""
    limits = _restricted.get()
    return limits is None or name in limits.known or _is_allowed_package(name.partition(".")[0])


def check(config: "BaseModel", source: str | pathlib.Path) -> None:
    """Raise UserError if the config names code that may not run here."""
    limits = _restricted.get()
    if limits is None:
        return
    for key, name in named_code(config).items():
        if name not in limits.known and not _is_allowed(name):
            raise refusal(key, name, source)
    for key, value in _leaves(config.model_dump()):
        if key.rpartition(".")[2] == "trust_remote_code" and value:  # transformers' argument, among a target's
            raise refusal(key, "code of a model's own repository", source)


def refusal(key: str, name: str, source: str | pathlib.Path) -> UserError:
    return UserError(
        f"{source}: {key} names {name}, which would run here. {_restricted.get().advice}; "
        f"{VARIABLE}=PACKAGE,... allows the torch modules and datasets of installed packages"
    )


def named_code(config: "BaseModel", prefix: str = "") -> dict[str, str]:
    """Return the settings that name code, with the names they hold."""
    from jaxtrain.config import ImportPath  # imports pydantic, which --help does not need

    found: dict[str, str] = {}
    for key, field in type(config).model_fields.items():
        value = getattr(config, key)
        if hasattr(type(value), "model_fields"):
            found |= named_code(value, f"{prefix}{key}.")
        elif isinstance(value, str) and (ImportPath in field.metadata or _is_marked(field.annotation)):
            found[prefix + key] = value
    return found


def _is_marked(annotation: Any) -> bool:
    from jaxtrain.config import ImportPath

    return ImportPath in getattr(annotation, "__metadata__", ()) or any(map(_is_marked, get_args(annotation)))


def _is_allowed(path: str) -> bool:
    from jaxtrain.config import OPTIMIZERS

    if path in OWN or path in OPTIMIZERS:
        return True
    package = path.partition(".")[0]
    if not (path.startswith("torch.nn.") and _is_installed("torch")) and not _is_allowed_package(package):
        return False
    value = _find(path)
    if path.startswith("torch.nn.functional."):  # these only compute with tensors
        return getattr(value, "__module__", None) in ("torch.nn.functional", "torch._C._nn")
    bases = {(base.__module__, base.__name__) for base in value.__mro__} if isinstance(value, type) else set()
    return bool(bases & BASES)


def _is_allowed_package(package: str) -> bool:
    allowed = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    return package in allowed and _is_installed(package)


def _is_installed(package: str) -> bool:
    """Return True if the package is in site-packages; one of that name in the working directory does not count."""
    try:
        spec = importlib.util.find_spec(package)
    except (ValueError, ImportError):
        return False
    places = [pathlib.Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")]
    origin = spec and spec.origin
    return bool(origin) and any(pathlib.Path(origin).resolve().is_relative_to(place) for place in places)


def _find(path: str) -> Any:
    """Return the object at an import path in an allowed package; None if there is none."""
    parts = path.split(".")
    if not all(part.isidentifier() and not part.startswith("__") for part in parts):
        return None
    for count in range(len(parts) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part, None)
        return value
    return None


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner, key)
    else:
        yield key, value
