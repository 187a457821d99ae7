"""The model of a family and an architecture, and which of its parameters no output reads."""

from collections.abc import Mapping

from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence import architecture_models, base_models, project_models
from jaxtrain.systems.criteria_evidence.encoder_config import Encoder
from jaxtrain.systems.criteria_evidence.encoders import unread_by

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
    """family: project, architectures or base. architecture: criteria, evidence, share, joint (base: the first two).

    encoders: {"encoder": ...}, for joint {"criteria_encoder": ..., "evidence_encoder": ...}. options: the keyword
    arguments of that family's constructor. Raises UserError for what the family does not have.
    """
    if family == "base":
        if architecture not in ("criteria", "evidence"):
            raise UserError(f"model.family: base has criteria and evidence only, not {architecture}")
        return base_models.Classifier(encoders["encoder"], rngs=rngs, **options)
    kind = getattr(FAMILIES[family], CLASSES[architecture])
    names = ("criteria_encoder", "evidence_encoder") if architecture == "joint" else ("encoder",)
    return kind(*(encoders[name] for name in names), rngs=rngs, **options)


def unread(family: str, architecture: str, encoders: Mapping[str, Encoder], pooling: str = "cls") -> tuple[str, ...]:
    """Prefixes of the parameters that get no gradient because no output depends on them."""
    if family == "base":
        found = unread_by(encoders["encoder"], "encoder.encoder", False)
        with_lora = unread_by(encoders["encoder"], "encoder.encoder.base_model.model", False)
        return found + with_lora
    reads = architecture != "evidence" and (family == "project" or pooling == "cls")
    if architecture == "joint":
        first = unread_by(encoders["criteria_encoder"], "criteria_encoder", reads)
        return first + unread_by(encoders["evidence_encoder"], "evidence_encoder", False)
    return unread_by(encoders["encoder"], "encoder", reads)
