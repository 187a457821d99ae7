"""Import and construct the torch module, Dataset and loss that a YAML file names by import path."""

import functools
import importlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

import torch

from jaxtrain.config import LoraConfig
from jaxtrain.data.collate import collate
from jaxtrain.data.sources import as_source
from jaxtrain.errors import UserError
from torch_bridge.lowering.errors import exception_line
from torch_bridge.training.torch_task import TorchTask


def definition_of(config: Any) -> TorchTask:
    """Return the task's definition for a config; cached, so it is made once per process and config."""
    sections = {name: getattr(config, name).model_dump(mode="json") for name in ("model", "data", "loss", "lora")}
    return _definition(json.dumps({**sections, "seed": config.seed}, sort_keys=True))


@functools.lru_cache(maxsize=4)
def _definition(text: str) -> TorchTask:
    sections = json.loads(text)
    model, data, loss = sections["model"], sections["data"], sections["loss"]
    torch.manual_seed(sections["seed"])
    module = construct(model["target"], model["kwargs"], "model.target")
    if not isinstance(module, torch.nn.Module):
        raise UserError(f"model.target: {model['target']} gives {type(module).__name__}, wanted a torch.nn.Module")
    criterion = None
    if loss["target"] is not None:
        criterion = find(loss["target"], "loss.target")
        if isinstance(criterion, type):
            criterion = construct(loss["target"], loss["kwargs"], "loss.target")
    options = LoraConfig(**sections["lora"])
    adapters = (options, sections["seed"]) if options.rank else None
    return TorchTask(module, criterion, _example(data), model["inputs"], loss["target_key"], adapters)


def recorded(config: Any, module: torch.nn.Module, criterion: Any) -> TorchTask:
    """Record a module and a loss that were made already, for a config's data."""
    return TorchTask(module, criterion, _example(config.data.model_dump()), config.model.inputs, config.loss.target_key)


def _example(data: Mapping[str, Any]) -> dict[str, Any]:
    source = _source(data, "train")
    if source is None:
        raise UserError("data.target gives no training data, and the module is recorded with its first samples")
    return collate([source[0], source[min(1, len(source) - 1)]])


def build_data(config: Any, split: str) -> Any:
    """Return the data source of a split, or None."""
    return _source(config.data.model_dump(), split)


def _source(data: Mapping[str, Any], split: str) -> Any:
    if data["target"] is None:
        return None
    dataset = dataset_of(data["target"], split, data["kwargs"], "data.target")
    return None if dataset is None else as_source(dataset, split)


def dataset_of(path: str, split: str, kwargs: Mapping[str, Any], key: str) -> Any:
    """Call the function at an import path that gives a split's Dataset or DataLoader, or None; of a function without
    an argument `split`, the training data. Raises UserError as `construct`."""
    made = find(path, key)
    try:
        parameters = inspect.signature(made).parameters.values()
        takes_split = any(p.name == "split" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    except (ValueError, TypeError):  # C code tells no signature
        takes_split = True
    if not takes_split and split != "train":
        return None
    return construct(path, {**({"split": split} if takes_split else {}), **kwargs}, key)


def find(path: str, key: str) -> Any:
    """Return the object at an import path, package.name or package:name. Raises UserError naming the missing part."""
    path = path.replace(":", ".")
    module_name, _, name = path.rpartition(".")
    parts = [name]
    while module_name:
        try:
            value = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name + ".").startswith(error.name + "."):
                raise _broken(key, module_name, error) from error
            module_name, _, last = module_name.rpartition(".")
            parts.insert(0, last)
            continue
        except Exception as error:  # importing a package can raise anything
            raise _broken(key, module_name, error) from error
        for part in parts:
            value = _attribute(value, part, key, path, module_name)
        return value
    raise UserError(f"{key}: {path!r} cannot be imported; is its folder on PYTHONPATH?")


def _attribute(value: Any, name: str, key: str, path: str, module_name: str) -> Any:
    try:
        return getattr(value, name)
    except AttributeError:
        raise UserError(f"{key}: {module_name} has no {name!r} ({path})") from None
    except Exception as error:  # packages that import their parts lazily
        raise _broken(key, module_name, error) from error


def _broken(key: str, module_name: str, error: Exception) -> UserError:
    words = " ".join(str(error).split())[:300]
    return UserError(
        f"{key}: importing {module_name} raised {type(error).__name__}: {words}. "
        f'`python -c "import {module_name}"` shows the whole error; do the versions of what it imports fit together?'
    )


def construct(path: str, kwargs: Mapping[str, Any], key: str) -> Any:
    """Import the object at a path and call it. Raises UserError if the arguments do not fit or the call fails."""
    made = find(path, key)
    try:
        return made(**kwargs)
    except TypeError as error:
        raise UserError(f"{key}: {path} does not take these arguments ({', '.join(kwargs)}): {error}") from error
    except UserError:
        raise
    except Exception as error:  # the user's code can raise anything
        words = " ".join(str(error).split())[:300]
        raise UserError(f"{key}: {path} raised {type(error).__name__}: {words}, at {exception_line(error)}") from error
