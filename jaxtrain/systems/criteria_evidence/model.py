"""Build the model of a config, and decide which parameters are trained and in which parameter group."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence import architecture_models, base_models, project_models
from jaxtrain.systems.criteria_evidence.encoder_config import Encoder
from jaxtrain.systems.criteria_evidence.encoders import unread_by
from jaxtrain.systems.criteria_evidence.lora import add_lora, is_adapter

FAMILIES = {"project": project_models, "architectures": architecture_models, "base": base_models}
ARCHITECTURES = ("criteria", "evidence", "share", "joint")
CLASSES = {"criteria": "Criteria", "evidence": "Evidence", "share": "Share", "joint": "Joint"}


def build(
    family: str,
    architecture: str,
    encoders: Mapping[str, Encoder],
    *,
    rngs: nnx.Rngs,
    **options,
) -> nnx.Module:
    """Return a model of a family: project, architectures or base.

    architecture: criteria, evidence, share, joint (base has the first two only, else UserError). encoders: {"encoder":
    ...}, for joint {"criteria_encoder": ..., "evidence_encoder": ...}. options: keyword arguments of the constructor.
    """
    if family == "base":
        if architecture not in ("criteria", "evidence"):
            raise UserError(f"model.family: base has criteria and evidence only, not {architecture}")
        return base_models.Classifier(encoders["encoder"], rngs=rngs, **options)
    kind = getattr(FAMILIES[family], CLASSES[architecture])
    names = ("criteria_encoder", "evidence_encoder") if architecture == "joint" else ("encoder",)
    return kind(*(encoders[name] for name in names), rngs=rngs, **options)


def unread(family: str, architecture: str, encoders: Mapping[str, Encoder], pooling: str = "cls") -> tuple[str, ...]:
    """Return the key prefixes of parameters that get no gradient because no output depends on them."""
    if family == "base":
        names = unread_by(encoders["encoder"], "encoder.encoder", False)
        with_lora = unread_by(encoders["encoder"], "encoder.encoder.base_model.model", False)
        return names + with_lora
    reads = architecture != "evidence" and (family == "project" or pooling == "cls")
    if architecture == "joint":
        first = unread_by(encoders["criteria_encoder"], "criteria_encoder", reads)
        return first + unread_by(encoders["evidence_encoder"], "evidence_encoder", False)
    return unread_by(encoders["encoder"], "encoder", reads)


def build_model(architecture: str, config: Any, rngs: nnx.Rngs) -> nnx.Module:
    """Return the config's model with random weights, LoRA adapters included."""
    model = config.model
    encoders = encoders_of(architecture, model)
    built = build(model.family, architecture, encoders, rngs=rngs, **options_of(architecture, model))
    if model.lora.enabled and model.family != "base":
        for name, sizes in encoders.items():
            setattr(built, name, add_lora(getattr(built, name), model.lora, sizes, rngs=rngs))
    return built


def encoders_of(architecture: str, model: Any) -> dict[str, Encoder]:
    """Return the encoder configs by attribute name, with model.encoder_dropout applied if it is set."""
    sizes = {"encoder": model.encoder}
    if architecture == "joint":
        sizes = {"criteria_encoder": model.encoder, "evidence_encoder": model.evidence_encoder}
    if model.encoder_dropout is None:
        return sizes
    rate = {"hidden_dropout_prob": model.encoder_dropout, "attention_probs_dropout_prob": model.encoder_dropout}
    return {name: encoder.model_copy(update=rate) for name, encoder in sizes.items()}


def options_of(architecture: str, model: Any) -> dict[str, Any]:
    """Return the keyword arguments of the family's constructor."""
    criteria, evidence = model.criteria.chosen(), model.evidence.chosen()
    if model.family == "base":
        options = {"num_classes": model.num_labels, "pooling_strategy": model.base_pooling, "lora": model.lora}
        return options | {"hidden_dim": model.base_hidden, "dropout": criteria.get("dropout", 0.1)}
    if architecture == "criteria":
        return {"head_cfg": criteria, "num_labels": model.num_labels}
    if architecture == "evidence":
        return {"head_cfg": evidence}
    options = {"head_cfg": {"criteria": criteria, "evidence": evidence}, "criteria_num_labels": model.num_labels}
    return options | ({"fusion_dropout": model.fusion_dropout} if architecture == "joint" else {})


def trainable(architecture: str, key: str, config: Any) -> bool:
    """Return False for a parameter that the config freezes or that no output depends on.

    With LoRA, only the adapters of an encoder are trained.
    """
    if config.model.lora.enabled and "encoder." in key:
        return is_adapter(key)
    return not key.startswith(frozen_prefixes(architecture, config.model))


def frozen_prefixes(architecture: str, model: Any) -> tuple[str, ...]:
    """Return the key prefixes of parameters that are not trained."""
    encoders = encoders_of(architecture, model)
    prefixes = list(unread(model.family, architecture, encoders, model.criteria.pooling or "cls"))
    for name in encoders:
        root = f"{name}.encoder." if model.family == "base" else f"{name}."
        if model.freeze_encoder:
            prefixes.append(root)
        if model.freeze_layers:
            prefixes.append(f"{root}embeddings.")
            prefixes += [f"{root}encoder.layer.{i}." for i in range(model.freeze_layers)]
    return tuple(prefixes)


def param_group(key: str, config: Any) -> str:
    """Return the parameter group, `encoder` or `heads`; `optim.groups: {heads: {lr: 1e-3}}` sets the heads' rate."""
    return "encoder" if "encoder." in key else "heads"
