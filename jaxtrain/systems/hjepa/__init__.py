"""H-JEPA: hierarchical joint-embedding predictive pre-training of vision transformers, and the LeWM world model."""

from jaxtrain.lazy import lazy, lazy_attributes
from jaxtrain.systems.hjepa import metrics, pretraining, world_model
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
        build_data=lazy("jaxtrain.systems.hjepa.data:build_data"),
        example=lazy("jaxtrain.systems.hjepa.data:example"),
        collate=pretraining.collate,
        loss=pretraining.loss,
        outputs=pretraining.outputs,
        eval_statistics=metrics.eval_statistics,
        compute=metrics.compute,
        trainable=pretraining.is_trainable,
        param_group=pretraining.param_group,
        after_update=pretraining.after_update,
        schedule=pretraining.schedule,
        initial_weights=pretraining.initial_weights,
        extra_metrics=pretraining.extra_metrics,
        pictures=lazy("jaxtrain.systems.hjepa.evals.visualizations:sheets"),
        histograms=lazy("jaxtrain.systems.hjepa.evals.visualizations:embeddings"),
        report=lazy("jaxtrain.systems.hjepa.evals.report:report"),
        twin=TorchTwin(
            build=lazy("jaxtrain.systems.hjepa.torch_twin:HJEPA"),
            call=lazy("jaxtrain.systems.hjepa.torch_twin:call"),
            loss=lazy("jaxtrain.systems.hjepa.torch_twin:loss"),
            inputs=lazy("jaxtrain.systems.hjepa.torch_twin:inputs"),
            after_update=lazy("jaxtrain.systems.hjepa.torch_twin:after_update"),
            checkpoint=lazy("jaxtrain.systems.hjepa.original.checkpoint_files:write"),
        ),
        traced_hparams=("seed",),
        original=ORIGINAL,
    ),
    "world_model": Task(
        sections={"data": SequenceData, "model": WorldModelConfig, "loss": WorldModelLoss},
        build_model=world_model.build_model,
        build_data=lazy("jaxtrain.systems.hjepa.sequences:build_data"),
        loss=world_model.loss,
        outputs=world_model.outputs,
        eval_statistics=world_model.eval_statistics,
        compute=world_model.compute,
        twin=TorchTwin(
            build=lazy("jaxtrain.systems.hjepa.torch_twin:LeWorldModel"),
            call=lazy("jaxtrain.systems.hjepa.torch_twin:call_world_model"),
        ),
        couples_samples=True,
        traced_hparams=("seed", "model.predictor_dropout", "loss.sigreg_weight"),
    ),
}

ORIGINAL_NAMES = {
    "original.jepa_loss": ("HJEPALoss",),
    "original.regularizer_losses": (
        "AdaptiveVICRegLoss",
        "EppsPulley",
        "EppsPulleyTest",
        "HybridVICRegSIGRegLoss",
        "NTXentLoss",
        "SIGRegLoss",
        "VICRegLoss",
    ),
    "original.combined_losses": (
        "CombinedLoss",
        "ContrastiveJEPALoss",
        "HJEPASIGRegLoss",
        "HierarchicalCombinedLoss",
    ),
    "original.loss_registry": ("create_cjepa_loss_from_config", "create_loss_from_config", "create_loss_function"),
    "original.mask_generators": ("HierarchicalMaskGenerator", "MultiBlockMaskGenerator", "MultiCropMaskGenerator"),
    "original.datasets": ("build_dataset", "create_train_loader", "create_val_loader"),
    "original.encoders": ("ContextEncoder", "Predictor", "TargetEncoder", "create_encoder", "create_predictor"),
    "original.hjepa_model": (
        "HJEPA",
        "create_hjepa",
        "create_hjepa_from_config",
        "create_hjepa_model",
        "create_model",
    ),
    "original.trainer": ("HJEPATrainer",),
    "original.progress": ("EarlyStopping", "ProgressTracker"),
    "original.metrics_logger": ("MetricsLogger",),
    "original.schedules": (
        "CosineScheduler",
        "EMAScheduler",
        "HierarchicalScheduler",
        "LinearScheduler",
        "create_ema_scheduler",
        "create_lr_scheduler",
    ),
    "original.features": (
        "JEPAEvalTransform",
        "JEPATransform",
        "LinearProbe",
        "OptimizedHJEPA",
        "extract_features",
    ),
    "original.rope": ("VisionRoPE2D",),
    "original.world_model": (
        "ActionPredictor",
        "CEMPlanner",
        "FrameEncoder",
        "LeWM",
        "create_action_predictor",
        "create_lewm",
        "create_lewm_from_config",
    ),
    "original.torch_checkpoint": ("CheckpointManager",),
    "original.torch_compat": (
        "create_masking_function",
        "create_optimizer",
        "load_checkpoint",
        "load_config",
    ),
}
__getattr__ = lazy_attributes(__name__, ORIGINAL_NAMES)
