"""From a config to the model: heads' options, what is trained, which group a parameter is in."""

from typing import Any

from flax import nnx

from jaxtrain.systems.criteria_evidence import families
from jaxtrain.systems.criteria_evidence.encoder_config import Encoder
from jaxtrain.systems.criteria_evidence.lora import add_lora, is_adapter


def build_model(architecture: str, config: Any, rngs: nnx.Rngs) -> nnx.Module:
    """The config's model with freshly drawn weights."""
    model = config.model
    encoders = encoders_of(architecture, model)
    built = families.build(model.family, architecture, encoders, rngs=rngs, **options_of(architecture, model))
    if model.lora.enabled and model.family != "base":
        for name, sizes in encoders.items():
            setattr(built, name, add_lora(getattr(built, name), model.lora, sizes, rngs=rngs))
    return built


def encoders_of(architecture: str, model: Any) -> dict[str, Encoder]:
    """Encoder sizes by attribute name, the config's dropout in place."""
    sizes = {"encoder": model.encoder}
    if architecture == "joint":
        sizes = {"criteria_encoder": model.encoder, "evidence_encoder": model.evidence_encoder}
    if model.encoder_dropout is None:
        return sizes
    rate = {"hidden_dropout_prob": model.encoder_dropout, "attention_probs_dropout_prob": model.encoder_dropout}
    return {name: encoder.model_copy(update=rate) for name, encoder in sizes.items()}


def options_of(architecture: str, model: Any) -> dict[str, Any]:
    """Keyword arguments of the family's constructor."""
    criteria, evidence = model.criteria.given(), model.evidence.given()
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
    """False for what is frozen by the config, and for what no output reads."""
    if config.model.lora.enabled and "encoder." in key:
        return is_adapter(key)
    return not key.startswith(frozen_prefixes(architecture, config.model))


def frozen_prefixes(architecture: str, model: Any) -> tuple[str, ...]:
    """Prefixes of the keys that are not trained."""
    encoders = encoders_of(architecture, model)
    prefixes = list(families.unread(model.family, architecture, encoders, model.criteria.pooling or "cls"))
    for name in encoders:
        root = f"{name}.encoder." if model.family == "base" else f"{name}."
        if model.freeze_encoder:
            prefixes.append(root)
        if model.freeze_layers:
            prefixes.append(f"{root}embeddings.")
            prefixes += [f"{root}encoder.layer.{i}." for i in range(model.freeze_layers)]
    return tuple(prefixes)


def param_group(key: str, config: Any) -> str:
    """`encoder` or `heads`: `optim.groups: {heads: {lr: 1e-3}}` gives the heads a rate of their own."""
    return "encoder" if "encoder." in key else "heads"
