"""Handwritten digits with a small vision transformer: the smallest complete system, and the quick start."""

from jaxtrain.systems.digits.config import Data, Model
from jaxtrain.systems.digits.data import build_data, collate
from jaxtrain.systems.digits.losses import compute, eval_statistics, loss, outputs
from jaxtrain.systems.digits.model import build_model
from jaxtrain.task import Task, TorchTwin


def _build_twin(config):
    from jaxtrain.systems.digits.torch_twin import build

    return build(config)


def _call_twin(module, batch):
    return module(batch["image"])


def _twin_loss(module, batch, config):
    from jaxtrain.systems.digits.torch_twin import loss

    return loss(module, batch)


TASKS = {
    "classify": Task(
        sections={"model": Model, "data": Data},
        build_model=build_model,
        build_data=build_data,
        collate=collate,
        loss=loss,
        outputs=outputs,
        eval_statistics=eval_statistics,
        compute=compute,
        twin=TorchTwin(build=_build_twin, call=_call_twin, loss=_twin_loss),
        traced_hparams=("seed", "model.dropout"),
        tiny_config="digits_tiny",
    )
}
