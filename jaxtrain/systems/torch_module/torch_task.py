"""A torch module, its loss and an example batch as a `jaxtrain.task.Task`."""

import copy
import functools
import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from jaxtrain.data.collate import collate
from jaxtrain.data.sources import as_source
from jaxtrain.errors import UserError
from jaxtrain.systems.torch_module.torch_batch import Plan
from jaxtrain.systems.torch_module.torch_loss import LossEntry, check_loss, main_output, takes_target
from jaxtrain.task import Loss, Statistics, Task, TorchTwin
from torch_bridge.from_torch import ConvertedModule, Forward, Record, state_of, unwrapped, write_back
from torch_bridge.lowering import UnsupportedModel
from torch_bridge.lowering.errors import exception_line

RESERVED = ("valid", "index")


class TorchTask:
    """What a run of a torch module consists of: the module, the recorded forward pass, the recorded loss."""

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable | None,
        example_batch: Mapping[str, Any],
        inputs: list[str] | None = None,
        target: str | None = None,
    ):
        module = unwrapped(module)
        self.module = module
        example = {key: value for key, value in example_batch.items() if key not in RESERVED}
        self.plan = Plan.of(module, list(example), inputs, target)
        check_loss(loss)
        if loss is not None and takes_target(loss) and self.plan.target is None:
            raise UserError(
                f"the loss compares an output with a target; which entry of the batch is it? It has "
                f"{', '.join(example)}. Set loss.target_key"
            )
        self.entries = tuple(example)
        self.criterion = loss
        self.forward_record = Record(Forward(module))
        self.loss_record = Record(LossEntry(module, loss, self.plan))
        self.trained = {name: p.requires_grad for name, p in module.named_parameters(remove_duplicate=False)}
        valid = np.ones(len(example_batch["valid"]), bool)
        try:
            for training in (False, True):
                self.loss_record.graph((example, valid), training)
        except UnsupportedModel as error:
            raise UserError(str(error)) from error

    def build(self) -> ConvertedModule:
        """The flax module with empty parameters, `weights` fills them; buffers outside the state dict have theirs."""
        model = ConvertedModule(self.forward_record, self.module, self.loss_record.changed(), empty=True)
        model.definition = self
        return model

    def weights(self) -> dict[str, np.ndarray]:
        """The torch module's state dict."""
        return state_of(self.module)

    def trainable(self, key: str) -> bool:
        return self.trained.get(key, True)

    def loss(self, model: ConvertedModule, batch: Mapping[str, Any], rngs: Callable | None) -> Loss:
        entries = {key: batch[key] for key in self.entries}
        valid = jnp.asarray(batch["valid"])
        value, weight = self.loss_record.run(model, (entries, valid), rngs, valid)
        return Loss(value, weight)

    def outputs(self, model: ConvertedModule, batch: Mapping[str, Any]) -> Any:
        """Evaluation outputs, those with one row per sample, by name where there are several."""
        return _per_sample(self.plan.call(model, dict(batch), with_target=False), len(batch["valid"]))

    def call(self, module: torch.nn.Module, batch: Mapping[str, Any]) -> Any:
        """As `outputs`, by the torch module."""
        with torch.no_grad():
            return _per_sample(self.plan.call(module, dict(batch), with_target=False), len(batch["valid"]))

    def torch_loss(self, module: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        """As `loss`, by the torch module."""
        wide = {key: value.long() if value.dtype == torch.int32 else value for key, value in batch.items()}
        entries = {key: wide[key] for key in self.entries}
        return LossEntry(module, self.criterion, self.plan)(entries, batch["valid"])[0]

    def eval_statistics(self, outputs: Any, batch: Mapping[str, Any]) -> Statistics:
        """Accuracy, where the output is [batch, class] and the target int [batch]."""
        logits = main_output(outputs)
        target = batch.get(self.plan.target) if self.plan.target else None
        if logits.ndim != 2 or target is None or target.ndim != 1 or not jnp.issubdtype(target.dtype, jnp.integer):
            return Statistics()
        valid = batch["valid"]
        correct = (jnp.argmax(logits, -1) == target) & valid
        return Statistics({"correct": jnp.sum(correct), "seen": jnp.sum(valid)})

    @staticmethod
    def compute(sums: Mapping[str, Any]) -> dict[str, float]:
        if "seen" not in sums:
            return {}
        return {"accuracy": float(sums["correct"]) / max(float(sums["seen"]), 1.0)}

    def copy(self) -> torch.nn.Module:
        """The torch module once more, with its own weights."""
        twin = copy.deepcopy(self.module)
        twin.definition = self
        return twin

    def write_back(self, model: ConvertedModule) -> torch.nn.Module:
        """Trained weights into the torch module that the definition was made from."""
        return write_back(model, self.module)


def _per_sample(outputs: Any, batch: int) -> Any:
    """One tensor, or a dict of those whose first axis is the sample."""
    if isinstance(outputs, dict) or hasattr(outputs, "items"):
        named = dict(outputs.items())
    elif isinstance(outputs, (tuple, list)):
        named = {str(index): value for index, value in enumerate(outputs)}
    else:
        return outputs
    return {k: v for k, v in named.items() if hasattr(v, "shape") and len(v.shape) and v.shape[0] == batch}


def task_from_module(
    module: torch.nn.Module, loss: Callable | None, example_batch: Mapping[str, Any], **options: Any
) -> Task:
    """A Task that trains this very module: `Trainer(module, ..., loss=loss)` is made of it.

    loss: a torch loss module, a torch function of (output, batch), or None for the model's own. example_batch: one
    collated batch in numpy, with `valid` and `index`; its batch size does not matter. options: `inputs` and `target` of
    TorchTask. `task.twin.build(None)` gives a copy of the module; `torch_bridge.from_torch.write_back(model, module)`
    writes trained weights into the module itself.
    Raises UserError that lists everything that cannot be converted, with the lines of the module.
    """
    definition = TorchTask(module, loss, example_batch, **options)
    return Task(
        build_model=lambda config, rngs: definition.build(),
        initial_weights=lambda config: definition.weights(),
        loss=lambda model, batch, config, rngs: definition.loss(model, batch, rngs),
        outputs=definition.outputs,
        eval_statistics=lambda outputs, batch, config: definition.eval_statistics(outputs, batch),
        compute=lambda sums, rows, config: definition.compute(sums),
        trainable=lambda key, config: definition.trainable(key),
        twin=TorchTwin(
            build=lambda config: definition.copy(),
            call=definition.call,
            loss=lambda module, batch, config: definition.torch_loss(module, batch),
        ),
        couples_samples=any(isinstance(inner, torch.nn.modules.batchnorm._BatchNorm) for inner in module.modules()),
    )


# --- from YAML ------------------------------------------------------------------------------------------------------


def definition_of(config: Any) -> TorchTask:
    """The definition that a config describes; made once per process and config."""
    sections = {name: getattr(config, name).model_dump(mode="json") for name in ("model", "data", "loss")}
    return _definition(json.dumps({**sections, "seed": config.seed}, sort_keys=True))


@functools.lru_cache(maxsize=4)
def _definition(text: str) -> TorchTask:
    sections = json.loads(text)
    model, data, loss = sections["model"], sections["data"], sections["loss"]
    torch.manual_seed(sections["seed"])
    module = construct(model["target"], model["kwargs"], "model.target")
    if not isinstance(module, torch.nn.Module):
        raise UserError(f"model.target: {model['target']} gives {type(module).__name__}, wanted a torch.nn.Module")
    source = _source(data, "train")
    if source is None:
        raise UserError("data.target gives no training data, and the module is recorded with its first samples")
    example = collate([source[0], source[min(1, len(source) - 1)]])
    example = {**example, "valid": np.ones(2, bool), "index": np.arange(2, dtype=np.int32)}
    criterion = None
    if loss["target"] is not None:
        criterion = find(loss["target"], "loss.target")
        if isinstance(criterion, type):
            criterion = construct(loss["target"], loss["kwargs"], "loss.target")
    return TorchTask(module, criterion, example, model["inputs"], loss["target_key"])


def build_data(config: Any, split: str) -> Any:
    """The Dataset of a split, or None."""
    return _source(config.data.model_dump(), split)


def _source(data: Mapping[str, Any], split: str) -> Any:
    if data["target"] is None:
        return None
    dataset = construct(data["target"], {"split": split, **data["kwargs"]}, "data.target")
    return None if dataset is None else as_source(dataset, split)


def find(path: str, key: str) -> Any:
    """The object at an import path. Raises UserError with the part that is missing."""
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
        except Exception as error:  # whatever a package does while it is imported
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
    except Exception as error:  # packages that import a part when it is asked for
        raise _broken(key, module_name, error) from error


def _broken(key: str, module_name: str, error: Exception) -> UserError:
    words = " ".join(str(error).split())[:300]
    return UserError(
        f"{key}: importing {module_name} raised {type(error).__name__}: {words}. "
        f'`python -c "import {module_name}"` shows the whole error; do the versions of what it imports fit together?'
    )


def construct(path: str, kwargs: Mapping[str, Any], key: str) -> Any:
    """What is at an import path, called. Raises UserError where the arguments do not fit."""
    made = find(path, key)
    try:
        return made(**kwargs)
    except TypeError as error:
        raise UserError(f"{key}: {path} does not take these arguments ({', '.join(kwargs)}): {error}") from error
    except UserError:
        raise
    except Exception as error:  # whatever the user's own code does
        words = " ".join(str(error).split())[:300]
        raise UserError(f"{key}: {path} raised {type(error).__name__}: {words}, at {exception_line(error)}") from error
