"""Four tasks of the PSY agents project on BERT-family encoders: classify whether a text shows a symptom (criteria),
and find the sentence that supports it (evidence), separately or together (share, joint)."""

import functools

from jaxtrain.lazy import lazy, lazy_attributes
from jaxtrain.systems.criteria_evidence.config import Data, Decode, JointModel, LossSettings
from jaxtrain.systems.criteria_evidence.config import Model as ModelSection
from jaxtrain.systems.criteria_evidence.data import build_data, example
from jaxtrain.systems.criteria_evidence.hf_folder import export, initial_weights
from jaxtrain.systems.criteria_evidence.losses import loss, outputs
from jaxtrain.systems.criteria_evidence.metrics import compute, eval_statistics
from jaxtrain.systems.criteria_evidence.model import build_model, param_group, trainable
from jaxtrain.systems.criteria_evidence.original.legacy_config import ORIGINAL
from jaxtrain.systems.criteria_evidence.original.schedules import schedule
from jaxtrain.task import Task, TorchTwin

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
            "model": JointModel if architecture == "joint" else ModelSection,
            "data": Data,
            "loss": LossSettings,
            "decode": Decode,
        },
        build_model=of(build_model),
        build_data=of(build_data),
        example=of(example),
        loss=loss,
        outputs=outputs,
        eval_statistics=eval_statistics,
        compute=compute,
        trainable=of(trainable),
        param_group=param_group,
        initial_weights=initial_weights,
        shard_rules=of(lazy("jaxtrain.systems.criteria_evidence.shard_rules:shard_rules")),
        schedule=schedule,
        report=of(lazy("jaxtrain.systems.criteria_evidence.evals.report:write")),
        twin=TorchTwin(
            build=of(lazy("jaxtrain.systems.criteria_evidence.torch_twin:build")),
            call=lazy("jaxtrain.systems.criteria_evidence.torch_twin:call"),
            loss=lazy("jaxtrain.systems.criteria_evidence.torch_twin:loss"),
            checkpoint=lazy("jaxtrain.systems.criteria_evidence.original.checkpoint_files:write"),
            hf=of(export),
            hf_files=lazy("jaxtrain.systems.criteria_evidence.data:tokenizer_files"),
        ),
        traced_hparams=NUMBERS + (("model.fusion_dropout",) if architecture == "joint" else ()),
        original=ORIGINAL,
    )


TASKS = {name: _task(name) for name in ("criteria", "evidence", "share", "joint")}


ORIGINAL_NAMES = {
    "csv_files": ("criterion_text",),
    "original.datasets": ("CriteriaDataset", "EvidenceDataset", "JointDataset", "ShareDataset"),
    "original.loaders": (
        "ClassificationDataset",
        "create_dataloaders",
        "get_optimal_dataloader_kwargs",
        "group_split_by_post_id",
        "load_criteria_dataset",
        "load_evidence_dataset",
        "load_joint_dataset",
        "load_share_dataset",
        "load_splits_json",
        "random_split_indices",
        "save_splits_json",
        "split_dataset",
    ),
    "original.torch_compat": (
        "compute_total_steps",
        "archive_trial_summary",
        "criterion_texts",
        "ensure_directory",
        "get_device",
        "get_logger",
        "print_system_info",
        "prune_directory_except",
        "set_seed",
    ),
    "original.encoder_models": ("CriteriaModel", "EvidenceModel", "TransformerEncoder"),
    "original.groundtruth": ("normalize_status", "parse_cases"),
    "original.groundtruth_frames": (
        "GroundTruthValidator",
        "normalize_status_value",
        "parse_cases_field",
        "create_criteria_groundtruth",
        "create_evidence_groundtruth",
        "load_dsm_criteria",
        "load_field_map",
        "make_groundtruth",
        "validate_strict_separation",
    ),
    "original.mlflow_runs": (
        "cleanup_mlflow_runs",
        "config_hash",
        "configure_mlflow",
        "download_mlflow_artifacts",
        "git_sha",
        "log_config",
        "mlflow_run",
        "resolve_artifact_location",
        "resolve_tracking_uri",
    ),
    "original.optuna_runner": ("OptunaRunner", "create_search_space_from_config"),
    "original.architectures": ("Model",),
    "original.redsm5": ("DSMCriteriaLoader", "ReDSM5DataLoader"),
    "original.prediction": ("predict", "predict_texts"),
    "original.training": ("Trainer",),
    "original.training_setup": (
        "EarlyStopping",
        "Evaluator",
        "FocalLoss",
        "class_weights",
        "create_optimizer",
        "create_scheduler",
        "get_scheduler",
        "multi_task_loss",
        "span_loss",
    ),
}
__getattr__ = lazy_attributes(__name__, ORIGINAL_NAMES)
