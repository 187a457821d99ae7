"""Any torch.nn.Module as a task: `task: torch_module`, with the module, its dataset and its loss by import path.

In Python the same is `Trainer(torch_module, train_dataset, val_dataset, config, loss=...)`.
"""

from jaxtrain.lazy import lazy
from jaxtrain.systems.torch_module.config import Data, LossSection, Model
from jaxtrain.task import Task, TorchTwin

_definition = lazy("jaxtrain.systems.torch_module.torch_task:definition_of")

TASKS = {
    "train": Task(
        sections={"model": Model, "data": Data, "loss": LossSection},
        build_model=lambda config, rngs: _definition(config).build(),
        initial_weights=lambda config: _definition(config).weights(),
        build_data=lazy("jaxtrain.systems.torch_module.torch_task:build_data"),
        loss=lambda model, batch, config, rngs: _definition(config).loss(model, batch, rngs),
        outputs=lambda model, batch: model.definition.outputs(model, batch),
        eval_statistics=lambda outputs, batch, config: _definition(config).eval_statistics(outputs, batch),
        compute=lambda sums, rows, config: _definition(config).compute(sums),
        trainable=lambda key, config: _definition(config).trainable(key),
        twin=TorchTwin(
            build=lambda config: _definition(config).copy(),
            call=lambda module, batch: module.definition.call(module, batch),
            loss=lambda module, batch, config: module.definition.torch_loss(module, batch),
        ),
        tiny_config="torch_module_tiny",
    )
}
