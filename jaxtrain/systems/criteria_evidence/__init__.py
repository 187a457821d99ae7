"""PSY agents: is a symptom present in a text, and which sentence says so? Four tasks on BERT-family encoders."""

import functools
import importlib

from jaxtrain.systems.criteria_evidence.config import Data, Decode, JointModel, LossSettings, Model
from jaxtrain.systems.criteria_evidence.data import build_data
from jaxtrain.systems.criteria_evidence.hf_folder import export, initial_weights
from jaxtrain.systems.criteria_evidence.metrics import compute, eval_statistics
from jaxtrain.systems.criteria_evidence.model import build_model, param_group, trainable
from jaxtrain.systems.criteria_evidence.original.legacy_config import ORIGINAL
from jaxtrain.systems.criteria_evidence.procedure import loss, outputs, schedule
from jaxtrain.task import Task, TorchTwin


def _build_twin(architecture, config):
    from jaxtrain.systems.criteria_evidence import torch_twin

    return torch_twin.build(architecture, config)


def _call_twin(module, batch):
    from jaxtrain.systems.criteria_evidence import torch_twin

    return torch_twin.call(module, batch)


def _twin_loss(module, batch, config):
    from jaxtrain.systems.criteria_evidence import torch_twin

    return torch_twin.loss(module, batch, config)


def _tokenizer_files(config):
    from jaxtrain.systems.criteria_evidence.data import tokenizer_of
    from jaxtrain.systems.criteria_evidence.hf_folder import tokenizer_files

    return tokenizer_files(config, tokenizer_of(config))


def _report(architecture, model, source, config, folder):
    from jaxtrain.systems.criteria_evidence.evals import report

    return report.write(architecture, model, source, config, folder)


NUMBERS = (
    "seed",
    "model.criteria.dropout",
    "model.evidence.dropout",
    "model.encoder_dropout",
    "model.lora.dropout",
    "loss.weights.criteria",
    "loss.weights.evidence",
)


def _task(architecture: str) -> Task:
    of = lambda function: functools.partial(function, architecture)
    return Task(
        sections={
            "model": JointModel if architecture == "joint" else Model,
            "data": Data,
            "loss": LossSettings,
            "decode": Decode,
        },
        build_model=of(build_model),
        build_data=of(build_data),
        loss=loss,
        outputs=outputs,
        eval_statistics=eval_statistics,
        compute=compute,
        trainable=of(trainable),
        param_group=param_group,
        initial_weights=initial_weights,
        schedule=schedule,
        report=of(_report),
        twin=TorchTwin(
            build=of(_build_twin), call=_call_twin, loss=_twin_loss, hf=of(export), hf_files=_tokenizer_files
        ),
        traced_hparams=NUMBERS + (("model.fusion_dropout",) if architecture == "joint" else ()),
        original=ORIGINAL,
        tiny_config=f"{architecture}_tiny",
    )


TASKS = {name: _task(name) for name in ("criteria", "evidence", "share", "joint")}


FACADE = (
    "CriteriaDataset",
    "EvidenceDataset",
    "JointDataset",
    "ShareDataset",
    "compute_total_steps",
    "criterion_text",
    "criterion_texts",
    "get_device",
    "get_optimal_dataloader_kwargs",
    "random_split_indices",
    "set_seed",
)


def __getattr__(name: str):
    if name in FACADE:
        return getattr(importlib.import_module("jaxtrain.systems.criteria_evidence.original.torch_compat"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
