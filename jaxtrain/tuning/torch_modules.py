"""Trials of `task: torch_module` in one program: modules, data and losses as their configs name them."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxtrain.config import TrainingConfig
from jaxtrain.data.sources import as_source
from jaxtrain.errors import UserError
from jaxtrain.systems.torch_module.config import Model
from jaxtrain.task import Task
from jaxtrain.torch_task import task_of
from jaxtrain.tuning import lanes

__all__ = ["Model", "programs"]


def programs(configs: Sequence[Any]) -> lanes.Prepared:
    """Return the runs of these configs as batches that train together. Raises UserError as `lanes.programs` does, for
    `lora`, and for data that vary."""
    from jaxtrain.systems.torch_module import torch_definition
    from torch_bridge.training import module_runs

    if configs[0].lora.rank:
        raise UserError("--vmap: modules with lora train one by one; leave --vmap out")
    if len({config.data.model_dump_json(include={"target", "kwargs"}) for config in configs}) > 1:
        raise UserError("--vmap: data.target and data.kwargs vary, and trials in one program share their data")
    sources = {split: torch_definition.build_data(configs[0], split) for split in ("train", "validation")}
    train, validation = (None if source is None else as_source(source, split) for split, source in sources.items())
    of_dir = {config.run.dir: config for config in configs}

    def make(plan: lanes.Plan) -> Any:
        config = of_dir[plan.config.run.dir]
        model, loss = config.model, config.loss
        build = lambda **kwargs: torch_definition.construct(model.target, kwargs, "model.target")
        criterion = None if loss.target is None else torch_definition.find(loss.target, "loss.target")
        numbers = loss.kwargs if isinstance(criterion, type) else {}
        return module_runs.make_run(build, criterion, config.seed, model.kwargs, numbers)

    def recorded(plan: lanes.Plan, run: Any) -> Task:
        made = torch_definition.recorded(of_dir[plan.config.run.dir], run.module, run.loss)
        options: dict[str, Any] = {"couples_samples": made.couples_samples, "target": made.plan.target}
        return task_of(lambda config: made, made.call, made.module, **options)

    plans = [
        lanes.Plan({}, train, validation, number=number, config=_core(config)) for number, config in enumerate(configs)
    ]
    return lanes.programs(plans, make, recorded, jax.local_devices()[:1], len(plans))


def _core(config: Any) -> TrainingConfig:
    """Return the config without what names module, loss and data, which were made already."""
    known = TrainingConfig.model_fields
    values = {name: value for name, value in config.model_dump(mode="json").items() if name in known}
    values["data"] = {name: value for name, value in values["data"].items() if name not in ("target", "kwargs")}
    return TrainingConfig(**values)
