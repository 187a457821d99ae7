"""Model family `project` (the original's `Project`): criteria, evidence, share and joint with plain heads.

Every model takes the batch's tensors by name and returns a dict: logits float [batch, class], start_logits and
end_logits float [batch, token], as far as it has them.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence.encoder_config import Encoder
from jaxtrain.systems.criteria_evidence.encoders import build_encoder


def hidden_widths(width: int, layer_num: int, hidden_dims: Sequence[int] | None) -> list[int]:
    """Return the widths of the layer_num - 1 hidden layers: hidden_dims, or `width` for each.

    Raises UserError for layer_num < 1 or another number of hidden_dims.
    """
    if layer_num < 1:
        raise UserError(f"layer_num must be >= 1, got {layer_num}")
    widths = [width] * (layer_num - 1) if hidden_dims is None else list(hidden_dims)
    if len(widths) != layer_num - 1:
        raise UserError(f"hidden_dims must have layer_num - 1 = {layer_num - 1} entries, got {widths}")
    return widths


class ClassificationHead(nnx.Module):
    """Classifier: dropout -> [Linear -> GELU -> dropout] x (layer_num - 1) -> output_layer.

    hidden_dims: widths of the hidden layers, in_features for each by default. Raises UserError if there are not
    layer_num - 1 of them.
    """

    def __init__(
        self, in_features: int, num_labels: int, dropout: float = 0.1, layer_num: int = 1, hidden_dims=None, *, rngs
    ):
        widths = hidden_widths(in_features, layer_num, hidden_dims)
        self.dropout = nn.Dropout(dropout)
        parts = []
        for before, width in zip([in_features, *widths], widths, strict=False):
            parts += [nn.Linear(before, width, rngs=rngs), nn.Activation(nn.gelu), nn.Dropout(dropout)]
        self.hidden_layers = nn.Sequential(*parts)
        self.output_layer = nn.Linear([in_features, *widths][-1], num_labels, rngs=rngs)

    def __call__(self, x, rngs=None):
        return self.output_layer(self.hidden_layers(self.dropout(x, rngs), rngs))


class SpanPredictionHead(nnx.Module):
    """Span head: [batch, token, width] -> start and end logits [batch, token]; channel 0 of `linear` is the start."""

    def __init__(self, in_features: int, dropout: float = 0.1, *, rngs: nnx.Rngs):
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(in_features, 2, rngs=rngs)

    def __call__(self, x, rngs=None):
        y = self.linear(self.dropout(x, rngs))
        return y[..., 0], y[..., 1]


def classifier_options(head_cfg, task_cfg, num_labels, dropout, layer_num, hidden_dims) -> dict:
    """Return ClassificationHead's options by the original's precedence: head_cfg and task_cfg win over the arguments.

    A list of hidden widths, even an empty one, decides the number of layers. head_cfg's activation and pooling are
    ignored.
    """
    head, task = dict(head_cfg or {}), dict(task_cfg or {})
    layer_num = head.get("layers", layer_num)
    hidden = head.get("hidden", hidden_dims)
    if isinstance(hidden, int):
        hidden = [hidden] * (layer_num - 1)
    if hidden is not None:
        hidden, layer_num = list(hidden), len(hidden) + 1
    return {
        "num_labels": task.get("num_labels", num_labels),
        "dropout": head.get("dropout", dropout),
        "layer_num": layer_num,
        "hidden_dims": hidden,
    }


def part(head_cfg, name: str) -> dict:
    """Return the "criteria" or "evidence" part of a head_cfg; a flat head_cfg is used for both."""
    head = dict(head_cfg or {})
    return dict(head.get(name) or {}) if {"criteria", "evidence", "shared"} & set(head) else head


def first_or_pooled(encoding):
    return encoding.hidden[:, 0] if encoding.pooled is None else encoding.pooled


class Criteria(nnx.Module):
    """Classifier of whether the annotated symptom is present; returns logits [batch, class]."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        head_cfg=None,
        task_cfg=None,
        num_labels: int = 2,
        classifier_dropout: float = 0.1,
        classifier_layer_num: int = 1,
        classifier_hidden_dims=None,
        rngs: nnx.Rngs,
    ):
        options = classifier_options(
            head_cfg, task_cfg, num_labels, classifier_dropout, classifier_layer_num, classifier_hidden_dims
        )
        self.encoder = build_encoder(encoder, rngs=rngs)
        self.classifier = ClassificationHead(encoder.hidden_size, **options, rngs=rngs)

    def __call__(self, input_ids, attention_mask=None, token_type_ids=None, rngs=None) -> dict:
        encoding = self.encoder(input_ids, attention_mask, token_type_ids, rngs)
        return {"logits": self.classifier(first_or_pooled(encoding), rngs)}


