"""The original's loss registry: a loss module from the `loss` section of a config."""

import difflib
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa import losses
from jaxtrain.systems.hjepa.config import LossConfig
from jaxtrain.systems.hjepa.original.combined_losses import (
    CombinedLoss,
    ContrastiveJEPALoss,
    HierarchicalCombinedLoss,
    HJEPASIGRegLoss,
)
from jaxtrain.systems.hjepa.original.jepa_loss import HJEPALoss
from jaxtrain.systems.hjepa.original.regularizer_losses import SIGRegLoss, VICRegLoss

JEPA_TYPES = ("hjepa", "jepa", "smoothl1", "mse", "huber")
TYPES = (*JEPA_TYPES, "combined", "hierarchical_combined", "vicreg", "sigreg", "hjepa_sigreg", "sigreg_combined")
TYPES += ("cjepa", "contrastive_jepa")
SECTIONS = ("model", "data", "training", "masking", "checkpoint", "logging", "experiment", "evaluation", "distributed")
CONTRASTIVE = ("jepa_weight", "use_cosine_similarity", "contrastive_on_context")


def section_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `loss` section of a nested config, or the config itself if it is one.

    Raises UserError, a ValueError, for an unknown type and unknown keys.
    """
    nested = "loss" in config or any(name in config for name in SECTIONS)
    section = (config.get("loss") or {}) if nested else config
    if not isinstance(section, Mapping):
        raise UserError(f"loss: got {type(section).__name__}, wanted a mapping with `type`")
    kind = str(section.get("type", "combined")).lower()
    if kind not in TYPES:
        raise UserError(f"loss.type: {section['type']!r} is unknown; known: {', '.join(TYPES)}")
    known = {*LossConfig.model_fields, *CONTRASTIVE}
    for key in section:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
            raise UserError(f"loss.{key}: unknown key; {hint}")
    return {**section, "type": kind}


def create_loss_from_config(config: Mapping[str, Any]) -> nn.Module:
    """Build the loss of the original's nested config, or of its `loss` section alone.

    The number of levels is model.num_hierarchies, else the section's num_hierarchies, else 3. Without a type: combined.
    Raises ValueError for an unknown type, an unknown key and invalid values.
    """
    loss_section = section_of(config)
    section = LossConfig(**{key: value for key, value in loss_section.items() if key not in CONTRASTIVE})
    levels = (config.get("model") or {}).get("num_hierarchies") or loss_section.get("num_hierarchies") or 3
    if section.type in JEPA_TYPES and any(key.startswith("vicreg") for key in loss_section):
        text = f"loss.type: {section.type} has no VICReg term; loss.vicreg_* has no effect"
        warnings.warn(text, UserWarning, stacklevel=2)
    further = {key: loss_section[key] for key in CONTRASTIVE if key in loss_section}
    return build_loss(section, levels, further)


create_loss_function = create_loss_from_config  # the name in the README's example


def create_cjepa_loss_from_config(config: Mapping[str, Any], jepa_loss: nn.Module) -> ContrastiveJEPALoss:
    """Build C-JEPA's loss around `jepa_loss` from a config, as `create_loss_from_config` reads it."""
    section = section_of(config)
    names = ("contrastive_weight", "contrastive_temperature", *CONTRASTIVE)
    return ContrastiveJEPALoss(jepa_loss, **{name: section[name] for name in names if name in section})


def build_loss(section: LossConfig, levels: int, further: Mapping[str, Any] | None = None) -> nn.Module:
    """Build the loss of a checked `loss` section. further: more arguments of ContrastiveJEPALoss."""
    options = losses.jepa_options(section)
    jepa = {name: options[name] for name in ("reduction", "normalize_embeddings", "huber_delta", "detach_targets")}
    base = HJEPALoss(options["loss_type"], section.hierarchy_weights, levels, **jepa)
    parts = {"jepa_loss_type": options["loss_type"], "jepa_hierarchy_weights": section.hierarchy_weights}
    parts |= {"num_hierarchies": levels} | jepa
    regular = {
        name: getattr(section, f"vicreg_{name}")
        for name in ("invariance_weight", "variance_weight", "covariance_weight")
    }
    sliced = {
        "num_slices": section.sigreg_num_slices,
        "num_test_points": section.sigreg_num_test_points,
        "invariance_weight": section.sigreg_invariance_weight,
        "sigreg_weight": section.sigreg_weight,
        "fixed_slices": section.sigreg_fixed_slices,
        "test_method": section.sigreg_test_method,
        "char_function_t_min": section.sigreg_char_function_t_min,
        "char_function_t_max": section.sigreg_char_function_t_max,
        "char_function_num_quadrature": section.sigreg_char_function_num_quadrature,
        "char_function_lambda": section.sigreg_char_function_lambda,
    }
    kind = section.type
    if kind == "combined":
        weights = {f"vicreg_{name}": value for name, value in regular.items()}
        return CombinedLoss(**parts, vicreg_weight=section.vicreg_weight, **weights)
    if kind == "hierarchical_combined":
        return HierarchicalCombinedLoss(**parts, vicreg_weight=section.vicreg_weight, vicreg_configs=[regular] * levels)
    if kind in ("hjepa_sigreg", "sigreg_combined"):
        return HJEPASIGRegLoss(base, SIGRegLoss(**sliced), section.sigreg_loss_weight)
    if kind in ("vicreg", "sigreg"):
        loss = VICRegLoss(**regular) if kind == "vicreg" else SIGRegLoss(**sliced)
        loss.hierarchy_weights = section.hierarchy_weights
        return loss
    if kind in ("cjepa", "contrastive_jepa") or section.use_contrastive:
        return ContrastiveJEPALoss(
            base,
            contrastive_weight=section.contrastive_weight,
            contrastive_temperature=section.contrastive_temperature,
            **(further or {}),
        )
    return base
