"""Task for any torch.nn.Module: `task: torch_module`, with module, dataset and loss given as import paths.

The equivalent in Python is `Trainer(torch_module, train_dataset, val_dataset, config, loss=...)`.
"""

from jaxtrain.lazy import lazy
from jaxtrain.systems.torch_module.config import Data, LossSection, Model
from jaxtrain.torch_task import task_of

TASKS = {
    "train": task_of(
        lazy("jaxtrain.systems.torch_module.torch_definition:definition_of"),
        lambda module, batch: module.definition.call(module, batch),
        sections={"model": Model, "data": Data, "loss": LossSection},
        build_data=lazy("jaxtrain.systems.torch_module.torch_definition:build_data"),
    )
}
