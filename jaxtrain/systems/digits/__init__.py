"""Handwritten digits with a small vision transformer: the smallest complete system, and the quick start."""

from jaxtrain.lazy import lazy
from jaxtrain.systems.digits.config import Data, Model
from jaxtrain.systems.digits.data import build_data, collate
from jaxtrain.systems.digits.losses import compute, eval_statistics, loss, outputs
from jaxtrain.systems.digits.model import build_model
from jaxtrain.task import Task, TorchTwin

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
        twin=TorchTwin(
            build=lazy("jaxtrain.systems.digits.torch_twin:build"),
            call=lazy("jaxtrain.systems.digits.torch_twin:call"),
            loss=lazy("jaxtrain.systems.digits.torch_twin:loss"),
        ),
        traced_hparams=("seed", "model.dropout"),
    )
}