class Evidence(nnx.Module):
    """Span model that finds the supporting sentence in the post; returns start_logits, end_logits [batch, token]."""

    def __init__(self, encoder: Encoder, *, head_cfg=None, task_cfg=None, dropout_prob: float = 0.1, rngs):
        self.encoder = build_encoder(encoder, rngs=rngs)
        dropout = dict(head_cfg or {}).get("dropout", dropout_prob)
        self.span_head = SpanPredictionHead(encoder.hidden_size, dropout, rngs=rngs)

    def __call__(self, input_ids, attention_mask=None, token_type_ids=None, rngs=None) -> dict:
        start, end = self.span_head(self.encoder(input_ids, attention_mask, token_type_ids, rngs).hidden, rngs)
        return {"start_logits": start, "end_logits": end}


class Share(nnx.Module):
    """Criteria and evidence heads on one shared encoder."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        head_cfg=None,
        task_cfg=None,
        criteria_num_labels: int = 2,
        criteria_dropout: float = 0.1,
        criteria_layer_num: int = 1,
        criteria_hidden_dims=None,
        evidence_dropout: float = 0.1,
        rngs: nnx.Rngs,
    ):
        options = classifier_options(
            part(head_cfg, "criteria"),
            task_cfg,
            criteria_num_labels,
            criteria_dropout,
            criteria_layer_num,
            criteria_hidden_dims,
        )
        width = encoder.hidden_size
        self.encoder = build_encoder(encoder, rngs=rngs)
        self.criteria_head = ClassificationHead(width, **options, rngs=rngs)
        dropout = part(head_cfg, "evidence").get("dropout", evidence_dropout)
        self.evidence_head = SpanPredictionHead(width, dropout, rngs=rngs)

    def __call__(self, input_ids, attention_mask=None, token_type_ids=None, rngs=None) -> dict:
        encoding = self.encoder(input_ids, attention_mask, token_type_ids, rngs)
        logits = self.criteria_head(first_or_pooled(encoding), rngs)
        start, end = self.evidence_head(encoding.hidden, rngs)
        return {"logits": logits, "start_logits": start, "end_logits": end}


class Joint(nnx.Module):
    """Model with two encoders; `fusion` of the criteria text's vector is added to every token of the post.

    With this linear span head the fusion shifts all start (and all end) logits of a row equally, so it changes neither
    loss nor prediction. It is kept because checkpoints contain it.
    """

    def __init__(
        self,
        criteria_encoder: Encoder,
        evidence_encoder: Encoder,
        *,
        head_cfg=None,
        task_cfg=None,
        criteria_num_labels: int = 2,
        criteria_dropout: float = 0.1,
        criteria_layer_num: int = 1,
        criteria_hidden_dims=None,
        evidence_dropout: float = 0.1,
        fusion_dropout: float = 0.1,
        rngs: nnx.Rngs,
    ):
        options = classifier_options(
            part(head_cfg, "criteria"),
            task_cfg,
            criteria_num_labels,
            criteria_dropout,
            criteria_layer_num,
            criteria_hidden_dims,
        )
        ours, theirs = criteria_encoder.hidden_size, evidence_encoder.hidden_size
        self.criteria_encoder = build_encoder(criteria_encoder, rngs=rngs)
        self.evidence_encoder = build_encoder(evidence_encoder, rngs=rngs)
        self.criteria_head = ClassificationHead(ours, **options, rngs=rngs)
        fusion = nn.Linear(ours, theirs, rngs=rngs)
        self.fusion = nn.Sequential(nn.Dropout(fusion_dropout), fusion, nn.Activation(nn.gelu))
        dropout = part(head_cfg, "evidence").get("dropout", evidence_dropout)
        self.evidence_head = SpanPredictionHead(theirs, dropout, rngs=rngs)

    def __call__(
        self,
        criteria_input_ids,
        criteria_attention_mask=None,
        criteria_token_type_ids=None,
        evidence_input_ids=None,
        evidence_attention_mask=None,
        evidence_token_type_ids=None,
        rngs=None,
    ) -> dict:
        """Return the logits by name. Without evidence ids, both encoders read the criteria text, mask and types."""
        criteria = (criteria_input_ids, criteria_attention_mask, criteria_token_type_ids)
        evidence = (evidence_input_ids, evidence_attention_mask, evidence_token_type_ids)
        first = self.criteria_encoder(*criteria, rngs)
        second = self.evidence_encoder(*(criteria if evidence_input_ids is None else evidence), rngs)
        pooled = first_or_pooled(first)
        fused = second.hidden + jnp.expand_dims(self.fusion(pooled, rngs), 1)
        start, end = self.evidence_head(fused, rngs)
        return {"logits": self.criteria_head(pooled, rngs), "start_logits": start, "end_logits": end}
