"""SplatNLP: a set transformer that completes builds, and a sparse autoencoder on its activations."""

from jaxtrain.lazy import lazy, lazy_attributes
from jaxtrain.systems.set_completion import features, losses, metrics, model
from jaxtrain.systems.set_completion.config import ModelConfig, SaeConfig, SetDataConfig
from jaxtrain.systems.set_completion.data import build_data, collate_sets
from jaxtrain.systems.set_completion.original.command_line import FLAGS, SAE_FLAGS
from jaxtrain.task import Task, TorchTwin

TASKS = {
    "complete": Task(
        sections={"model": ModelConfig, "data": SetDataConfig},
        build_model=lambda config, rngs: model.SetCompletionModel(**config.model.arguments(), rngs=rngs),
        build_data=build_data,
        collate=collate_sets,
        loss=losses.loss,
        outputs=losses.outputs,
        eval_statistics=metrics.eval_statistics,
        compute=metrics.compute,
        report=lazy("jaxtrain.systems.set_completion.evals.report:completion_report"),
        twin=TorchTwin(
            build=lazy("jaxtrain.systems.set_completion.torch_twin:build"),
            call=lazy("jaxtrain.systems.set_completion.torch_twin:call"),
            loss=lazy("jaxtrain.systems.set_completion.torch_twin:loss"),
            checkpoint=lazy("jaxtrain.systems.set_completion.original.torch_files:write"),
        ),
        traced_hparams=("seed", "model.dropout"),
        flags=FLAGS,
    ),
    "sae": Task(
        sections={"model": ModelConfig, "data": SetDataConfig, "sae": SaeConfig},
        build_model=features.build_model,
        build_data=build_data,
        collate=collate_sets,
        loss=features.loss,
        outputs=features.outputs,
        eval_statistics=features.eval_statistics,
        compute=features.compute,
        trainable=features.trainable,
        after_update=features.after_update,
        schedule=features.schedule,
        couples_samples=True,  # the loss is computed on rows of the activation buffer
        initial_weights=features.initial_weights,
        report=lazy("jaxtrain.systems.set_completion.evals.report:feature_report"),
        twin=TorchTwin(
            **{
                part: lazy(f"jaxtrain.systems.set_completion.torch_twin:{part}_features")
                for part in ("build", "call", "loss", "inputs", "after_update")
            },
            checkpoint=lazy("jaxtrain.systems.set_completion.original.torch_files:write"),
        ),
        flags=FLAGS | SAE_FLAGS,
        traced_hparams=("seed", "sae.l1_coefficient", "sae.usage_coefficient", "sae.target_usage"),
    ),
}

ORIGINAL_NAMES = {
    "torch_model": (
        "InducedSetAttentionBlock",
        "MultiheadAttentionBlock",
        "PoolingMultiheadAttention",
        "SelfAttentionBlock",
        "SetCompletionModel",
        "SetTransformer",
        "SetTransformerLayer",
    ),
    "torch_sae": ("SAEConfig", "SetCompletionHook", "SparseAutoencoder", "register_hooks"),
    "torch_buffer": ("ActivationBuffer",),
    "vocabulary": ("NULL", "PAD", "tokenize_build"),
    "original.inference": ("build_predict_abilities",),
    "original.torch_data": (
        "SetDataset",
        "create_collate_fn",
        "generate_dataloaders",
        "generate_tokenized_datasets",
        "tokenize",
    ),
    "original.training": (
        "TrainingConfig",
        "convert_ddp_state",
        "create_multi_hot_targets",
        "test_model",
        "train_epoch",
        "train_model",
        "validate",
    ),
    "original.decoding": (
        "Allocator",
        "TOKEN_BONUS",
        "expand_capstones_to_context",
        "greedy_closure",
        "load_json",
        "reconstruct_build",
        "reconstruct_builds_batched",
    ),
    "builds": ("AbilityToken", "Build"),
    "original.epoch_metrics": ("update_epoch_metrics", "update_progress_bar"),
    "original.sae_evaluation": ("evaluate_reconstruction_impact", "evaluate_sae_model", "setup_hook"),
    "original.sae_training": ("train_sae_model",),
    "original.grid_search": ("grid_search",),
    "original.early_stopping": ("EarlyStopping",),
    "original.torch_compat": ("DataLoader", "DistributedDataParallel", "fit", "save_artifacts"),
}
__getattr__ = lazy_attributes(__name__, ORIGINAL_NAMES)
