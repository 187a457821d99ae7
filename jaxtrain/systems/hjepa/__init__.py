"""H-JEPA: hierarchical joint-embedding predictive pre-training of vision transformers, and the LeWM world model."""

import importlib

from jaxtrain.systems.hjepa import pretraining, world_model
from jaxtrain.systems.hjepa.config import (
    HJepaData,
    LossConfig,
    MaskingConfig,
    ModelConfig,
    ProbeConfig,
    SequenceData,
    WorldModelConfig,
    WorldModelLoss,
)
from jaxtrain.systems.hjepa.original.legacy_config import ORIGINAL
from jaxtrain.task import Task, TorchTwin


def _build_twin(config):
    from jaxtrain.systems.hjepa.torch_twin import HJEPA

    return HJEPA(config)


def _call_twin(module, batch):
    from jaxtrain.systems.hjepa.torch_twin import outputs

    return outputs(module, batch)


def _twin_loss(module, batch, config):
    from jaxtrain.systems.hjepa.torch_twin import loss

    return loss(module, batch, config)


def _move_twin(module, updates, config):
    from jaxtrain.systems.hjepa.torch_twin import after_update

    after_update(module, updates, config)


def _build_world_twin(config):
    from jaxtrain.systems.hjepa.torch_twin import LeWorldModel

    return LeWorldModel(config)


def _call_world_twin(module, batch):
    embeddings, predictions = module(batch["frames"], batch["actions"])
    return {"embeddings": embeddings, "predictions": predictions}


def _build_data(config, split):
    from jaxtrain.systems.hjepa.data import build_data

    return build_data(config, split)


def _pictures(model, batch, config):
    from jaxtrain.systems.hjepa.evals.visualizations import sheets

    return sheets(model, batch, config)


def _histograms(model, batch, config):
    from jaxtrain.systems.hjepa.evals.visualizations import embeddings

    return embeddings(model, batch, config)


def _report(model, source, config, folder):
    from jaxtrain.systems.hjepa.evals.report import report

    return report(model, source, config, folder)


def _build_sequences(config, split):
    from jaxtrain.systems.hjepa.sequences import build_data

    return build_data(config, split)


TASKS = {
    "pretrain": Task(
        sections={
            "data": HJepaData,
            "model": ModelConfig,
            "masking": MaskingConfig,
            "loss": LossConfig,
            "probe": ProbeConfig,
        },
        build_model=pretraining.build_model,
        build_data=_build_data,
        collate=pretraining.collate,
        loss=pretraining.loss,
        outputs=pretraining.outputs,
        eval_statistics=pretraining.eval_statistics,
        compute=pretraining.compute,
        trainable=pretraining.is_trainable,
        param_group=pretraining.param_group,
        after_update=pretraining.after_update,
        schedule=pretraining.schedule,
        initial_weights=pretraining.initial_weights,
        extra_metrics=pretraining.extra_metrics,
        pictures=_pictures,
        histograms=_histograms,
        report=_report,
        twin=TorchTwin(build=_build_twin, call=_call_twin, loss=_twin_loss, after_update=_move_twin),
        traced_hparams=("seed",),
        original=ORIGINAL,
        tiny_config="hjepa_tiny",
    ),
    "world_model": Task(
        sections={"data": SequenceData, "model": WorldModelConfig, "loss": WorldModelLoss},
        build_model=world_model.build_model,
        build_data=_build_sequences,
        loss=world_model.loss,
        outputs=world_model.outputs,
        eval_statistics=world_model.eval_statistics,
        compute=world_model.compute,
        twin=TorchTwin(build=_build_world_twin, call=_call_world_twin),
        couples_samples=True,
        traced_hparams=("seed", "model.predictor_dropout", "loss.sigreg_weight"),
        tiny_config="hjepa_world_tiny",
    ),
}


TORCH_NAMES = (
    "CheckpointManager",
    "CosineScheduler",
    "EMAScheduler",
    "HJEPATrainer",
    "HierarchicalScheduler",
    "LinearScheduler",
    "MetricsLogger",
    "create_ema_scheduler",
    "create_hjepa_model",
    "create_loss_from_config",
    "create_loss_function",
    "create_lr_scheduler",
    "create_masking_function",
    "create_model",
    "create_optimizer",
    "create_train_loader",
    "create_val_loader",
    "load_checkpoint",
    "load_config",
)


def __getattr__(name: str):
    """The original's names, from `torch_compat` at first use: that module imports torch, this one does not."""
    if name not in TORCH_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.torch_compat"), name)
